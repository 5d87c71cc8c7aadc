"""Descriptions of layers of rows of 4-bit codes, and of 8-bit codes in the same formats.

Formats: MXFP4, NVFP4, MLX, pack-quantized, Gemma QAT, AWQ's gemv and gemv_fast, and bitsandbytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from hfq.formats.awq import Awq
from hfq.formats.bitsandbytes import Bnb4Bit
from hfq.formats.compressed_tensors import PackQuantized
from hfq.formats.deepseek_v4 import DeepseekMxfp4
from hfq.formats.gemma_qat import GemmaQat
from hfq.formats.gpt_oss import GptOssMxfp4
from hfq.formats.layouts.fp4 import E2M1, Fp4Format
from hfq.formats.mlx.affine import Mlx
from hfq.formats.mlx.float_modes import MlxFp4
from hfq.formats.mxfp4 import MXINT4, Mxfp4
from hfq.formats.nvfp4 import Nvfp4
from hfq.kernels.cpp.layer_registry import reads
from hfq.kernels.cpp.layer_struct import (
    ADDED,
    BIASED,
    BYTES,
    DTYPES,
    E4M3_SCALED,
    GROUP_WORDS,
    INT8,
    NESTED,
    NIBBLES,
    NONE,
    OUTPUT_BYTES,
    OUTPUT_WORDS,
    QUADS,
    SCALES,
    UINT8,
    CppLayer,
)

__all__ = ["awq_rows", "bnb", "fp4", "gemma_qat", "mlx_affine", "pack_quantized"]

_CODES = tuple(float(code) for code in range(16))
_OFFSET = tuple(float(code - 8) for code in range(16))


def _integers(values: Sequence[float], unit: float, offset: int) -> ctypes.Array:
    return (ctypes.c_uint8 * 16)(*(int(value / unit) + offset for value in values))


_VALUES = {values: (ctypes.c_float * 16)(*values) for values in (_CODES, _OFFSET, E2M1, MXINT4)}
"""The values of 4-bit codes, in memory that outlives every call."""

_INTEGERS = {
    values: (_integers(values, unit, offset), unit, offset)
    for values, unit, offset in ((_OFFSET, 1, 8), (E2M1, 0.5, 12), (MXINT4, 0.25, 7))
}
"""The values as unsigned integers, with the value of 1 and the offset added to each."""

_ASYMMETRIC = _integers(_CODES, 1, 0), 1, 15


@reads(Mxfp4, GptOssMxfp4, DeepseekMxfp4, MlxFp4)
@reads(Nvfp4, reads_values=True)
def fp4(
    weight_format: Fp4Format, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> CppLayer:
    """Describes a layer of MXFP4, MXINT4, NVFP4, or MLX's mxfp4 or nvfp4."""
    codes = tensors[weight_format.codes_name]
    scale = tensors[weight_format.scale_name]
    is_e4m3 = isinstance(weight_format, MlxFp4) and weight_format.mode == "nvfp4"  # as bytes
    shared = float(tensors[weight_format.global_name]) if isinstance(weight_format, Nvfp4) else 1.0
    divides = isinstance(weight_format, Nvfp4) and weight_format.global_name == "weight_global_scale"
    integers, unit, offset = _INTEGERS[weight_format.values]
    return CppLayer(
        codes=codes.data_ptr(),
        row_nbytes=in_features // 2,
        scales=scale.data_ptr(),
        in_features=in_features,
        out_features=out_features,
        kind=NIBBLES,
        bits=4,
        block_out=1,
        block_in=in_features // scale.shape[1],
        scale_stride=scale.shape[1],
        scale_step=1,
        groups=scale.shape[1],
        shared=shared,
        divides=divides,
        scale_dtype=E4M3_SCALED if is_e4m3 else SCALES[scale.dtype],
        values=ctypes.addressof(_VALUES[weight_format.values]),
        integers=ctypes.addressof(integers),
        unit=unit,
        offset=offset,
    )


def _against_mlx(weight_format: Mlx, in_features: int) -> str | None:
    return None if weight_format.num_bits in (4, 8) else "it reads 4-bit and 8-bit codes of mlx affine only"


