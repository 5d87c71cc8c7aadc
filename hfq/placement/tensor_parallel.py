"""Slices of stored tensors that tensor parallel ranks hold, and their byte ranges in files.

Pure data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hfq.tensor_spec import DTYPE_BITS, ByteRuns, Cut, LayerSlice, TensorInfo

__all__ = ["TensorPart", "rank_slice"]


def rank_slice(axis: str, size: int, rank: int, world: int) -> LayerSlice | None:
    """Returns the slice of one rank, as `torch.chunk` and DTensor's `Shard` cut it.

    Args:
        axis: `out` or `in`.
        size: Output rows or input channels of the whole layer.
        rank: Rank.
        world: Number of ranks.

    Returns:
        The slice; None if there are more ranks than slices.
    """
    step = -(-size // world)
    start, stop = min(rank * step, size), min((rank + 1) * step, size)
    return LayerSlice("out" if axis == "out" else "in", start, stop, size) if start < stop else None


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Part of a stored tensor that a rank holds: all of it if `cut` is None."""

    info: TensorInfo
    cut: Cut | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        cut, shape = self.cut, self.info.shape
        return shape if cut is None else (*shape[: cut.dim], cut.stop - cut.start, *shape[cut.dim + 1 :])

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return math.prod(self.shape) * DTYPE_BITS[self.info.dtype] // 8

    def runs(self) -> ByteRuns:
        """Returns the byte ranges of the part in file order: one run if its bytes are contiguous."""
        source = self.info.range
        cut = self.cut
        shape = self.info.shape
        if cut is None or self.nbytes == self.info.nbytes:
            return ByteRuns(source.file, source.offset, source.nbytes, source.nbytes, 1)
        inner = math.prod(shape[cut.dim + 1 :]) * DTYPE_BITS[self.info.dtype] // 8
        first, run = source.offset + cut.start * inner, (cut.stop - cut.start) * inner
        return ByteRuns(source.file, first, run, shape[cut.dim] * inner, math.prod(shape[: cut.dim]))
