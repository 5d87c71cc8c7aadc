"""Descriptions of layers of one byte per code: FP8 and int8."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hfq.formats.fp8 import Fp8
from hfq.formats.layouts.scaled import ScaledCodes
from hfq.formats.mlx.float_modes import MlxFp8
from hfq.kernels.cpp.layer_registry import reads
from hfq.kernels.cpp.layer_struct import BYTES, E4M3, E5M2, INT8, NONE, SCALES, CppLayer

__all__ = ["fp8", "mlx_fp8", "scaled"]


def _against_fp8(weight_format: Fp8, in_features: int) -> str | None:
    return "the layer is cut within a block" if weight_format.block_offset != (0, 0) else None


@reads(Fp8, refuses=_against_fp8)
def fp8(
    weight_format: Fp8, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> CppLayer:
    scale = tensors[weight_format.scale_name]
    block_out, block_in, stride = {
        "tensor": (max(out_features, 1), max(in_features, 1), 0),
        "channel": (1, max(in_features, 1), 1),
        "group": (1, weight_format.group_size or in_features, scale.shape[-1] if scale.dim() else 1),
        "block": (
            *(weight_format.block_structure or (128, 128)),
            scale.shape[2 if scale.dim() == 4 else -1] if scale.dim() else 1,
        ),
    }[weight_format.strategy]
    return CppLayer(
        codes=tensors["weight"].data_ptr(),
        scales=scale.data_ptr(),
        in_features=in_features,
        out_features=out_features,
        row_nbytes=in_features,
        block_out=block_out,
        block_in=block_in,
        scale_stride=stride,
        scale_step=1,
        scale_dtype=SCALES[scale.dtype],
        kind=E4M3 if weight_format.codes_dtype == "F8_E4M3" else E5M2,
        divides=weight_format.reciprocal,
    )


def _against_scaled(weight_format: ScaledCodes, in_features: int) -> str | None:
    return "it does not read scales of input channels" if weight_format.has_columns else None


def _is_plain(weight_format: ScaledCodes) -> bool:
    """Returns True if the format decodes like its base class, with supported zero points."""
    kind = type(weight_format)
    is_plain = kind.dequantize_into is ScaledCodes.dequantize_into and kind._rows_of is ScaledCodes._rows_of
    return is_plain and weight_format.zero_dtype in (None, "I8")


@reads(ScaledCodes, refuses=_against_scaled, accepts=_is_plain, takes_subclasses=True)
def scaled(
    weight_format: ScaledCodes, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> CppLayer:
    """Describes a layer of int8 codes, or of FP8 codes under another format's names."""
    scale = tensors[weight_format.scale]
    zero = tensors.get(weight_format.zero) if weight_format.zero_dtype else None
    groups = scale.shape[1] if scale.dim() == 2 else 1
    block_out = (
        weight_format.block[0] if weight_format.block else max(out_features, 1) if scale.numel() == 1 else 1
    )
    return CppLayer(
        codes=tensors[weight_format.codes].data_ptr(),
        scales=scale.data_ptr(),
        in_features=in_features,
        out_features=out_features,
        row_nbytes=in_features,
        block_out=block_out,
        scale_stride=groups,
        scale_step=1,
        groups=groups,
        block_in=weight_format.block[1] if weight_format.block else -(-in_features // groups),
        scale_dtype=SCALES[scale.dtype],
        kind={"I8": INT8, "F8_E4M3": E4M3, "F8_E5M2": E5M2}[weight_format.codes_dtype],
        shared=weight_format.multiplier,
        row_zeros=BYTES if zero is not None else NONE,
        zeros=zero.data_ptr() if zero is not None else None,
    )


@reads(MlxFp8)
def mlx_fp8(
    weight_format: MlxFp8, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> CppLayer:
    """Describes a layer of MLX's mxfp8, whose codes are bytes."""
    scales = tensors["scales"]
    return CppLayer(
        codes=tensors["weight"].data_ptr(),
        row_nbytes=in_features,
        scales=scales.data_ptr(),
        in_features=in_features,
        out_features=out_features,
        kind=E4M3,
        block_out=1,
        block_in=weight_format.group_size,
        scale_stride=scales.shape[1],
        scale_step=1,
        scale_dtype=SCALES[scales.dtype],
    )
