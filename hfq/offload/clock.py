"""Times of copies and computation on the host's clock, also for an accelerator."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock"]


class Clock(Protocol):
    """Takes stamps, and returns their times later."""

    def stamp_copies(self) -> Any:
        """Returns a stamp of the time when all copies so far are done."""

    def stamp_compute(self) -> Any:
        """Returns a stamp of the time when all computation submitted so far is done."""

    def seconds(self, stamp: Any) -> float:
        """Returns the time of a stamp in seconds of `time.perf_counter`; waits for it."""


class HostClock:
    """Clock of a device that computes synchronously."""

    def stamp_copies(self) -> float:
        return time.perf_counter()

    def stamp_compute(self) -> float:
        return time.perf_counter()

    def seconds(self, stamp: float) -> float:
        return stamp


class CudaClock:
    """Clock of CUDA events.

    It follows the CUDA programming model, as `CudaCopyStream` does. It has not run on a GPU.

    Args:
        device: The execution device.
        copies: The stream that copies.
    """

    def __init__(self, device: torch.device, copies: torch.cuda.Stream) -> None:
        self._device, self._copies = device, copies
        self._first = torch.cuda.Event(enable_timing=True)
        self._first.record(torch.cuda.current_stream(device))
        self._first.synchronize()
        self._began = time.perf_counter()

    def stamp_copies(self) -> torch.cuda.Event:
        return self._copies.record_event(torch.cuda.Event(enable_timing=True))

    def stamp_compute(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))

    def seconds(self, stamp: torch.cuda.Event) -> float:
        stamp.synchronize()
        return self._began + self._first.elapsed_time(stamp) / 1e3
