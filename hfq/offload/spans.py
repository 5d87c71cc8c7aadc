"""Spans: named intervals of time, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["TRACKS", "Span", "overlap_levels"]

TRACKS = {
    "pass": "a forward pass of the whole model",
    "read": "a reader thread reads",
    "copy": "bytes are copied to the accelerator",
    "wait": "a forward pass waits for its unit",
    "compute": "an offloaded unit computes",
    "other": "a part that is not offloaded computes",
}
"""Meaning of each track."""


@dataclass(frozen=True, slots=True)
class Span:
    """A named interval of time.

    Attributes:
        track: A key of `TRACKS`.
        name: The unit or module.
        start: Seconds since the recording began; negative for work that had begun before.
        end: Seconds since the recording began.
        nbytes: The bytes read or copied.
        device: Device that computes, or to which bytes are copied; empty for a read or a wait.
    """

    track: str
    name: str
    start: float
    end: float
    nbytes: int = 0
    device: str = ""


def overlap_levels(spans: Iterable[Span]) -> list[int]:
    """Returns a level for each span, from 0, so that no two spans of one level overlap.

    Args:
        spans: Spans in the order of their starts.
    """
    ends: list[float] = []
    levels = []
    for span in spans:
        level = next((level for level, end in enumerate(ends) if end <= span.start), len(ends))
        ends[level : level + 1] = [span.end]
        levels.append(level)
    return levels
