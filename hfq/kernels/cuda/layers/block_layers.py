"""Descriptions of layers of ggml's blocks: GGUF, and gptqmodel's GGUF blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from hfq.formats.codecs.constants import constant
from hfq.formats.codecs.ggml.small_blocks import IQ4_VALUES
from hfq.formats.gguf.block_rows import Gguf
from hfq.formats.gguf.gptqmodel_rows import GptqmodelGguf
from hfq.kernels.cuda.layers.descriptions import describes
from hfq.kernels.cuda.layers.layout import BlockPlaces, Layer, Layout

__all__ = ["gguf", "gptqmodel_gguf"]


def _layout(codec: str, bits: int, places: tuple[int, ...], **options: Any) -> Layout:
    options = {"span": 32} | options
    return Layout(codec, bits, word=8, loading="blocks", block=BlockPlaces(*places), **options)


_MINIMA: dict[str, Any] = {"scale": "six_bits", "zero": "packed", "zero_sign": -1}

_LAYOUTS = {
    "Q4_0": _layout("integers", 4, (32, 18, 2, 16), middle=8.0),
    "Q4_1": _layout("integers", 4, (32, 20, 4, 16), zero="packed", zero_sign=1),
    "Q8_0": _layout("integers", 8, (32, 34, 2), signed=True),
    "IQ4_NL": _layout("table", 4, (32, 18, 2, 16)),
    "MXFP4": _layout("fp4_twice", 4, (32, 17, 1, 16), scale="half_power"),
    "Q4_K": _layout("integers", 4, (256, 144, 16, 32), **_MINIMA),
    "Q5_K": _layout("integers", 5, (256, 176, 48, 32, 16, 1), **_MINIMA),
    "Q6_K": _layout("integers", 6, (256, 210, 0, 64, 128, 2, 208), scale="bytes", span=16, middle=32.0),
    "IQ4_XS": _layout("table", 4, (256, 136, 8, 16), scale="split_bits"),
}
"""The layout of each type that the kernels read."""


def _against_type(name: str) -> str | None:
    return None if name in _LAYOUTS else f"it does not read blocks of {name}"


def _against_gguf(weight_format: Gguf) -> str | None:
    if weight_format.blocks.columns is not None:
        return "the file has the columns in another order"
    if weight_format.scale_shape is not None:
        return "it does not read a scale of all blocks"
    return _against_type(weight_format.blocks.type)


@describes(Gguf, refuses=_against_gguf)
def gguf(
    weight_format: Gguf, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> Layer:
    order = weight_format.blocks.rows
    rows = None if order is None else (order.start, order.first, order.second, order.inner)
    return _layer(weight_format.blocks.type, rows, tensors["weight"], out_features, in_features)


@describes(GptqmodelGguf, refuses=lambda weight_format: _against_type(weight_format.type_name))
def gptqmodel_gguf(
    weight_format: GptqmodelGguf, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> Layer:
    return _layer(weight_format.type_name, None, tensors["qweight"], out_features, in_features)


def _layer(
    name: str,
    rows: tuple[int, int, int, int] | None,
    codes: torch.Tensor,
    out_features: int,
    in_features: int,
) -> Layer:
    layout = dataclasses.replace(_LAYOUTS[name], rows=rows)
    return Layer(
        layout,
        codes,
        codes,
        out_features,
        in_features,
        code_other=codes.shape[1],
        scale_n=codes.shape[1],
        zeros=codes if layout.zero == "packed" else None,
        zero_word=codes.shape[1],
        table=constant(IQ4_VALUES, codes.device) if layout.codec == "table" else None,
    )
