"""Time of a pass over offloaded units, when reads and computation share buffer and cores.

Pure data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FREE", "SideBySide", "Stage", "pass_seconds"]

_PASSES = 3
"""The buffer is empty in the first pass; later passes start with prefetched bytes."""


@dataclass(frozen=True)
class Stage:
    """One unit of the model, in the order in which units compute.

    Attributes:
        seconds: Compute time while nothing is read.
        nbytes: Bytes read for a pass; 0 if the unit is in memory.
    """

    seconds: float
    nbytes: int = 0


@dataclass(frozen=True)
class SideBySide:
    """Speed that reading and computing keep while both run.

    Attributes:
        computing: Share of its speed that computing keeps, above 0 and at most 1.
        reading: Share of its speed that reading keeps, above 0 and at most 1.
    """

    computing: float = 1.0
    reading: float = 1.0


FREE = SideBySide()
"""Neither slows the other down."""


def pass_seconds(stages: Sequence[Stage], buffer: int, rate: float, speeds: SideBySide) -> float:
    """Returns the seconds of a pass in the steady state, in which passes prefetch for the next.

    A stage computes once its bytes are in memory, and frees its place in the buffer afterward. Reads wait
    while the buffer is full. Stages in memory therefore overlap with reads only until the buffer is full.

    Args:
        stages: Stages in their order.
        buffer: Bytes of offloaded stages that memory may hold, the computing one included.
        rate: Bytes per second of reading alone.
        speeds: Speeds that remain while both run.
    """
    streamed = sum(stage.nbytes for stage in stages)
    if streamed <= buffer:  # all units stay in the buffer: nothing is read again
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
                stage.seconds / speeds.computing, max(freed + buffer - read, 0) / (rate * speeds.reading)
            )
            read += together * rate * speeds.reading
            now += together + (stage.seconds - together * speeds.computing)
            freed += stage.nbytes
    return now - began
