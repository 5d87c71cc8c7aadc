"""Descriptions of layers of packed integers.

Formats: GPTQ, AWQ, pack-quantized, MLX, HQQ, quanto, ModelOpt int4, BitNet, Gemma QAT,
and Quark's int4 and uint4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from hfq.formats.awq import Awq
from hfq.formats.bitnet import BitNet
from hfq.formats.compressed_tensors import PackQuantized
from hfq.formats.gemma_qat import GemmaQat
from hfq.formats.gptq import Gptq
from hfq.formats.hqq import Hqq
from hfq.formats.mlx.affine import Mlx
from hfq.formats.modelopt.linear import ModeloptInt4
from hfq.formats.quanto import QuantoBits
from hfq.formats.quark import QuarkInt4
from hfq.kernels.cuda.layers.descriptions import describes
from hfq.kernels.cuda.layers.layout import PLANES, Layer, Layout, Place

__all__ = [
    "awq",
    "bitnet",
    "gemma_qat",
    "gptq",
    "hqq",
    "mlx",
    "modelopt_int4",
    "pack_quantized",
    "quanto",
    "quark",
]

Tensors = Mapping[str, torch.Tensor]

_EIGHTS = -0x77777778
"""Eight nibbles of 8, as int32."""


@describes(Gptq)
def gptq(weight_format: Gptq, tensors: Tensors, out_features: int, in_features: int) -> Layer:
    """Describes words along the input, with outputs side by side."""
    zeros, bits = tensors["qzeros"], weight_format.num_bits
    is_planar = weight_format.is_planar and bits in PLANES
    layout = Layout(
        "integers",
        bits,
        loading="planes" if is_planar else "stream",
        grouping="index" if weight_format.act_order else "span",
        span=max(in_features, 1) if weight_format.group_size == -1 else weight_format.group_size,
        zero="packed",
        zero_bits=bits,
        zero_place="planes" if is_planar else "plain",
        zero_reading=weight_format.zero_reading,
    )
    return Layer(
        layout,
        tensors["qweight"],
        tensors["scales"],
        out_features,
        in_features,
        code_word=out_features,
        code_other=1,
        scale_n=1,
        scale_g=out_features,
        zeros=zeros,
        zero_other=zeros.shape[1],
        index=tensors["g_idx"] if weight_format.act_order else None,
    )


@describes(Awq)
def awq(weight_format: Awq, tensors: Tensors, out_features: int, in_features: int) -> Layer:
    """Describes words along the output (gemm), or along the input (gemv, gemv_fast)."""
    codes, scales, zeros = tensors["qweight"], tensors["scales"], tensors[weight_format.zeros_name]
    bits, span = weight_format.num_bits, weight_format.group_size
    span = max(in_features, 1) if span == -1 else span
    sizes = out_features, in_features
    if weight_format.version == "gemm":
        place: Place = "awq" if bits == 4 else "plain"
        zero: Any = {"zero": "packed", "zero_bits": bits, "zero_place": place}
        layout = Layout("integers", bits, along="n", place=place, span=span, **zero)
        steps: Any = {"code_other": codes.shape[1], "scale_n": 1, "scale_g": out_features}
        return Layer(layout, codes, scales, *sizes, zeros=zeros, zero_other=zeros.shape[1], **steps)
    if weight_format.version == "gemv":
        layout = Layout("integers", 4, span=span, zero="packed", zero_along="g")
        steps = {"code_other": codes.shape[1], "scale_n": scales.shape[1], "scale_g": 1}
        return Layer(layout, codes, scales, *sizes, zeros=zeros, zero_other=zeros.shape[1], **steps)
    layout = Layout("integers", 4, loading="quads", span=span, zero="stored", zero_sign=1)
    steps = {"code_other": in_features // 2, "scale_n": 1, "scale_g": out_features}
    codes = codes.view(torch.int32)
    return Layer(layout, codes, scales, *sizes, zeros=zeros, zero_other=out_features, **steps)


@describes(PackQuantized)
def pack_quantized(
    weight_format: PackQuantized, tensors: Tensors, out_features: int, in_features: int
) -> Layer:
    codes, scale, zero = tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero_point")
    groups, bits = scale.shape[1] if scale.dim() == 2 else 1, weight_format.num_bits
    is_shared = scale.numel() == 1
    is_packed = weight_format.zero_dtype == "I32"
    layout = Layout(
        "integers",
        bits,
        straddles=weight_format.is_straddling,
        middle=float(1 << (bits - 1)),
        grouping="index" if weight_format.has_g_idx else "span",
        span=max(-(-in_features // groups), 1),
        zero="none" if zero is None else "packed" if is_packed else "stored",
        zero_bits=bits,
        zero_middle=float(1 << (bits - 1)) if is_packed else 0.0,
    )
    step = 0 if is_shared else groups
    return Layer(
        layout,
        codes,
        scale,
        out_features,
        in_features,
        code_other=codes.shape[1],
        scale_n=step,
        scale_g=1,
        zeros=zero,
        zero_word=groups if is_packed else step,
        zero_other=1,
        index=tensors["weight_g_idx"] if weight_format.has_g_idx else None,
    )


@describes(Mlx)
def mlx(weight_format: Mlx, tensors: Tensors, out_features: int, in_features: int) -> Layer:
    """Describes affine codes, whose biases are added to codes times scales."""
    codes, scales = tensors["weight"].view(torch.int32), tensors["scales"]
    layout = Layout(
        "integers", weight_format.num_bits, span=weight_format.group_size, zero="stored", zero_sign=1
    )
    groups = scales.shape[1]
    return Layer(
        layout,
        codes,
        scales,
        out_features,
        in_features,
        code_other=codes.shape[1],
        scale_n=groups,
        scale_g=1,
        zeros=tensors[weight_format.biases_name],
        zero_word=groups,
        zero_other=1,
    )


@describes(Hqq)
def hqq(weight_format: Hqq, tensors: Tensors, out_features: int, in_features: int) -> Layer:
    """Describes slabs of the flattened weight, the first in the highest bits."""
    bits = weight_format.num_bits
    codes = tensors["W_q"].view(torch.int32 if bits == 3 else torch.uint8)
    zero = tensors["zero"]
    columns = codes.shape[1]
    slabs = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
    layout = _flat("integers", bits, slabs, "high_first", columns, in_features, weight_format.axis == 0)
    steps = in_features // columns if layout.grouping == "span" else 0
    return Layer(
        dataclasses.replace(layout, word=32 if bits == 3 else 8, zero="stored"),
        codes,
        tensors["scale"],
        out_features,
        in_features,
        slab=codes.numel(),
        scale_n=steps,
        scale_g=1,
        zeros=zero,
        zero_word=steps,
        zero_other=1,
    )


@describes(QuantoBits)
def quanto(weight_format: QuantoBits, tensors: Tensors, out_features: int, in_features: int) -> Layer:
    """Describes slabs of the flattened weight, the first in the lowest bits."""
    codes, bits, span = tensors["weight._data._data"], weight_format.num_bits, weight_format.group_size
    layout = _flat("integers", bits, 8 // bits, "plain", span, in_features, False)
    steps = in_features // span if layout.grouping == "span" else 0
    return Layer(
        dataclasses.replace(layout, word=8, zero="stored", zero_sign=-1),
        codes,
        tensors["weight._scale"],
        out_features,
        in_features,
        slab=codes.numel(),
        scale_n=steps,
        scale_g=1,
        zeros=tensors["weight._shift"],
        zero_word=steps,
        zero_other=1,
    )


@describes(BitNet)
def bitnet(weight_format: BitNet, tensors: Tensors, out_features: int, in_features: int) -> Layer:
    """Describes four slabs of rows, the first in the lowest bits."""
    codes = tensors["weight"]
    layout = _flat("integers", 2, 4, "plain", max(in_features, 1), in_features, False)
    layout = dataclasses.replace(layout, word=8, middle=1.0, divides=weight_format.is_divided)
    return Layer(layout, codes, tensors["weight_scale"], out_features, in_features, slab=codes.numel())


@describes(GemmaQat)
def gemma_qat(weight_format: GemmaQat, tensors: Tensors, out_features: int, in_features: int) -> Layer:
    """Describes rows of bytes; codes of 8 bits are in two's complement."""
    codes = tensors[weight_format.codes_name]
    scale = tensors[weight_format.scale_name]
    bits = weight_format.num_bits
    middle = 0.0 if bits == 8 else float(1 << (bits - 1))
    span = max(in_features // weight_format.blocks, 1)
    layout = Layout("integers", bits, word=8, signed=bits == 8, middle=middle, span=span)
    steps: Any = {"code_other": codes.shape[1], "scale_n": weight_format.blocks, "scale_g": 1}
    return Layer(layout, codes.view(torch.uint8), scale, out_features, in_features, **steps)


def _flat(
    codec: str, bits: int, slabs: int, place: Place, span: int, in_features: int, is_by_column: bool
) -> Layout:
    """Returns the layout of a flattened weight in slabs, in groups of `span` weights.

    With `is_by_column`, a group is the weights at equal positions of runs of `span`.
    """
    loading: Any = {"loading": "slabs", "place": place} if slabs > 1 else {"along": "flat"}
    grouping: Any = "columns" if is_by_column else "flat" if in_features % span else "span"
    return Layout(codec, bits, slabs=slabs, grouping=grouping, span=span, **loading)


@describes(ModeloptInt4)
def modelopt_int4(
    weight_format: ModeloptInt4, tensors: Tensors, out_features: int, in_features: int
) -> Layer:
    """Describes bytes of two outputs, in two's complement."""
    scale = tensors["weight_scale"]
    layout = Layout("integers", 4, word=8, along="n", signed=True, span=weight_format.group_size)
    return Layer(
        layout,
        tensors["weight"],
        scale,
        out_features,
        in_features,
        code_word=in_features,
        code_other=1,
        scale_n=scale.shape[1],
        scale_g=1,
        columns=tensors["pre_quant_scale"] if weight_format.has_columns else None,
    )


@describes(QuarkInt4)
def quark(weight_format: QuarkInt4, tensors: Tensors, out_features: int, in_features: int) -> Layer:
    """Describes words along the output (groups), or along the input (channels)."""
    codes, scales = tensors["weight"], tensors[weight_format.scale_name]
    zeros: torch.Tensor | None = tensors[weight_format.zero_name].view(-1, out_features // 8)
    zero: Any = {"zero": "packed", "zero_place": "plain" if weight_format.is_in_order else "awq"}
    if not weight_format.has_zeros:
        zero, zeros = {}, None
    elif weight_format.is_signed:  # packed zero points are unsigned
        zero, zeros = zero | {"zero_middle": 8.0}, tensors[weight_format.zero_name] ^ _EIGHTS
    is_by_row = weight_format.group_size is None
    layout = Layout(
        "integers",
        4,
        along="k" if is_by_row else "n",
        place="plain" if weight_format.is_in_order else "awq",
        signed=weight_format.is_signed,
        span=weight_format.group_size or max(in_features, 1),
        shared="multiplies" if weight_format.is_two_level else "none",
        **zero,
    )
    return Layer(
        layout,
        codes,
        scales,
        out_features,
        in_features,
        code_other=codes.shape[1],
        scale_n=1,
        scale_g=out_features,
        zeros=zeros,
        zero_other=out_features // 8,
        shared=tensors["weight_scale"] if weight_format.is_two_level else None,
    )
