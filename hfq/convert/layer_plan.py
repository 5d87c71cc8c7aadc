"""Quantized layers of a source checkpoint, and plans for writing them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hfq.checkpoint import Reader
from hfq.checkpoint.write_checkpoint import Made
from hfq.errors import FormatError
from hfq.formats import Format
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.formats.gguf.block_rows import positions
from hfq.formats.gguf.stored_values import model_values
from hfq.modules.flat_buffer import read_tensor
from hfq.tensor_spec import DTYPE_BITS, ByteRange, TensorInfo

__all__ = ["LayerPlan", "NewTensor", "SourceLayer", "as_bytes", "exact_cast", "refusal"]


_NOWHERE = ByteRange("", 0, 0)
_HELD: weakref.WeakKeyDictionary[Reader, tuple[str, torch.Tensor]] = weakref.WeakKeyDictionary()
"""{reader: the name and the value of the tensor that `SourceLayer.hold` read last}."""


@dataclass(frozen=True)
class SourceLayer:
    """A quantized layer as it is stored.

    Attributes:
        module: Its name on disk.
        weight_format: Its format, with size and values resolved.
        infos: Its tensors by local name.
        size: (out, in).
        reader: The reader of its tensors.
    """

    module: str
    weight_format: Format
    infos: Mapping[str, TensorInfo]
    size: tuple[int, int]
    reader: Reader

    def read(self, local: str) -> torch.Tensor:
        """Reads one tensor of the layer into new memory."""
        return read_tensor(self.reader, self.infos[local])

    def hold(self, local: str) -> torch.Tensor:
        """Returns one tensor of the layer, which stays in memory until another one is held.

        The tensors of a new layer are written in turn, so several of them come from one read. The result must
        not be changed.
        """
        name = f"{self.module}.{local}"
        if _HELD.get(self.reader, ("",))[0] != name:
            _HELD.pop(self.reader, None)  # frees its memory before the read
            _HELD[self.reader] = name, self.read(local)
        return _HELD[self.reader][1]

    def copied(self, local: str) -> NewTensor:
        """Returns one unquantized tensor of the layer with the values of the model."""
        return NewTensor.of_model(self.infos[local], self.reader)


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write, from bytes of the source or from a function.

    Attributes:
        dtype: The safetensors dtype.
        shape: The shape.
        data: The location of the bytes, or a function that computes the tensor when it is written.
        place: The bytes in the source that decide where the tensor is written.
    """

    dtype: str
    shape: tuple[int, ...]
    data: ByteRange | Callable[[], torch.Tensor]
    place: ByteRange = _NOWHERE

    @classmethod
    def copied(cls, info: TensorInfo, shape: tuple[int, ...] | None = None) -> NewTensor:
        """Returns an unchanged stored tensor, optionally with another shape."""
        return cls(info.dtype, info.shape if shape is None else shape, info.range, info.range)

    @classmethod
    def of_model(cls, info: TensorInfo, reader: Reader) -> NewTensor:
        """Returns an unquantized tensor with the values of the model.

        A GGUF file may store functions of them, or another order.
        """
        blocks = info.blocks
        if blocks is None or (blocks.rows, blocks.columns, blocks.function) == (None, None, None):
            return cls.copied(info)

        def make() -> torch.Tensor:
            value = model_values(read_tensor(reader, info), blocks)
            if blocks.columns is None:
                return value
            return value.index_select(1, positions(blocks.columns, value.device))

        return cls(info.dtype if blocks.function is None else "F32", info.shape, make, info.range)

    def described(self, name: str) -> TensorInfo:
        """Returns the tensor under a name, without a file."""
        nbytes = torch.Size(self.shape).numel() * DTYPE_BITS[self.dtype] // 8
        return TensorInfo(name, self.dtype, self.shape, ByteRange("", 0, nbytes))

    def values(self, reader: Reader) -> torch.Tensor:
        """Returns the tensor in new memory."""
        if isinstance(self.data, ByteRange):
            return read_tensor(reader, self.described("")._replace(range=self.data))
        return self.data()

    def part(self) -> ByteRange | Made:
        """Returns the tensor as a part of a file to write."""
        if isinstance(self.data, ByteRange):
            return self.data
        make = self.data
        return Made(self.described("").nbytes, lambda: as_bytes(make()))


@dataclass(frozen=True)
class LayerPlan:
    """The plan for writing one layer.

    Attributes:
        tensors: The new tensors by local name.
        options: The layer's options in the config. They are hashable, and equal for layers that share a
            config group.
    """

    tensors: dict[str, NewTensor]
    options: Any


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor."""
    # memoryview accepts numpy arrays, which have the buffer protocol
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def exact_cast(module: str, local: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Casts values to another dtype without rounding.

    Raises:
        FormatError: A value would be rounded.
    """
    cast = values.to(dtype)
    if not torch.equal(cast.to(torch.float64), values.to(torch.float64)):
        bad = values[cast.to(torch.float64) != values.to(torch.float64)].flatten()
        raise refusal(
            f"{module}.{local}",
            f"scales that {safetensors_dtype(dtype)} holds exactly",
            f"{bad[0].item():g} in {values.dtype}",
            "Keep the checkpoint unchanged. The target format stores scales in that dtype.",
        )
    return cast


def refusal(tensor: str, expected: str, found: str, fix: str) -> FormatError:
    """Returns the error for a layer that the target format cannot hold without loss."""
    return FormatError(
        "The checkpoint cannot be converted without loss. Nothing was written.",
        tensor=tensor,
        expected=expected,
        found=found,
        fix=fix,
    )
