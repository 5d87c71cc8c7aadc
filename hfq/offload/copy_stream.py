"""The track to an accelerator: copies from pinned host memory, in order, beside what computes there."""

from __future__ import annotations

import logging
import weakref
from typing import Any, Protocol

import torch

from hfq.offload.clock import Clock, CudaClock, HostClock

__all__ = ["CudaCopyStream", "CopyStream", "SynchronousCopyStream", "copy_stream_to"]

logger = logging.getLogger("hfq")


class CopyStream(Protocol):
    """What moves bytes to the device that computes. A mark is a point in the order of the copies or of the
    computation.
    """

    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory: uint8 [nbytes]."""

    def pin(self, memory: torch.Tensor) -> torch.Tensor:
        """Makes host memory fit for copies that run beside the computation; returns it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begins to copy; copies are done in the order they were begun."""

    def mark(self) -> Any:
        """The point after all copies so far."""

    def mark_compute(self) -> Any:
        """The point after all that was given to the device to compute so far."""

    def copy_after(self, mark: Any) -> None:
        """Lets later copies wait for a mark of the computation."""

    def compute_after(self, mark: Any) -> None:
        """Lets later computation wait for a mark of the copies."""

    def synchronize(self, mark: Any) -> None:
        """Waits, on the host, for a mark of the copies."""

    def clock(self) -> Clock:
        """Says when copies and computation happened."""


class CudaCopyStream:
    """A CUDA stream of its own and events; memory is pinned once, nothing is allocated afterwards.

    Written after the CUDA programming model and tested with a device that is made up; it was not measured on
    a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pinned: list[torch.Tensor] = []
        weakref.finalize(self, _unpin, self._pinned)

    def empty(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return memory

    def pin(self, memory: torch.Tensor) -> torch.Tensor:
        status = (
            torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
            if memory.numel()
            else 0
        )
        if int(status) != 0:
            logger.warning(
                "hfq: %d bytes of host memory could not be pinned (CUDA error %d); copies will not overlap",
                memory.numel(),
                int(status),
            )
        elif memory.numel():
            self._pinned.append(memory)
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def mark_compute(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self._device).record_event()

    def copy_after(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)

    def compute_after(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def synchronize(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def clock(self) -> Clock:
        return CudaClock(self._device, self._stream)


def _unpin(pinned: list[torch.Tensor]) -> None:
    """Unregisters memory before it is unmapped."""
    while pinned:
        torch.cuda.cudart().cudaHostUnregister(pinned.pop().data_ptr())


class SynchronousCopyStream:
    """Copies at once: for accelerators whose streams hfq does not use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def pin(self, memory: torch.Tensor) -> torch.Tensor:
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> None:
        return None

    def mark_compute(self) -> None:
        return None

    def copy_after(self, mark: None) -> None: ...

    def compute_after(self, mark: None) -> None: ...

    def synchronize(self, mark: None) -> None: ...

    def clock(self) -> Clock:
        return HostClock()


def copy_stream_to(device: torch.device) -> CopyStream:
    """The track to a device."""
    return CudaCopyStream(device) if device.type == "cuda" else SynchronousCopyStream(device)
