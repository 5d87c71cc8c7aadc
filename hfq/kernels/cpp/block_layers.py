"""Descriptions of layers of ggml's blocks, which hold their scales: GGUF."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hfq.formats.gguf.block_rows import Gguf
from hfq.kernels.cpp.layer_registry import reads
from hfq.kernels.cpp.layer_struct import BLOCKS, CppLayer

__all__ = ["gguf"]

_TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "MXFP4": 39,
}
"""The values of `BlockType` in src/layer.h."""


def _against_gguf(weight_format: Gguf, in_features: int) -> str | None:
    if weight_format.blocks.type not in _TYPES:
        return f"it does not read blocks of {weight_format.blocks.type}"
    if weight_format.blocks.columns is not None:
        return "the file has the columns in another order"
    return "it does not read a scale of all blocks" if weight_format.scale_shape is not None else None


@reads(Gguf, refuses=_against_gguf)
def gguf(
    weight_format: Gguf, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> CppLayer:
    kind, rows = weight_format.type, weight_format.blocks.rows
    order: dict = {}
    if rows is not None:
        order = {f"order_{name}": getattr(rows, name) for name in ("start", "first", "second", "inner")}
    return CppLayer(
        codes=tensors["weight"].data_ptr(),
        row_nbytes=in_features // kind.size * kind.nbytes,
        in_features=in_features,
        out_features=out_features,
        kind=BLOCKS,
        block_type=_TYPES[kind.name],
        block_out=1,
        block_in=kind.size,
        **order,
    )
