"""Which part of each stored tensor a rank of a tensor parallel run holds, and which bytes of which files
those are: pure data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hfq.tensor_spec import DTYPE_BITS, ByteRuns, Cut, LayerSlice, TensorInfo

__all__ = ["TensorPart", "rank_slice"]


def rank_slice(axis: str, size: int, rank: int, world: int) -> LayerSlice | None:
    """The slice of one rank, as `torch.chunk` and DTensor's `Shard` deal it; None where the ranks outnumber
    the slices.

    Args:
        axis: `out` or `in`.
        size: The output rows or input channels of the whole layer.
        rank: The rank.
        world: How many ranks there are.
    """
    step = -(-size // world)
    start, stop = min(rank * step, size), min((rank + 1) * step, size)
    return LayerSlice("out" if axis == "out" else "in", start, stop, size) if start < stop else None


@dataclass(frozen=True, slots=True)
class TensorPart:
    """What a rank holds of one stored tensor: all of it where `cut` is None."""

    info: TensorInfo
    cut: Cut | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        cut, shape = self.cut, self.info.shape
        return shape if cut is None else (*shape[: cut.dim], cut.stop - cut.start, *shape[cut.dim + 1 :])

    @property
    def nbytes(self) -> int:
        """The bytes of the part."""
        return math.prod(self.shape) * DTYPE_BITS[self.info.dtype] // 8

    def runs(self) -> ByteRuns:
        """Where its bytes lie, in their order: one run where they lie together."""
        source = self.info.range
        cut = self.cut
        shape = self.info.shape
        if cut is None or self.nbytes == self.info.nbytes:
            return ByteRuns(source.file, source.offset, source.nbytes, source.nbytes, 1)
        inner = math.prod(shape[cut.dim + 1 :]) * DTYPE_BITS[self.info.dtype] // 8
        first, run = source.offset + cut.start * inner, (cut.stop - cut.start) * inner
        return ByteRuns(source.file, first, run, shape[cut.dim] * inner, math.prod(shape[: cut.dim]))
