"""Copies from pinned host memory to an accelerator while it computes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hfq.offload.clock import Clock, EventClock, HostClock
from hfq.offload.host_memory import huge_buffer
from hfq.offload.pinned_memory import pinned_memory
from hfq.offload.unit_layout import PAGE

__all__ = ["AcceleratorCopyStream", "CopyStream", "SynchronousCopyStream", "clock_of", "copy_stream_to"]


class CopyStream(Protocol):
    """Copies bytes to the execution device.

    A mark is a point in the order of the copies or of the computation.
    """

    def empty(self, nbytes: int) -> torch.Tensor:
        """Returns device memory: uint8 [nbytes]."""

    def staging(self, nbytes: int) -> torch.Tensor:
        """Returns pinned host memory that starts at a page, for long use: uint8 [nbytes]."""

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Returns pinned host memory that starts at a page, for a short use: uint8 [nbytes]."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Starts a copy; copies finish in the order of their starts."""

    def bring(self, nbytes: int, parts: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Starts to copy pinned memory to new memory of the device: uint8 [nbytes].

        Args:
            nbytes: The size of the new memory.
            parts: Pairs of an offset in it and the bytes that are copied there.
        """

    def record_compute(self, memory: torch.Tensor) -> None:
        """Keeps memory of `bring` that is freed until the computation submitted so far is done."""

    def mark(self) -> Any:
        """Returns the point after all copies so far."""

    def mark_compute(self) -> Any:
        """Returns the point after all computation submitted so far."""

    def copy_after(self, mark: Any) -> None:
        """Makes later copies wait for a mark of the computation."""

    def compute_after(self, mark: Any) -> None:
        """Makes later computation wait for a mark of the copies."""

    def is_past(self, mark: Any) -> bool:
        """Returns True if the device has reached a mark, also if work before it failed."""

    def has_failed(self, mark: Any) -> bool:
        """Returns True if the device has reached a mark, and work before it failed."""

    def finish(self, mark: Any) -> None:
        """Waits on the host for a mark of the copies; an error of them is not raised here."""

    def synchronize(self, mark: Any) -> None:
        """Waits on the host for a mark of the copies; raises the error of a copy before it."""

    def clock(self) -> Clock:
        """Returns the clock of copies and computation."""


class AcceleratorCopyStream:
    """A separate stream of an accelerator, with events.

    It uses the interface that torch has for every accelerator (`torch.Stream`, `torch.Event`). It is tested
    on a simulated accelerator, and has not run on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device)

    def empty(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(self._compute_stream())
        memory.record_stream(self._stream)  # a model may be dropped during a copy to this memory
        return memory

    def staging(self, nbytes: int) -> torch.Tensor:
        return pinned_memory(nbytes, [self._device])

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            whole = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=True)
            first = -whole.data_ptr() % PAGE
            return whole[first : first + nbytes]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._entered():
            target.copy_(source, non_blocking=True)

    def bring(self, nbytes: int, parts: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        with torch.inference_mode(False), self._entered():
            target = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            for offset, memory in parts:
                target[offset : offset + memory.numel()].copy_(memory, non_blocking=True)
        return target

    def record_compute(self, memory: torch.Tensor) -> None:
        memory.record_stream(self._compute_stream())

    def mark(self) -> torch.Event:
        return self._stream.record_event()

    def mark_compute(self) -> torch.Event:
        return self._compute_stream().record_event()

    def copy_after(self, mark: torch.Event) -> None:
        self._stream.wait_event(mark)

    def compute_after(self, mark: torch.Event) -> None:
        self._compute_stream().wait_event(mark)

    def is_past(self, mark: torch.Event) -> bool:
        try:
            return mark.query()
        except RuntimeError:
            return True

    def has_failed(self, mark: torch.Event) -> bool:
        try:
            mark.query()
        except RuntimeError:
            return True
        return False

    def finish(self, mark: torch.Event) -> None:
        with contextlib.suppress(RuntimeError):
            mark.synchronize()

    def synchronize(self, mark: torch.Event) -> None:
        mark.synchronize()

    def clock(self) -> Clock:
        return EventClock(self._device, self._stream)

    def _entered(self) -> torch.Stream:
        """Returns a new object of the copy stream, to enter it in this thread.

        A `torch.Stream` keeps the stream that it replaced in the object. Two threads that enter one object
        leave each other's stream current.
        """
        stream = self._stream
        return torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def _compute_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)


class SynchronousCopyStream:
    """Synchronous copies, for accelerators whose streams hfq does not use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def staging(self, nbytes: int) -> torch.Tensor:
        return huge_buffer(nbytes, is_touched=True)

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def bring(self, nbytes: int, parts: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        if self._device.type == "cpu" and [memory.numel() for _, memory in parts] == [nbytes]:
            return parts[0][1]
        with torch.inference_mode(False):
            target = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            for offset, memory in parts:
                target[offset : offset + memory.numel()].copy_(memory)
            return target

    def record_compute(self, memory: torch.Tensor) -> None: ...

    def mark(self) -> None:
        return None

    def mark_compute(self) -> None:
        return None

    def copy_after(self, mark: None) -> None: ...

    def compute_after(self, mark: None) -> None: ...

    def is_past(self, mark: None) -> bool:
        return True

    def has_failed(self, mark: None) -> bool:
        return False

    def finish(self, mark: None) -> None: ...

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
