"""How long a pass over streamed blocks takes, when reading and computing share a ring and the cores. Pure
data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FREE", "SideBySide", "Stage", "pass_seconds"]

_PASSES = 3
"""In the first the ring is empty, the later ones begin with what the one before has read ahead."""


@dataclass(frozen=True)
class Stage:
    """A part of the model in the order in which it computes.

    Attributes:
        seconds: How long it computes, while nothing is read.
        nbytes: What is read of it for a pass; 0 where it rests in memory.
    """

    seconds: float
    nbytes: int = 0


@dataclass(frozen=True)
class SideBySide:
    """What reading and computing leave of each other while both go on.

    Attributes:
        computing: The share of its speed that computing keeps, above 0 and at most 1.
        reading: The same of reading.
    """

    computing: float = 1.0
    reading: float = 1.0


FREE = SideBySide()
"""Neither slows the other down."""


def pass_seconds(stages: Sequence[Stage], buffer: int, rate: float, beside: SideBySide) -> float:
    """The seconds of a pass, in the steady state in which the end of a pass reads ahead for the next one.

    A stage computes once its bytes are there; its place in the ring is given away when it is done. What the
    ring has no room for waits, so that stages in memory are not computed beside reading any longer than it
    takes to fill the ring.

    Args:
        stages: The stages in their order.
        buffer: The bytes that may be held of stages that are read, that which computes among them.
        rate: Bytes per second of reading alone.
        beside: What is left of both while they go on together.
    """
    streamed = sum(stage.nbytes for stage in stages)
    if streamed <= buffer:  # what a region holds stays: nothing is read again
        return sum(stage.seconds for stage in stages)
    now = began = read = 0.0
    needed = freed = 0
    for _ in range(_PASSES):
        began = now
        for stage in stages:
            needed += stage.nbytes
            waiting = max(needed - read, 0)
            now, read = now + waiting / rate, read + waiting
            together = min(
                stage.seconds / beside.computing, max(freed + buffer - read, 0) / (rate * beside.reading)
            )
            read += together * rate * beside.reading
            now += together + (stage.seconds - together * beside.computing)
            freed += stage.nbytes
    return now - began
