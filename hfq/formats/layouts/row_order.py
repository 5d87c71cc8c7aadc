"""Output rows of a packed layer in another order, without unpacking its codes where rows are whole words.

Runtimes lay attention heads out in different ways (RoPE by halves or by pairs), so that the same layer has
the same rows in another order there. Row `i` of the reordered layer is row `order[i]` of the stored one, bit
for bit:

    GPTQ              columns of `qweight` and `scales`; zero points are unpacked, and packed again as the
    writer packed them FP8, 8-bit codes  rows of the codes, and of the scales that belong to rows; a scale of
    the whole tensor stays blocks of FP8     the scales stay where no row leaves its block; else each row gets
    a copy of its block's AWQ gemm          columns of words, unpacked and packed again; AWQ gemv: rows
    pack-quantized    rows of words; packed zero points are unpacked and packed again
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hfq.formats.base import Format
from hfq.formats.codecs.bit_packing import pack_stream, unpack_stream

__all__ = ["AwqOrder", "Fp8Order", "GptqOrder", "PackOrder", "ScaledOrder"]

Tensors = dict[str, torch.Tensor]


class GptqOrder(Format):
    """How `Gptq` is reordered; the zero points keep their reading, also where a carry of v1 has run over
    their words.
    """

    def reorder(self, tensors: Mapping[str, torch.Tensor], order: torch.Tensor) -> tuple[Format, Tensors]:
        known: Any = self
        zeros = known.zero_points(tensors["qzeros"], 0, tensors["scales"].shape[1])
        reordered = _taken(tensors, order, {"qweight": 1, "scales": 1, "bias": 0})
        return self, reordered | {"qzeros": known._store_zeros(zeros[:, order])}


class Fp8Order(Format):
    """How `Fp8` is reordered."""

    strategy: Any
    block_structure: tuple[int, int] | None
    block_offset: tuple[int, int]
    scale_name: str

    def reorder(self, tensors: Mapping[str, torch.Tensor], order: torch.Tensor) -> tuple[Format, Tensors]:
        if self.strategy != "block":
            rows = {} if self.strategy == "tensor" else {self.scale_name: 0}
            return self, _taken(tensors, order, {"weight": 0, "bias": 0, **rows})
        reordered = _taken(tensors, order, {"weight": 0, "bias": 0})
        (block_out, block_in), scale = self.block_structure or (128, 128), tensors[self.scale_name]
        place = torch.arange(order.numel(), device=order.device) + self.block_offset[0]
        if torch.equal((order + self.block_offset[0]) // block_out, place // block_out):
            return self, reordered
        by_row = scale.reshape(scale.shape[0], -1) if scale.dim() == 4 else scale
        reordered[self.scale_name] = _take(by_row, (order + self.block_offset[0]) // block_out, 0)
        is_whole = not self.block_offset[1] and tensors["weight"].shape[1] == by_row.shape[1] * block_in
        changed: dict[str, Any] = {"strategy": "group", "group_size": block_in, "block_structure": None}
        if not is_whole:
            changed = {"block_structure": (1, block_in)}
        changed |= {"block_offset": (0, self.block_offset[1]), "scale_shape": None}
        # every format is a dataclass
        return dataclasses.replace(self, **changed), reordered  # type: ignore[type-var]


class AwqOrder(Format):
    """How `Awq` is reordered, in its gemm and gemv layouts."""

    version: str
    zeros_name: str

    def reorder(self, tensors: Mapping[str, torch.Tensor], order: torch.Tensor) -> tuple[Format, Tensors]:
        if self.version == "gemv":
            return self, _taken(tensors, order, {"qweight": 0, self.zeros_name: 0, "scales": 0, "bias": 0})
        if self.version != "gemm":
            return super().reorder(tensors, order)
        known: Any = self
        reordered = _taken(tensors, order, {"scales": 1, "bias": 0})
        for local in ("qweight", self.zeros_name):
            codes = known._unpack_columns(tensors[local], 0, order.numel())
            reordered[local] = known._pack_columns(codes[:, order])
        return self, reordered


class PackOrder(Format):
    """How `PackQuantized` is reordered."""

    num_bits: int
    is_symmetric: bool
    zero_dtype: str
    scale_shape: tuple[int, ...]

    def reorder(self, tensors: Mapping[str, torch.Tensor], order: torch.Tensor) -> tuple[Format, Tensors]:
        rows = {} if self.scale_shape in ((), (1,)) else {"weight_scale": 0}
        if rows and self.zero_dtype != "I32":
            rows["weight_zero_point"] = 0
        reordered = _taken(tensors, order, {"weight_packed": 0, "bias": 0, **rows})
        if not self.is_symmetric and self.zero_dtype == "I32":
            zeros = unpack_stream(tensors["weight_zero_point"], self.num_bits, order.numel())
            reordered["weight_zero_point"] = pack_stream(zeros[order], self.num_bits)
        return self, reordered


class ScaledOrder(Format):
    """How `ScaledCodes` are reordered, but for a grid of blocks."""

    codes: ClassVar[str]
    scale: ClassVar[str]
    zero: ClassVar[str]
    scale_shape: tuple[int, ...]
    block: tuple[int, int] | None

    def reorder(self, tensors: Mapping[str, torch.Tensor], order: torch.Tensor) -> tuple[Format, Tensors]:
        if self.block:
            return super().reorder(tensors, order)
        rows = {} if self.scale_shape in ((), (1,), (1, 1)) else {self.scale: 0, self.zero: 0}
        return self, _taken(tensors, order, {self.codes: 0, "bias": 0, **rows})


def _taken(tensors: Mapping[str, torch.Tensor], order: torch.Tensor, dims: Mapping[str, int]) -> Tensors:
    """The tensors, those of `dims` with their output rows, which lie along that dimension, in the new
    order.
    """
    return {
        local: _take(tensor, order, dims[local]) if local in dims else tensor
        for local, tensor in tensors.items()
    }


def _take(tensor: torch.Tensor, order: torch.Tensor, dim: int) -> torch.Tensor:
    """`index_select`, which torch does not have for every dtype of one byte."""
    flat = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return flat.index_select(dim, order).view(tensor.dtype)
