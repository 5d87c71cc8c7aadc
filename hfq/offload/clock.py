"""When copies and computation happened, on the host's clock, also where an accelerator does both later than
it was asked to.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock"]


class Clock(Protocol):
    """Takes stamps now, and says later what time they were."""

    def stamp_copies(self) -> Any:
        """A stamp of when all copies so far are done."""

    def stamp_compute(self) -> Any:
        """A stamp of when all that was given to the device to compute so far is done."""

    def seconds(self, stamp: Any) -> float:
        """The time of a stamp in seconds, as `time.perf_counter` counts; waits for it."""


class HostClock:
    """For a device that does what it is asked to at once."""

    def stamp_copies(self) -> float:
        return time.perf_counter()

    def stamp_compute(self) -> float:
        return time.perf_counter()

    def seconds(self, stamp: float) -> float:
        return stamp


class CudaClock:
    """CUDA events with their times.

    Written after the CUDA programming model, as `track.CudaCopyStream` is; it has not run on a GPU.

    Args:
        device: The device that computes.
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
