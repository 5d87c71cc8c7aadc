"""Descriptions of layers of small floats: FP4, FP6, MXINT4, and tables of bitsandbytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from hfq.formats.bitsandbytes import Bnb4Bit
from hfq.formats.codecs.constants import constant
from hfq.formats.layouts.fp4 import E2M1, Fp4Format
from hfq.formats.modelopt.experts import ModeloptExpert
from hfq.formats.mxfp6 import Mxfp6
from hfq.formats.nvfp4 import Nvfp4
from hfq.formats.nvfp4_e5m3 import Nvfp4E5m3
from hfq.kernels.cuda.layers.byte_layers import fp8, stored_scale
from hfq.kernels.cuda.layers.descriptions import describes
from hfq.kernels.cuda.layers.layout import Layer, Layout

__all__ = ["bnb", "fp4", "modelopt_expert", "mxfp6"]

Tensors = Mapping[str, torch.Tensor]


@describes(Fp4Format)
def fp4(weight_format: Fp4Format, tensors: Tensors, out_features: int, in_features: int) -> Layer:
    """Describes MXFP4, MXINT4, NVFP4, and MLX's mxfp4 and nvfp4."""
    codes = tensors[weight_format.codes_name].view(torch.uint8)
    kind: Any
    scale, kind = stored_scale(tensors[weight_format.scale_name])
    if isinstance(weight_format, Nvfp4E5m3):
        kind = "e5m3"
    elif getattr(weight_format, "mode", None) == "nvfp4":
        kind = "e4m3"
    shared, name = None, getattr(weight_format, "global_name", "")
    if isinstance(weight_format, Nvfp4):
        shared = tensors[name]
    is_fp4 = weight_format.values == E2M1
    layout = Layout(
        "fp4" if is_fp4 else "table",
        4,
        word=8,
        span=in_features // scale.shape[-1],
        scale=kind,
        shared="none" if shared is None else "divides" if name == "weight_global_scale" else "multiplies",
    )
    return Layer(
        layout,
        codes,
        scale,
        out_features,
        in_features,
        code_other=in_features // 2,
        scale_n=scale.shape[-1],
        scale_g=1,
        shared=shared,
        table=None if is_fp4 else constant(weight_format.values, codes.device),
    )


@describes(Mxfp6)
def mxfp6(weight_format: Mxfp6, tensors: Tensors, out_features: int, in_features: int) -> Layer:
    """Describes codes of 6 bits in a stream of bytes."""
    codec = "e3m2" if weight_format.mantissa_bits == 2 else "e2m3"
    layout = Layout(codec, 6, word=8, span=32, scale="power")
    steps: Any = {"code_other": in_features // 4 * 3, "scale_n": in_features // 32, "scale_g": 1}
    return Layer(layout, tensors["weight"], tensors["weight_scale"], out_features, in_features, **steps)


@describes(Bnb4Bit)
def bnb(weight_format: Bnb4Bit, tensors: Tensors, out_features: int, in_features: int) -> Layer:
    """Describes nf4 and fp4, in blocks of the flattened weight."""
    span = weight_format.blocksize
    is_whole = in_features % span == 0
    layout = Layout(
        "table",
        4,
        word=8,
        along="flat",
        place="high_first",
        grouping="span" if is_whole else "flat",
        span=span,
        scale="nested" if weight_format.is_nested else "float",
        nested_size=weight_format.nested_blocksize,
    )
    return Layer(
        layout,
        tensors["weight"].view(torch.uint8),
        tensors["weight.absmax"],
        out_features,
        in_features,
        scale_n=in_features // span if is_whole else 0,
        scale_g=1,
        table=tensors["weight.quant_map"],
        nested=tensors.get("weight.nested_absmax"),
        nested_table=tensors.get("weight.nested_quant_map"),
        nested_offset=weight_format.nested_offset,
    )


@describes(ModeloptExpert)
def modelopt_expert(
    weight_format: ModeloptExpert, tensors: Tensors, out_features: int, in_features: int
) -> Layer:
    """Describes codes and scales whose inputs come before their outputs."""
    codes = tensors[weight_format.codes_name]
    turned, made = weight_format.turned, fp4 if codes.dtype == torch.uint8 else fp8
    layer = made(turned, {**tensors, "weight": codes}, out_features, in_features)  # type: ignore[arg-type]
    steps: Any = {"code_word": out_features, "code_other": 1}
    if codes.dtype == torch.uint8:
        span = in_features // layer.scales.shape[0]
        layout = dataclasses.replace(layer.layout, span=span)
        steps |= {"scale_n": 1, "scale_g": out_features}
        return dataclasses.replace(layer, layout=layout, **steps)
    return dataclasses.replace(layer, **steps)
