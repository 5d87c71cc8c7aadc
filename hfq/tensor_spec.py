"""Shapes, dtypes, and byte ranges of stored tensors, as plain data without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = [
    "DTYPE_BITS",
    "DEVICE_ALIGNMENT",
    "SEGMENT_ALIGNMENT",
    "Blocks",
    "ByteRange",
    "ByteRuns",
    "Cut",
    "LayerSlice",
    "Role",
    "Segment",
    "StoredOrder",
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
"""Alignment in bytes of each segment in a flat buffer."""

DEVICE_ALIGNMENT = 256
"""Alignment in bytes of each tensor in the memory of an accelerator, as its own allocations have."""


class ByteRange(NamedTuple):
    """A range of `nbytes` bytes of `file` that starts at byte `offset`."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """Byte ranges of equal size at regular distances in a file.

    There are `count` ranges of `nbytes` bytes each. The first starts at byte `offset` of `file`, and each
    next
    one starts `stride` bytes later.
    """

    file: str
    offset: int
    nbytes: int
    stride: int
    count: int


@dataclass(frozen=True, slots=True)
class StoredOrder:
    """Order in which a file stores the rows or columns of a weight.

    From element `start` on, the file has them as [outer, first, second, inner], and the model as [outer,
    second, first, inner]. Elements before `start` have the same order in both.
    """

    start: int
    outer: int
    first: int
    second: int
    inner: int

    @property
    def size(self) -> int:
        """The number of rows or columns."""
        return self.start + self.outer * self.first * self.second * self.inner


@dataclass(frozen=True, slots=True)
class Blocks:
    """Type of a tensor in a GGUF file, and what the file stores differently than the model.

    Attributes:
        type: The name in ggml, such as `Q4_K` or `BF16`.
        rows: The order of the rows; None for the model's own.
        columns: The order of the columns; None for the model's own.
        function: The function of the model's values that the file stores; None for the values themselves.
        is_layer: True for the weight of a layer that holds it as stored, also if it consists of numbers.
    """

    type: str
    rows: StoredOrder | None = None
    columns: StoredOrder | None = None
    function: Literal["plus one", "minus exponential"] | None = None
    is_layer: bool = False

    @property
    def is_converted(self) -> bool:
        """True for a parameter whose values a load computes from the stored ones."""
        return not self.is_layer and (self.rows is not None or self.function is not None)


class TensorInfo(NamedTuple):
    """One stored tensor as the header of its file describes it.

    Attributes:
        name: The name of the tensor.
        dtype: The safetensors name of the dtype.
        shape: The shape.
        range: The bytes of the tensor in its file.
        part_of: The name of the stored tensor that this one is a slice of, such as one expert of a fused
            tensor; None if it is a whole tensor.
        blocks: The type of a tensor in a GGUF file; None for other files.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    range: ByteRange
    part_of: str | None = None
    blocks: Blocks | None = None

    @property
    def nbytes(self) -> int:
        return self.range.nbytes

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        is_coded = self.blocks is not None and self.blocks.type != self.dtype
        return f"{self.dtype} {list(self.shape)}{f' of {self.blocks.type}' if is_coded else ''}"  # type: ignore


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The requirements on one tensor of a quantized module.

    Attributes:
        name: The name on disk, local to its module (`qweight`, `weight_scale`, …).
        dtypes: The dtypes that the format allows, as safetensors names.
        shape: The required shape.
        role: The purpose of the tensor.
        optional: True if a file may omit the tensor.
        bound: For `role="index"`: every value must be in `[0, bound)`. None for other roles.
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
        """Returns True if both ends are multiples of `multiple`.

        The end may also be the end of the layer, whose last run may be shorter.
        """
        return self.start % multiple == 0 and (self.stop % multiple == 0 or self.stop == self.size)

    def units(self, multiple: int) -> tuple[int, int]:
        """Returns the range [first, last) of the runs of `multiple` that the slice overlaps."""
        return self.start // multiple, -(-self.stop // multiple)

    def __str__(self) -> str:
        return (
            f"{'output rows' if self.axis == 'out' else 'input channels'} {self.start} to {self.stop} of "
            f"{self.size}"
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor in a flat buffer: `nbytes` bytes at `offset`, read as `dtype` and `shape`."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def segment_layout(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], alignment: int = SEGMENT_ALIGNMENT
) -> tuple[dict[str, Segment], int]:
    """Computes the offsets of tensors in one flat buffer, in the given order.

    Args:
        tensors: (name, dtype, shape) of each tensor.
        alignment: Each segment starts at a multiple of this number of bytes.

    Returns:
        The segment of each name, and the size of the whole buffer in bytes, a multiple of `alignment`.
    """
    segments, end = {}, 0
    for name, dtype, shape in tensors:
        offset = -(-end // alignment) * alignment
        nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
        segments[name] = Segment(offset, nbytes, dtype, tuple(shape))
        end = offset + nbytes
    return segments, -(-end // alignment) * alignment
