"""Copies from pinned host memory to an accelerator while it computes."""

from __future__ import annotations

import logging
import weakref
from typing import Any, Protocol

import torch

from hfq.offload.clock import Clock, CudaClock, HostClock

__all__ = ["CudaCopyStream", "CopyStream", "SynchronousCopyStream", "copy_stream_to"]

logger = logging.getLogger("hfq")


class CopyStream(Protocol):
    """Copies bytes to the execution device.

    A mark is a point in the order of the copies or of the computation.
    """

    def empty(self, nbytes: int) -> torch.Tensor:
        """Returns device memory: uint8 [nbytes]."""

    def pin(self, memory: torch.Tensor) -> torch.Tensor:
        """Pins host memory, so that copies run while the device computes; returns it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Starts a copy; copies finish in the order of their starts."""

    def mark(self) -> Any:
        """Returns the point after all copies so far."""

    def mark_compute(self) -> Any:
        """Returns the point after all computation submitted so far."""

    def copy_after(self, mark: Any) -> None:
        """Makes later copies wait for a mark of the computation."""

    def compute_after(self, mark: Any) -> None:
        """Makes later computation wait for a mark of the copies."""

    def synchronize(self, mark: Any) -> None:
        """Waits on the host for a mark of the copies."""

    def clock(self) -> Clock:
        """Returns the clock of copies and computation."""


class CudaCopyStream:
    """A separate CUDA stream with events.

    Memory is pinned once, and nothing is allocated afterwards.

    It follows the CUDA programming model and is tested with a simulated device. It has not run on a GPU.
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
    """Unpins memory before it is unmapped."""
    while pinned:
        torch.cuda.cudart().cudaHostUnregister(pinned.pop().data_ptr())


class SynchronousCopyStream:
    """Synchronous copies, for accelerators whose streams hfq does not use."""

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
    """Returns the copy stream of a device."""
    return CudaCopyStream(device) if device.type == "cuda" else SynchronousCopyStream(device)
