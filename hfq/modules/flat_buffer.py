"""Flat buffers: the tensors of one module, in the mapped checkpoint or in one byte tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from hfq.checkpoint import Reader
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.tensor_spec import DTYPE_BITS, Segment, TensorInfo, segment_layout

__all__ = ["FlatBuffer", "is_mappable", "map_tensors", "map_tensor", "read_tensor", "stack_tensors"]


@dataclass(frozen=True)
class FlatBuffer:
    """One byte tensor that holds all tensors of a module.

    Attributes:
        buffer: uint8 [nbytes].
        segments: Offset, dtype, and shape of each tensor in it, by checkpoint name.
    """

    buffer: torch.Tensor
    segments: Mapping[str, Segment]

    @classmethod
    def read(
        cls, reader: Reader, infos: Mapping[str, TensorInfo], buffer: torch.Tensor | None = None
    ) -> FlatBuffer:
        """Reads a module's tensors into a flat buffer in host memory: `buffer`, or a new one."""
        segments, nbytes = flat_layout(infos)
        buffer = torch.empty(nbytes, dtype=torch.uint8) if buffer is None else buffer[:nbytes]
        memory = memoryview(buffer.numpy())  # type: ignore[arg-type]  # numpy arrays have the buffer protocol
        for name, segment in segments.items():
            reader.read_into(infos[name].range, memory[segment.offset : segment.offset + segment.nbytes])
        return cls(buffer, segments)

    @classmethod
    def pack(
        cls, tensors: Mapping[str, torch.Tensor], infos: Mapping[str, TensorInfo], buffer: torch.Tensor
    ) -> FlatBuffer:
        """Copies a module's tensors from host memory into a flat buffer."""
        segments, nbytes = flat_layout(infos)
        packed = cls(buffer[:nbytes], segments)
        for name, target in packed.tensors().items():
            target.copy_(tensors[name])
        return packed

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns zero-copy views of the segments, by checkpoint name."""
        return {name: _view(self.buffer, segment) for name, segment in self.segments.items()}


def flat_layout(infos: Mapping[str, TensorInfo]) -> tuple[dict[str, Segment], int]:
    """Returns the segments of a module's tensors in a flat buffer, and the bytes of the buffer."""
    return segment_layout((name, info.dtype, info.shape) for name, info in infos.items())


def is_mappable(infos: Mapping[str, TensorInfo]) -> bool:
    """Returns True if every tensor is aligned to its element size in the file."""
    return all(info.range.offset % (DTYPE_BITS[info.dtype] // 8 or 1) == 0 for info in infos.values())


def map_tensors(reader: Reader, infos: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
    """Returns views of a module's tensors in the mapped checkpoint, by checkpoint name."""
    return {name: map_tensor(reader, info) for name, info in infos.items()}


def map_tensor(reader: Reader, info: TensorInfo) -> torch.Tensor:
    """Returns a zero-copy view of one stored tensor; writes to it stay in this process."""
    dtype = torch_dtype(info.dtype)
    if info.nbytes == 0:
        return torch.empty(info.shape, dtype=dtype)
    memory = reader.map(info.range.file)
    flat = torch.frombuffer(memory, dtype=dtype, count=info.numel, offset=info.range.offset)
    return flat.view(info.shape)


def read_tensor(reader: Reader, info: TensorInfo) -> torch.Tensor:
    """Returns one stored tensor, read into new host memory."""
    return FlatBuffer.read(reader, {"tensor": info}).tensors()["tensor"]


def stack_tensors(
    memory: memoryview, offsets: Sequence[int], segments: Mapping[str, Segment]
) -> dict[str, torch.Tensor]:
    """Returns tensors of several flat buffers of one layout, stacked along a first dimension.

    They are views of the memory if the buffers are at regular distances, and copies otherwise.

    Args:
        memory: The memory that holds the flat buffers.
        offsets: Offset of each flat buffer in ascending order, at least two.
        segments: Segments of the tensors to stack.
    """
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    strides = {after - before for before, after in pairwise(offsets)}
    stacked = {}
    for name, segment in segments.items():
        starts = [offset + segment.offset for offset in offsets]
        if len(strides) == 1:
            stack = flat.as_strided((len(offsets), segment.nbytes), (*strides, 1), starts[0])
        else:
            stack = torch.stack([flat[start : start + segment.nbytes] for start in starts])
        stack = stack if segment.nbytes else torch.empty(0, dtype=torch.uint8)
        stacked[name] = stack.view(torch_dtype(segment.dtype)).view(len(offsets), *segment.shape)
    return stacked


def _view(buffer: torch.Tensor, segment: Segment) -> torch.Tensor:
    part = buffer[segment.offset : segment.offset + segment.nbytes]
    return part.view(torch_dtype(segment.dtype)).view(segment.shape)
