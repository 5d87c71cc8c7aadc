"""One packed layer of the source, and what is to be written of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hfq.checkpoint import Reader
from hfq.errors import FormatError
from hfq.formats import Format
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.modules.flat_buffer import read_tensor
from hfq.tensor_spec import ByteRange, TensorInfo

__all__ = ["LayerPlan", "NewTensor", "SourceLayer", "exact_cast", "refusal"]


@dataclass(frozen=True)
class SourceLayer:
    """A packed layer as it is stored.

    Attributes:
        module: Its name on disk.
        weight_format: Its format, sized and resolved.
        infos: Its tensors by local name.
        size: (out, in).
        reader: Reads them.
    """

    module: str
    weight_format: Format
    infos: Mapping[str, TensorInfo]
    size: tuple[int, int]
    reader: Reader

    def read(self, local: str) -> torch.Tensor:
        """One of its tensors, in fresh memory."""
        return read_tensor(self.reader, self.infos[local])


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write: its bytes lie in the source, or are made when they are written.

    Attributes:
        dtype: The safetensors dtype.
        shape: The shape.
        data: Where the bytes lie, or what makes the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    data: ByteRange | Callable[[], torch.Tensor]

    @classmethod
    def copied(cls, info: TensorInfo, shape: tuple[int, ...] | None = None) -> NewTensor:
        """A stored tensor as it is, under another shape perhaps."""
        return cls(info.dtype, info.shape if shape is None else shape, info.range)


@dataclass(frozen=True)
class LayerPlan:
    """What is written of one layer.

    Attributes:
        tensors: The new tensors by local name.
        options: What the config must say of the layer; hashable, equal for layers that share a group of it.
    """

    tensors: dict[str, NewTensor]
    options: Any


def exact_cast(module: str, local: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in another dtype.

    Raises:
        FormatError: One of them would be rounded.
    """
    cast = values.to(dtype)
    if not torch.equal(cast.to(torch.float64), values.to(torch.float64)):
        bad = values[cast.to(torch.float64) != values.to(torch.float64)].flatten()
        raise refusal(
            f"{module}.{local}",
            f"scales that {safetensors_dtype(dtype)} holds exactly",
            f"{bad[0].item():g} in {values.dtype}",
            "the target stores its scales in that dtype: keep the checkpoint as it is",
        )
    return cast


def refusal(tensor: str, expected: str, found: str, fix: str) -> FormatError:
    """The error of a layer that the target dialect cannot hold without loss."""
    return FormatError(
        "The checkpoint cannot be converted without loss. Nothing was written.",
        tensor=tensor,
        expected=expected,
        found=found,
        fix=fix,
    )
