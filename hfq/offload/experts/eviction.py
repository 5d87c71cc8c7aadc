"""Order in which experts leave a full cache: by their uses, of which old ones count less."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterable

__all__ = ["EMPTY", "HALF_LIFE", "NEVER_USED", "DecayedCounts", "Value"]

HALF_LIFE = 16
"""Passes after which a use counts half."""

Value = tuple[float, int]
"""Value of an expert; the one with the least value leaves."""

EMPTY: Value = (-math.inf, 0)
"""Value of a place without an expert."""

NEVER_USED: Value = (-sys.float_info.max, 0)
"""Value of an expert that was only guessed."""


class DecayedCounts:
    """Counts uses, each of which counts half after a half-life.

    Values begin with logarithms of counts at the first pass, so they change only with a use, and are in order
    at any time. Experts that left the cache keep their value. Of experts that were used as often and in the
    same passes, the newest leaves first: layers come in a circle, so the others are needed earlier.

    Args:
        half_life: The half-life in passes.
        period: Number of calls of one pass.

    Attributes:
        values: The value of each expert that was used.
    """

    def __init__(self, half_life: float, period: int) -> None:
        self._half_life, self._period = half_life, max(period, 1)
        self.values: dict[Hashable, Value] = {}

    def note(self, key: Hashable, call: int) -> Value:
        """Counts a use in a call, and returns the new value."""
        self.note_all((key,), call)
        return self.values[key]

    def note_all(self, keys: Iterable[Hashable], call: int) -> None:
        """Counts one use of each of these experts in a call."""
        values, age = self.values, call // self._period / self._half_life
        for key in keys:
            before = values.get(key, EMPTY)[0]
            low, high = (age, before) if age < before else (before, age)
            values[key] = high + math.log2(1 + 2.0 ** (low - high)), -call
