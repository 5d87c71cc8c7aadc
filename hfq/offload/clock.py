"""Times of copies and computation on the host's clock, also for an accelerator."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "EventClock", "HostClock"]


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


class EventClock:
    """Clock of an accelerator's events.

    Args:
        device: The execution device.
        copies: The stream that copies.
    """

    def __init__(self, device: torch.device, copies: torch.Stream) -> None:
        self._device, self._copies = device, copies
        self._first = self.stamp_compute()
        self._first.synchronize()
        self._began = time.perf_counter()

    def stamp_copies(self) -> torch.Event:
        return self._stamp(self._copies)

    def stamp_compute(self) -> torch.Event:
        return self._stamp(torch.accelerator.current_stream(self._device))

    def seconds(self, stamp: torch.Event) -> float:
        stamp.synchronize()
        return self._began + self._first.elapsed_time(stamp) / 1e3

    def _stamp(self, stream: torch.Stream) -> torch.Event:
        return stream.record_event(torch.Event(self._device, enable_timing=True))
