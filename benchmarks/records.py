"""Records of single measurements, and the medians over them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

__all__ = ["Record", "median", "rotated", "select"]

Record = dict
"""One measurement as it was taken: its subject, and numbers in seconds and bytes."""


def select(records: Iterable[Record], **where: object) -> list[Record]:
    """The records in which every one of these keys has this value, failed ones left out."""
    return [
        r for r in records if "error" not in r and all(r.get(key) == value for key, value in where.items())
    ]


def median(records: Iterable[Record], value: Callable[[Record], float], **where: object) -> float | None:
    """The median of a value over the selected records; None where there are none, or where none has the
    value."""
    try:
        values = [value(record) for record in select(records, **where)]
    except (KeyError, ZeroDivisionError):
        return None
    return statistics.median(values) if values else None


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The names in an order that begins elsewhere each round, so that no place in the order favours
    anybody.
    """
    cut = by % max(len(names), 1)
    return [*names[cut:], *names[:cut]]
