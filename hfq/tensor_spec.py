"""What a stored tensor must be and where bytes lie: plain data that every layer shares, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "DTYPE_BITS",
    "SEGMENT_ALIGNMENT",
    "ByteRange",
    "ByteRuns",
    "Cut",
    "LayerSlice",
    "Role",
    "Segment",
    "TensorInfo",
    "TensorSpec",
    "segment_layout",
]

Role = Literal["codes", "scale", "zero_point", "index", "bias", "meta"]

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
}
"""Bits of one element of each safetensors dtype that hfq knows."""

SEGMENT_ALIGNMENT = 16
"""Each segment of a packed row starts at a multiple of so many bytes."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`nbytes` bytes of `file`, from byte `offset` on."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """`count` runs of `nbytes` bytes of `file`, one every `stride` bytes from byte `offset` on."""

    file: str
    offset: int
    nbytes: int
    stride: int
    count: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor as its file's header describes it; `dtype` is the safetensors name.

    Where it is a slice of a stored tensor, as one expert of a fused one, `part_of` is the stored tensor's
    name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    range: ByteRange
    part_of: str | None = None

    @property
    def nbytes(self) -> int:
        return self.range.nbytes

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor of a quantized module must be.

    Attributes:
        name: The name on disk, local to its module (`qweight`, `weight_scale`, …).
        dtypes: The dtypes the dialect allows, as safetensors names.
        shape: The exact shape.
        role: What the tensor is for.
        optional: Whether a file may leave it out.
        bound: For `role="index"`: every value must be in `[0, bound)`.
    """

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    role: Role
    optional: bool = False
    bound: int | None = None

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Cut:
    """The elements [start, stop) of a tensor along dimension `dim`."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """The output rows or input channels [start, stop) of a linear layer that has `size` of them."""

    axis: Literal["out", "in"]
    start: int
    stop: int
    size: int

    def is_aligned(self, multiple: int) -> bool:
        """Whether both ends lie between whole runs of `multiple`; the last run of the layer may be
        shorter.
        """
        return self.start % multiple == 0 and (self.stop % multiple == 0 or self.stop == self.size)

    def units(self, multiple: int) -> tuple[int, int]:
        """[first, last) of the runs of `multiple` that it reaches into."""
        return self.start // multiple, -(-self.stop // multiple)

    def __str__(self) -> str:
        return (
            f"{'output rows' if self.axis == 'out' else 'input channels'} {self.start} to {self.stop} of "
            f"{self.size}"
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """Where one tensor lies in a packed row: `nbytes` bytes from `offset`, read as `dtype` and `shape`."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def segment_layout(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[dict[str, Segment], int]:
    """Lays tensors out in one flat buffer, in the order given.

    Args:
        tensors: (name, dtype, shape) of each tensor.

    Returns:
        The segment of each name, each starting on a 16-byte boundary, and the bytes of the whole row.
    """
    segments, end = {}, 0
    for name, dtype, shape in tensors:
        offset = -(-end // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
        nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
        segments[name] = Segment(offset, nbytes, dtype, tuple(shape))
        end = offset + nbytes
    return segments, -(-end // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
