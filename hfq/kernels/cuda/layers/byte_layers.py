"""Descriptions of layers of one byte per code: FP8 and int8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from hfq.formats.fp8 import Fp8
from hfq.formats.layouts.scaled import ScaledCodes
from hfq.formats.mlx.float_modes import MlxFp8
from hfq.kernels.cuda.layers.descriptions import describes
from hfq.kernels.cuda.layers.layout import Layer, Layout

__all__ = ["CODECS", "fp8", "mlx_fp8", "scaled", "stored_scale"]

CODECS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "I8": "integers"}

Tensors = Mapping[str, torch.Tensor]
Kind = Literal["float", "power", "e4m3"]


def stored_scale(scale: torch.Tensor) -> tuple[torch.Tensor, Kind]:
    """Returns a scale as kernels load it, and its kind; bytes are powers of two."""
    if scale.dtype == torch.float8_e4m3fn:
        return scale.view(torch.uint8), "e4m3"
    if scale.element_size() == 1:
        return scale.view(torch.uint8), "power"
    return scale, "float"


@describes(Fp8)
def fp8(weight_format: Fp8, tensors: Tensors, out_features: int, in_features: int) -> Layer:
    scale, kind = stored_scale(tensors[weight_format.scale_name])
    grid = scale.shape[2 if scale.dim() == 4 else -1] if scale.dim() else 1
    block_out, span, scale_n = {
        "tensor": (1, max(in_features, 1), 0),
        "channel": (1, max(in_features, 1), 1),
        "group": (1, weight_format.group_size or in_features, grid),
        "block": (*(weight_format.block_structure or (128, 128)), grid),
    }[weight_format.strategy]
    layout = Layout(
        CODECS[weight_format.codes_dtype],
        8,
        word=8,
        span=span,
        block_out=block_out,
        offset=weight_format.block_offset,
        scale=kind,
        divides=weight_format.reciprocal,
    )
    return Layer(
        layout,
        tensors["weight"].view(torch.uint8),
        scale,
        out_features,
        in_features,
        code_other=in_features,
        scale_n=scale_n,
        scale_g=0 if weight_format.strategy in ("tensor", "channel") else 1,
    )


@describes(ScaledCodes)
def scaled(weight_format: ScaledCodes, tensors: Tensors, out_features: int, in_features: int) -> Layer:
    """Describes int8 codes, or FP8 codes under another format's names."""
    scale = tensors[weight_format.scale]
    zero = tensors.get(weight_format.zero) if weight_format.zero_dtype else None
    groups = scale.shape[1] if scale.dim() == 2 else 1
    block: Any = weight_format.block or (1, max(-(-in_features // groups), 1))
    step = 0 if scale.numel() == 1 and not weight_format.block else groups
    layout = Layout(
        CODECS[weight_format.codes_dtype],
        8,
        word=8,
        signed=weight_format.codes_dtype == "I8",
        span=block[1],
        block_out=block[0],
        has_factor=weight_format.multiplier != 1.0,
        zero="none" if zero is None else "stored",
    )
    return Layer(
        layout,
        tensors[weight_format.codes].view(torch.uint8),
        scale,
        out_features,
        in_features,
        code_other=in_features,
        scale_n=step,
        scale_g=1,
        zeros=zero,
        zero_word=step,
        zero_other=1,
        factor=weight_format.multiplier,
        columns=tensors[weight_format.columns] if weight_format.has_columns else None,
    )


@describes(MlxFp8)
def mlx_fp8(weight_format: MlxFp8, tensors: Tensors, out_features: int, in_features: int) -> Layer:
    """Describes MLX's mxfp8, whose codes are bytes."""
    scale = tensors["scales"]
    layout = Layout("e4m3", 8, word=8, span=weight_format.group_size, scale="power")
    codes = tensors["weight"].view(torch.uint8)
    steps: Any = {"scale_n": scale.shape[1], "scale_g": 1}
    return Layer(layout, codes, scale, out_features, in_features, code_other=in_features, **steps)
