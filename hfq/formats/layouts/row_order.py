"""Reordering of the output rows of a quantized layer.

Codes are not unpacked if rows are whole words. Runtimes order attention heads in different ways (RoPE by
halves or by pairs), so their rows have another order. Row `i` of the reordered layer is bit-identical to row
`order[i]` of the stored one:

- GPTQ: reorders columns of `qweight` and `scales`. Zero points are unpacked, and packed again in the encoding
  of the file.
- FP8, 8-bit codes: reorders rows of the codes and of scales that belong to rows. A scale of the whole tensor
  is unchanged.
- FP8 with blocks: scales are unchanged if no row leaves its block. Otherwise each row gets a copy of its
  block's scale.
- AWQ gemm: unpacks columns of words and packs them again. AWQ gemv: reorders rows.
- pack-quantized: reorders rows of words. Packed zero points are unpacked and packed again.
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
    """Row reordering of `Gptq`.

    Zero points keep their values and their reading, even if a carry of v1 crossed fields of a word.
    """

    def reorder(self, tensors: Mapping[str, torch.Tensor], order: torch.Tensor) -> tuple[Format, Tensors]:
        known: Any = self
        zeros = known.zero_points(tensors["qzeros"], 0, tensors["scales"].shape[1])
        reordered = _taken(tensors, order, {"qweight": 1, "scales": 1, "bias": 0})
        return self, reordered | {"qzeros": known._store_zeros(zeros[:, order])}


class Fp8Order(Format):
    """Row reordering of `Fp8`."""

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
    """Row reordering of `Awq`, in its gemm and gemv layouts."""

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
    """Row reordering of `PackQuantized`."""

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
    """Row reordering of `ScaledCodes`, except for a grid of blocks."""

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
    """Returns the tensors, with those of `dims` reordered.

    Args:
        tensors: The tensors of a layer by local name.
        order: The new order of the output rows.
        dims: The dimension of the output rows, by local name.
    """
    return {
        local: _take(tensor, order, dims[local]) if local in dims else tensor
        for local, tensor in tensors.items()
    }


def _take(tensor: torch.Tensor, order: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns `index_select`, also for one-byte dtypes for which torch does not implement it."""
    flat = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return flat.index_select(dim, order).view(tensor.dtype)
