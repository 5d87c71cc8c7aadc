"""A packed row: the tensors of one module, lying in the mapped checkpoint or together in one aligned
arena.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.checkpoint import Reader
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.tensor_spec import DTYPE_BITS, Segment, TensorInfo, segment_layout

__all__ = ["FlatBuffer", "is_mappable", "map_tensors", "map_tensor", "read_tensor"]


@dataclass(frozen=True)
class FlatBuffer:
    """One flat buffer that holds all of a module's tensors.

    Attributes:
        buffer: uint8 [nbytes].
        segments: Where each tensor lies in it, by local name.
    """

    buffer: torch.Tensor
    segments: Mapping[str, Segment]

    @classmethod
    def read(
        cls, reader: Reader, infos: Mapping[str, TensorInfo], buffer: torch.Tensor | None = None
    ) -> FlatBuffer:
        """Reads a module's tensors into an arena in host memory: `buffer`, or a new one."""
        segments, nbytes = flat_layout(infos)
        buffer = torch.empty(nbytes, dtype=torch.uint8) if buffer is None else buffer[:nbytes]
        memory = memoryview(buffer.numpy())  # type: ignore[arg-type]  # numpy arrays have the buffer protocol
        for name, segment in segments.items():
            reader.read_into(infos[name].range, memory[segment.offset : segment.offset + segment.nbytes])
        return cls(buffer, segments)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Zero-copy views of the segments, by local name."""
        return {name: _view(self.buffer, segment) for name, segment in self.segments.items()}


def flat_layout(infos: Mapping[str, TensorInfo]) -> tuple[dict[str, Segment], int]:
    """Where each of a module's tensors lies in an arena, and the arena's bytes."""
    return segment_layout((name, info.dtype, info.shape) for name, info in infos.items())


def is_mappable(infos: Mapping[str, TensorInfo]) -> bool:
    """Whether every tensor lies on a multiple of its own element's size, so that it can be used where it
    is.
    """
    return all(info.range.offset % (DTYPE_BITS[info.dtype] // 8) == 0 for info in infos.values())


def map_tensors(reader: Reader, infos: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
    """Zero-copy views of a module's tensors in the mapped checkpoint, by local name."""
    return {name: map_tensor(reader, info) for name, info in infos.items()}


def map_tensor(reader: Reader, info: TensorInfo) -> torch.Tensor:
    """A zero-copy view of one stored tensor; what is written to it stays in this process."""
    dtype = torch_dtype(info.dtype)
    if info.nbytes == 0:
        return torch.empty(info.shape, dtype=dtype)
    memory = reader.map(info.range.file)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=info.nbytes, offset=info.range.offset)
    return flat.view(dtype).view(info.shape)


def read_tensor(reader: Reader, info: TensorInfo) -> torch.Tensor:
    """One stored tensor, read into fresh host memory."""
    return FlatBuffer.read(reader, {"tensor": info}).tensors()["tensor"]


def _view(buffer: torch.Tensor, segment: Segment) -> torch.Tensor:
    part = buffer[segment.offset : segment.offset + segment.nbytes]
    return part.view(torch_dtype(segment.dtype)).view(segment.shape)
