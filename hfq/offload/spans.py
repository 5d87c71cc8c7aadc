"""Spans: something that took time, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LANES", "Span"]

LANES = {
    "pass": "a forward of the whole model",
    "read": "a reader thread reads",
    "copy": "bytes are copied to the accelerator",
    "wait": "a forward waits for its block",
    "compute": "a streamed block computes",
    "other": "a part that is not streamed computes",
}
"""What a span may be of."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        lane: A key of `LANES`.
        name: The block or module.
        start: Seconds since the recording began; negative where it had begun before.
        end: Seconds since the recording began.
        nbytes: The bytes that were read or copied.
    """

    lane: str
    name: str
    start: float
    end: float
    nbytes: int = 0
