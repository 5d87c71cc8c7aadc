"""The ring: where in one buffer the block that computes and the blocks that are read next lie."""

from __future__ import annotations

from collections.abc import Collection

from hfq.offload.unit_layout import PAGE

__all__ = ["BufferAllocator"]


class BufferAllocator:
    """Gives blocks a place at one of the two ends of a buffer, or beside another block.

    Two places of their own size suffice where blocks are large, and memory is better spent on parts that
    stay; a large block (an `lm_head`) does not make the place of the others large.

    Args:
        nbytes: The size of the buffer, a multiple of 4096.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._places: dict[int, tuple[int, int]] = {}

    def place_of(self, unit: int) -> int | None:
        """The offset of a block that has a place, else None."""
        return self._places[unit][0] if unit in self._places else None

    def find(self, unit: int, nbytes: int, kept: Collection[int]) -> tuple[int, list[int]] | None:
        """Finds a place for a block; `give` takes it.

        Args:
            unit: The block that needs a place.
            nbytes: Its size.
            kept: The blocks that must not be overlapped.

        Returns:
            The offset, a multiple of 4096, and the blocks that would be overlapped; None where there is no
            room beside `kept`.
        """
        top = (self.nbytes - nbytes) // PAGE * PAGE
        beside = [
            offset
            for start, size in self._places.values()
            for offset in (_up(start + size), start - _up(nbytes))
        ]
        for offsets in ((0, top), beside):  # from an end, the other end is free for whatever comes next
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
        """Gives a block the place that `find` found, once the blocks that it overlaps are forgotten."""
        self._places[unit] = offset, nbytes

    def forget(self, unit: int) -> None:
        """Takes a block's place away, where it has one."""
        self._places.pop(unit, None)

    def clear(self) -> None:
        """Takes every place away."""
        self._places.clear()

    def _overlapped(self, unit: int, offset: int, nbytes: int) -> list[int]:
        end, others = offset + nbytes, self._places.items()
        return [
            other
            for other, (start, size) in others
            if other != unit and start < end and offset < start + size
        ]


def _up(nbytes: int) -> int:
    """To the next multiple of a page."""
    return -(-nbytes // PAGE) * PAGE
