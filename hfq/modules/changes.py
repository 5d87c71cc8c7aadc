"""A counter of changes to quantized layers, for code that keeps facts about many of them."""

from __future__ import annotations

import itertools

__all__ = ["changes", "note_change"]

_numbers = itertools.count(1)
_last = 0


def note_change() -> None:
    """Counts a change of a parameter, a hook, or an attribute in `_DECISIVE`."""
    global _last
    _last = next(_numbers)


def changes() -> int:
    """Returns a number that is another one after each change of a layer."""
    return _last
