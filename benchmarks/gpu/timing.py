"""Times of a device and of the host, with the same code for each kind of accelerator."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.bench import NotAvailable

__all__ = ["best_rate", "capture", "device_seconds", "host_seconds", "launches", "reset_peak", "synchronize"]


def device_seconds(call: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    """Returns the median seconds of a call on the device, by events; the host does not wait within.

    Args:
        call: Submits work to the current stream.
        device: The accelerator.
        times: Number of measured calls, after one that is not measured.
    """
    call()
    torch.accelerator.synchronize(device)
    stream = torch.accelerator.current_stream(device)
    stamps = []
    for _ in range(times):
        first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
        stream.record_event(first)
        call()
        stream.record_event(last)
        stamps.append((first, last))
    torch.accelerator.synchronize(device)
    return statistics.median(first.elapsed_time(last) / 1e3 for first, last in stamps)


def best_rate(amount: float, call: Callable[[], Any], device: torch.device, times: int = 3) -> float:
    """Returns an amount per second of the fastest call on the host's clock, which waits for the device."""
    best = float("inf")
    for _ in range(times):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return amount / best


def synchronize(device: torch.device) -> None:
    """Waits for a device; a CPU has nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def host_seconds(call: Callable[[], Any], device: torch.device, times: int = 100) -> float:
    """Returns the seconds in which the host submits a call: the median of five series without a wait."""
    call()
    found = []
    for _ in range(5):
        torch.accelerator.synchronize(device)
        started = time.perf_counter()
        for _ in range(times):
            call()
        found.append((time.perf_counter() - started) / times)
    torch.accelerator.synchronize(device)
    return statistics.median(found)


def capture(call: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """Returns a function that replays a call as a graph.

    Raises:
        NotAvailable: The device has no graphs.
        RuntimeError: The call cannot be captured.
    """
    module = torch.get_device_module(device)
    if not hasattr(module, "CUDAGraph"):
        raise NotAvailable(f"torch has no graphs for {device.type}")
    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):  # the first calls allocate, and compile kernels
        for _ in range(2):
            call()
    module.current_stream().wait_stream(side)
    graph = module.CUDAGraph()
    with module.graph(graph):
        call()
    return graph.replay


def launches(call: Callable[[], Any], device: torch.device) -> int:
    """Returns the number of kernels, copies, and fills that a call submits to the device."""
    call()
    torch.accelerator.synchronize(device)
    module = torch.get_device_module(device)
    if hasattr(module, "take_counts"):  # the simulated accelerator
        module.take_counts()
        call()
        return module.take_counts()["queued"]
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.accelerator.synchronize(device)
    of_device = torch.autograd.DeviceType.CUDA
    return sum(each.count for each in profiled.key_averages() if each.device_type == of_device)


def reset_peak(device: torch.device) -> None:
    """Frees cached memory of the device, and resets its peak."""
    module = torch.get_device_module(device)
    torch.accelerator.synchronize(device)
    module.empty_cache()
    module.reset_peak_memory_stats(device)
