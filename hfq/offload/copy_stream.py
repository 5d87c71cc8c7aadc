"""Copies from pinned host memory to an accelerator while it computes."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from hfq.kernels.cuda import host_memory
from hfq.offload.clock import Clock, EventClock, HostClock
from hfq.offload.unit_layout import PAGE

__all__ = ["AcceleratorCopyStream", "CopyStream", "SynchronousCopyStream", "clock_of", "copy_stream_to"]


class CopyStream(Protocol):
    """Copies bytes to the execution device.

    A mark is a point in the order of the copies or of the computation.
    """

    def empty(self, nbytes: int) -> torch.Tensor:
        """Returns device memory: uint8 [nbytes]."""

    def pin(self, memory: torch.Tensor) -> torch.Tensor:
        """Pins host memory, so that copies run while the device computes; returns it."""

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Returns pinned host memory for a short use: uint8 [nbytes]."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Starts a copy; copies finish in the order of their starts."""

    def bring(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the bytes of a `host_buffer` in memory of the device; waits for the copy."""

    def mark(self) -> Any:
        """Returns the point after all copies so far."""

    def mark_compute(self) -> Any:
        """Returns the point after all computation submitted so far."""

    def copy_after(self, mark: Any) -> None:
        """Makes later copies wait for a mark of the computation."""

    def compute_after(self, mark: Any) -> None:
        """Makes later computation wait for a mark of the copies."""

    def is_past(self, mark: Any) -> bool:
        """Returns True if the device has reached a mark."""

    def synchronize(self, mark: Any) -> None:
        """Waits on the host for a mark of the copies."""

    def clock(self) -> Clock:
        """Returns the clock of copies and computation."""


class AcceleratorCopyStream:
    """A separate stream of an accelerator, with events.

    Memory is pinned once, and nothing is allocated afterwards. It uses the interface that torch has for every
    accelerator (`torch.Stream`, `torch.Event`). It is tested on a simulated accelerator, and has not run on a
    GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device)
        self._pinned: list[torch.Tensor] = []
        weakref.finalize(self, _unpin, self._pinned, self._stream)

    def empty(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(self._compute_stream())
        memory.record_stream(self._stream)  # a model may be dropped during a copy to this memory
        return memory

    def pin(self, memory: torch.Tensor) -> torch.Tensor:
        if self._device.type != "cuda":
            return _pinned_copy(memory)
        if host_memory.pin(memory, self._device):
            self._pinned.append(memory)
        return memory

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._stream:
            target.copy_(source, non_blocking=True)

    def bring(self, memory: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), self._stream:
            target = torch.empty_like(memory, device=self._device)
            target.copy_(memory, non_blocking=True)
        self._stream.record_event().synchronize()
        target.record_stream(self._compute_stream())  # the caller may free it while the device computes
        return target

    def mark(self) -> torch.Event:
        return self._stream.record_event()

    def mark_compute(self) -> torch.Event:
        return self._compute_stream().record_event()

    def copy_after(self, mark: torch.Event) -> None:
        self._stream.wait_event(mark)

    def compute_after(self, mark: torch.Event) -> None:
        self._compute_stream().wait_event(mark)

    def is_past(self, mark: torch.Event) -> bool:
        return mark.query()

    def synchronize(self, mark: torch.Event) -> None:
        mark.synchronize()

    def clock(self) -> Clock:
        return EventClock(self._device, self._stream)

    def _compute_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)


def _pinned_copy(memory: torch.Tensor) -> torch.Tensor:
    """Returns a copy in pinned memory that starts at a page, as direct reads require."""
    if not memory.numel():
        return memory
    with torch.inference_mode(False):
        whole = torch.empty(memory.numel() + PAGE, dtype=torch.uint8, pin_memory=True)
        first = -whole.data_ptr() % PAGE
        return whole[first : first + memory.numel()].copy_(memory)


def _unpin(pinned: list[torch.Tensor], stream: torch.Stream) -> None:
    """Unpins memory before it is unmapped, once nothing is copied from it any more."""
    if pinned:
        stream.synchronize()
    while pinned:
        host_memory.unpin(pinned.pop())


class SynchronousCopyStream:
    """Synchronous copies, for accelerators whose streams hfq does not use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def pin(self, memory: torch.Tensor) -> torch.Tensor:
        return memory

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def bring(self, memory: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False):
            return memory.to(self._device)

    def mark(self) -> None:
        return None

    def mark_compute(self) -> None:
        return None

    def copy_after(self, mark: None) -> None: ...

    def compute_after(self, mark: None) -> None: ...

    def is_past(self, mark: None) -> bool:
        return True

    def synchronize(self, mark: None) -> None: ...

    def clock(self) -> Clock:
        return HostClock()


def clock_of(device: torch.device) -> Clock:
    """Returns a clock of a device without offloaded units."""
    return HostClock() if device.type == "cpu" else copy_stream_to(device).clock()


def copy_stream_to(device: torch.device) -> CopyStream:
    """Returns the copy stream of a device."""
    is_synchronous = device.type in ("cpu", "mps")
    return SynchronousCopyStream(device) if is_synchronous else AcceleratorCopyStream(device)
