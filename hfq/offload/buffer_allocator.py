"""Offsets in the offload buffer of the computing unit and of the next units."""

from __future__ import annotations

from collections.abc import Collection

from hfq.offload.unit_layout import PAGE

__all__ = ["BufferAllocator"]


class BufferAllocator:
    """Places units at one of the two ends of a buffer, or next to another unit.

    Two places of exactly the units' sizes suffice for large units, and memory is better spent on resident
    weights. A large unit (an `lm_head`) does not enlarge the places of the others.

    Args:
        nbytes: The size of the buffer, a multiple of 4096.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._places: dict[int, tuple[int, int]] = {}

    def place_of(self, unit: int) -> int | None:
        """Returns the offset of a unit, or None if it has no place."""
        return self._places[unit][0] if unit in self._places else None

    def range_of(self, unit: int) -> tuple[int, int] | None:
        """Returns the bytes [start, stop) of a unit, or None if it has no place."""
        if unit not in self._places:
            return None
        start, nbytes = self._places[unit]
        return start, start + nbytes

    def find(self, unit: int, nbytes: int, kept: Collection[int]) -> tuple[int, list[int]] | None:
        """Finds a place for a unit; `give` assigns it.

        Args:
            unit: The unit that needs a place.
            nbytes: Its size.
            kept: The units that must not be overwritten.

        Returns:
            The offset, a multiple of 4096, and the units that would be overwritten; None if `kept` leaves no
            room.
        """
        top = (self.nbytes - nbytes) // PAGE * PAGE
        beside = [
            offset
            for start, size in self._places.values()
            for offset in (_up(start + size), start - _up(nbytes))
        ]
        for offsets in ((0, top), beside):  # a unit at one end leaves the other end free for the next unit
            candidates = [
                (offset, self._overlapped(unit, offset, nbytes)) for offset in offsets if 0 <= offset <= top
            ]
            possible = [
                (offset, lost) for offset, lost in candidates if not any(other in kept for other in lost)
            ]
            if possible:
                return min(possible, key=lambda choice: len(choice[1]))
        return None

    def give(self, unit: int, offset: int, nbytes: int) -> None:
        """Assigns a unit the place that `find` returned, after the overwritten units are forgotten."""
        self._places[unit] = offset, nbytes

    def forget(self, unit: int) -> None:
        """Frees the place of a unit, if it has one."""
        self._places.pop(unit, None)

    def clear(self) -> None:
        """Frees all places."""
        self._places.clear()

    def _overlapped(self, unit: int, offset: int, nbytes: int) -> list[int]:
        end, others = offset + nbytes, self._places.items()
        return [
            other
            for other, (start, size) in others
            if other != unit and start < end and offset < start + size
        ]


def _up(nbytes: int) -> int:
    """Rounds up to a multiple of the page size."""
    return -(-nbytes // PAGE) * PAGE
