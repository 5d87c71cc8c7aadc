"""Predicts the next unit from the order of the last complete forward pass."""

from __future__ import annotations

import threading
from collections.abc import Sequence

__all__ = ["PrefetchOrder"]


class PrefetchOrder:
    """Order of the units in the last complete pass, or of the modules before the first one.

    A pass is one forward of the whole model. The next pass is expected to follow immediately, so the last
    unit
    is followed by the first. A unit that was not expected is counted, and the prediction goes on behind it.

    Args:
        order: The units in the order of the modules.

    Attributes:
        prefetch_misses: Number of units that were not the expected one.
        unit_forwards: Number of forward passes of units.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._next = 0
        self._recorded: dict[int, list[int]] = {}
        self.prefetch_misses = self.unit_forwards = 0

    def begin(self) -> None:
        """Marks the begin of a forward pass of the whole model in this thread."""
        self._recorded[threading.get_ident()] = []
        self._next = 0

    def end(self, is_complete: bool) -> None:
        """Marks the end of a whole forward pass, and learns its order if it `is_complete`."""
        recorded = self._recorded.pop(threading.get_ident(), [])
        if is_complete and recorded:
            self._order = recorded
            self._next = 0

    def visit(self, unit: int) -> bool:
        """Marks the begin of a unit; returns True if it was the expected one."""
        self.unit_forwards += 1
        recorded = self._recorded.get(threading.get_ident())
        if recorded is not None:
            recorded.append(unit)
        order, position = self._order, self._next  # the end of a pass in another thread may change both
        steps = (step for step in range(len(order)) if order[(position + step) % len(order)] == unit)
        step = next(steps, None)
        if step != 0:
            self.prefetch_misses += 1
        if step is not None:
            self._next = (position + step + 1) % len(order)
        return step == 0

    def expected(self, count: int) -> list[int]:
        """Returns the next `count` distinct units, also across the end of a pass."""
        order, position = self._order, self._next
        upcoming = (order[(position + step) % len(order)] for step in range(len(order)))
        return list(dict.fromkeys(upcoming))[:count]
