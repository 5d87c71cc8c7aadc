"""Records of single measurements, and the medians over them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

__all__ = ["Record", "median", "rotated", "select"]

Record = dict
"""One measurement: its subject, and numbers in seconds and bytes."""


def select(records: Iterable[Record], **where: object) -> list[Record]:
    """Returns the successful records in which each of these keys has this value."""
    return [
        r for r in records if "error" not in r and all(r.get(key) == value for key, value in where.items())
    ]


def median(records: Iterable[Record], value: Callable[[Record], float], **where: object) -> float | None:
    """Returns the median of a value over the selected records, or None if there are none."""
    try:
        values = [value(record) for record in select(records, **where)]
    except (KeyError, ZeroDivisionError):
        return None
    return statistics.median(values) if values else None


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Returns the names in an order that starts at another name in each round.

    No name always has the same position, so the order favors none.
    """
    cut = by % max(len(names), 1)
    return [*names[cut:], *names[:cut]]
