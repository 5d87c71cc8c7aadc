"""In which order blocks are expected: recorded while the model runs, never assumed for good."""

from __future__ import annotations

import threading
from collections.abc import Sequence

__all__ = ["PrefetchOrder"]


class PrefetchOrder:
    """The order of the last complete pass; before the first one, the order of the model's modules.

    A pass is one forward of the whole model, and the next pass is expected to follow at once, so that what
    comes after the last block is the first one. A block that was not the expected one is counted, and the
    order is taken up again behind it.

    Args:
        order: The blocks in the order of the modules.

    Attributes:
        prefetch_misses: How often another block came than was expected.
        unit_forwards: How often a block came.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._next = 0
        self._recorded: dict[int, list[int]] = {}
        self.prefetch_misses = self.unit_forwards = 0

    def begin(self) -> None:
        """A forward of the whole model begins, in this thread."""
        self._recorded[threading.get_ident()] = []
        self._next = 0

    def end(self, is_complete: bool) -> None:
        """The forward of the whole model is over; its order is learned where it was `is_complete`."""
        recorded = self._recorded.pop(threading.get_ident(), [])
        if is_complete and recorded:
            self._order = recorded
            self._next = 0

    def visit(self, unit: int) -> bool:
        """A block begins; returns whether it was the expected one."""
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
        """The next `count` blocks, each once, over the end of a pass into the next one."""
        order, position = self._order, self._next
        upcoming = (order[(position + step) % len(order)] for step in range(len(order)))
        return list(dict.fromkeys(upcoming))[:count]