@reads(Mlx, refuses=_against_mlx)
def mlx_affine(
    weight_format: Mlx, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> CppLayer:
    """Describes a layer of MLX's affine codes: a float is added to code times scale."""
    codes = tensors["weight"]
    scales = tensors["scales"]
    biases = tensors[weight_format.biases_name]
    return CppLayer(
        codes=codes.data_ptr(),
        row_nbytes=codes.shape[1] * 4,
        scales=scales.data_ptr(),
        zeros=biases.data_ptr(),
        in_features=in_features,
        out_features=out_features,
        kind=NIBBLES if weight_format.num_bits == 4 else UINT8,
        bits=weight_format.num_bits,
        block_out=1,
        block_in=weight_format.group_size,
        scale_stride=scales.shape[1],
        scale_step=1,
        groups=scales.shape[1],
        scale_dtype=SCALES[scales.dtype],
        row_zeros=ADDED,
        zero_dtype=DTYPES[biases.dtype],
        values=ctypes.addressof(_VALUES[_CODES]),
    )


def _against_pack_quantized(weight_format: PackQuantized, in_features: int) -> str | None:
    """Returns why the C++ library cannot multiply by such a layer, or None."""
    if weight_format.num_bits == 8:
        return None
    if weight_format.num_bits != 4:
        return "it reads 4-bit and 8-bit codes of pack-quantized only"
    groups = weight_format.scale_shape[1] if len(weight_format.scale_shape) == 2 else 1
    is_cut = groups > 1 and not weight_format.has_g_idx and -(-in_features // groups) % 2
    return "a group ends within a byte" if is_cut else None


@reads(PackQuantized, refuses=_against_pack_quantized, reads_values=True)
def pack_quantized(
    weight_format: PackQuantized, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> CppLayer:
    codes = tensors["weight_packed"]
    scale = tensors["weight_scale"]
    zero = tensors.get("weight_zero_point")
    index = tensors["weight_g_idx"] if weight_format.has_g_idx else None
    groups = scale.shape[1] if scale.dim() == 2 else 1
    is_shared = scale.numel() == 1 and out_features > 1
    packed_zeros = OUTPUT_BYTES if weight_format.num_bits == 8 else OUTPUT_WORDS
    row_zeros = NONE if zero is None else packed_zeros if weight_format.zero_dtype == "I32" else BYTES
    of_codes = {"kind": BIASED, "shared": 1.0} if weight_format.num_bits == 8 else _nibbles(row_zeros)
    return CppLayer(
        codes=codes.data_ptr(),
        row_nbytes=codes.shape[1] * 4,
        scales=scale.data_ptr(),
        in_features=in_features,
        out_features=out_features,
        block_out=out_features if is_shared else 1,
        block_in=-(-in_features // groups),
        scale_stride=groups,
        scale_step=1,
        groups=groups,
        scale_dtype=SCALES[scale.dtype],
        row_zeros=row_zeros,
        zeros=zero.data_ptr() if zero is not None else None,
        index=index.data_ptr() if index is not None else None,
        index_nbytes=index.element_size() if index is not None else 0,
        **of_codes,
    )


def _nibbles(row_zeros: int) -> dict:
    """Returns the fields of a layer of 4-bit codes that are 8 above their values."""
    integers, unit, offset = _ASYMMETRIC if row_zeros == OUTPUT_WORDS else _INTEGERS[_OFFSET]
    return {
        "kind": NIBBLES,
        "bits": 4,
        "values": ctypes.addressof(_VALUES[_OFFSET]),
        "integers": ctypes.addressof(integers),
        "unit": unit,
        "offset": offset,
    }


def _against_gemma(weight_format: GemmaQat, in_features: int) -> str | None:
    """Returns why the C++ library cannot multiply by such a layer, or None."""
    if weight_format.num_bits == 2:
        return "it reads 4-bit and 8-bit codes of gemma-qat only"
    span = in_features // weight_format.blocks
    return "a row or block ends within a byte" if weight_format.num_bits == 4 and span % 2 else None


@reads(GemmaQat, refuses=_against_gemma)
def gemma_qat(
    weight_format: GemmaQat, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> CppLayer:
    codes, scale = tensors[weight_format.codes_name], tensors[weight_format.scale_name]
    integers, unit, offset = _INTEGERS[_OFFSET]
    is_nibble = weight_format.num_bits == 4
    values: dict = {
        "bits": 4,
        "values": ctypes.addressof(_VALUES[_OFFSET]),
        "integers": ctypes.addressof(integers),
        "unit": unit,
        "offset": offset,
    }
    return CppLayer(
        codes=codes.data_ptr(),
        row_nbytes=codes.shape[1],
        scales=scale.data_ptr(),
        in_features=in_features,
        out_features=out_features,
        kind=NIBBLES if is_nibble else INT8,
        shared=1.0,
        block_out=1,
        block_in=in_features // weight_format.blocks,
        scale_stride=weight_format.blocks,
        scale_step=1,
        groups=weight_format.blocks,
        scale_dtype=SCALES[scale.dtype],
        row_zeros=NONE,
        **(values if is_nibble else {}),
    )


def awq_rows(
    weight_format: Awq, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> CppLayer:
    """Describes a layer of gemv or gemv_fast.

    Scales and zero points of gemv_fast are [groups, outputs].
    """
    codes = tensors["qweight"]
    scales = tensors["scales"]
    zeros = tensors[weight_format.zeros_name]
    span = in_features if weight_format.group_size == -1 else weight_format.group_size
    is_fast = weight_format.version == "gemv_fast"
    integers, unit, offset = _ASYMMETRIC
    return CppLayer(
        codes=codes.data_ptr(),
        row_nbytes=in_features // 2,
        scales=scales.data_ptr(),
        zeros=zeros.data_ptr(),
        in_features=in_features,
        out_features=out_features,
        kind=QUADS if is_fast else NIBBLES,
        bits=4,
        block_out=1,
        block_in=span,
        scale_stride=1 if is_fast else scales.shape[1],
        scale_step=scales.shape[1] if is_fast else 1,
        groups=in_features // span,
        scale_dtype=SCALES[scales.dtype],
        row_zeros=ADDED if is_fast else GROUP_WORDS,
        zero_words=zeros.shape[1],
        zero_dtype=DTYPES[zeros.dtype] if is_fast else 0,
        values=ctypes.addressof(_VALUES[_CODES]),
        integers=ctypes.addressof(integers),
        unit=unit,
        offset=offset,
    )


def _against_bnb(weight_format: Bnb4Bit, in_features: int) -> str | None:
    """Returns why the C++ library cannot multiply by such a layer, or None.

    Blocks divide the flattened weight, so they may cross rows.
    """
    if in_features % 2 or (weight_format.blocksize and in_features % weight_format.blocksize):
        return f"a row does not end with a whole block of {weight_format.blocksize}"
    return None


@reads(Bnb4Bit, refuses=_against_bnb)
def bnb(
    weight_format: Bnb4Bit, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> CppLayer:
    """Describes a layer of nf4 or fp4, with plain or double-quantized scales."""
    codes = tensors["weight"]
    scale = tensors["weight.absmax"]
    groups = in_features // weight_format.blocksize
    nested = tensors.get("weight.nested_absmax")
    return CppLayer(
        codes=codes.data_ptr(),
        row_nbytes=in_features // 2,
        scales=scale.data_ptr(),
        in_features=in_features,
        out_features=out_features,
        kind=NIBBLES,
        bits=4,
        block_out=1,
        block_in=weight_format.blocksize,
        scale_stride=groups,
        scale_step=1,
        groups=groups,
        scale_dtype=SCALES[scale.dtype] if nested is None else NESTED,
        values=tensors["weight.quant_map"].data_ptr(),
        high_first=1,
        shared=weight_format.nested_offset,
        nested_size=weight_format.nested_blocksize,
        nested_scales=nested.data_ptr() if nested is not None else None,
        nested_values=tensors["weight.nested_quant_map"].data_ptr() if nested is not None else None,
    )
