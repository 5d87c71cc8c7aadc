"""Tells the compiled part where a layer's bytes lie, and how they are meant."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from hfq.formats import Format
from hfq.formats.awq import Awq
from hfq.formats.compressed_tensors import PackQuantized
from hfq.formats.fp4 import E2M1
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.formats.mxfp4 import MXINT4, Mxfp4

__all__ = ["DTYPES", "MOST_GROUPS", "NativeLayer", "describe_layer", "reason_against"]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Activations that the compiled part reads, and scales, by the numbers it knows them by."""

MOST_GROUPS = 1024
"""The most groups of an input: their scales for a few columns must fit into the memory that each thread keeps."""

_SCALES = {**DTYPES, torch.float8_e8m0fnu: 3, torch.uint8: 3}
_ZERO_READINGS = ("stored", "field_plus_one", "masked_plus_one", "word_plus_one")
_E4M3, _E5M2, _NIBBLES, _GPTQ, _AWQ = range(5)
_OFFSET = tuple(float(code - 8) for code in range(16))
_VALUES = {values: (ctypes.c_float * 16)(*values) for values in (_OFFSET, E2M1, MXINT4)}
"""What 4-bit codes stand for, in memory that outlives every call."""


class NativeLayer(ctypes.Structure):
    """`Layer` of kernels.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "index")),
        *((name, ctypes.c_int64) for name in ("in_features", "out_features", "block_out", "block_in", "scale_stride")),
        *((name, ctypes.c_int64) for name in ("groups", "zero_words", "row_nbytes")),
        *((name, ctypes.c_int32) for name in ("kind", "bits", "scale_dtype", "divides", "zero_reading", "index_nbytes")),
    )


def reason_against(weight_format: Format, in_features: int, out_features: int) -> str | None:
    """Why the compiled part cannot multiply by a layer, or None where it can."""
    if isinstance(weight_format, Fp8) and weight_format.block_offset != (0, 0):
        return "the layer is cut within a block"
    if type(weight_format) in (Fp8, Mxfp4):  # a subclass may mean its codes otherwise
        return None
    if type(weight_format) is PackQuantized:
        return _against_pack_quantized(weight_format, in_features)
    if not isinstance(weight_format, Gptq | Awq) or type(weight_format) not in (Gptq, Awq):
        return f"it does not read {weight_format.name}"
    if isinstance(weight_format, Awq) and (weight_format.version != "gemm" or weight_format.num_bits != 4):
        return f"it does not read awq {weight_format.version} of {weight_format.num_bits} bits"
    if isinstance(weight_format, Gptq) and weight_format.is_planar:
        return "it does not read gptq's bit planes"
    groups = 1 if weight_format.group_size == -1 else -(-in_features // weight_format.group_size)
    return f"{groups} groups are more than {MOST_GROUPS}" if groups > MOST_GROUPS else None


def _against_pack_quantized(weight_format: PackQuantized, in_features: int) -> str | None:
    if weight_format.num_bits != 4 or not weight_format.is_symmetric or weight_format.has_g_idx:
        return "of pack-quantized it reads 4-bit codes without zero points and act-order"
    groups = weight_format.scale_shape[1] if len(weight_format.scale_shape) == 2 else 1
    return "a group ends within a byte" if groups > 1 and -(-in_features // groups) % 2 else None


def describe_layer(weight_format: Format, tensors: Mapping[str, torch.Tensor]) -> NativeLayer | None:
    """Where the tensors of a layer lie; they must outlive what is returned. None for what the compiled part cannot read."""
    out_features, in_features = weight_format.shape(tensors)
    is_strided = not all(tensor.is_contiguous() for tensor in tensors.values())
    if is_strided or reason_against(weight_format, in_features, out_features) is not None:
        return None
    if isinstance(weight_format, Fp8):
        return _fp8(weight_format, tensors, out_features, in_features)
    if isinstance(weight_format, Gptq):
        return _gptq(weight_format, tensors, out_features, in_features)
    if isinstance(weight_format, Awq):
        return _awq(weight_format, tensors, out_features, in_features)
    if isinstance(weight_format, Mxfp4 | PackQuantized):
        return _nibbles(weight_format, tensors, out_features, in_features)
    return None


def _fp8(weight_format: Fp8, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> NativeLayer:
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
    return NativeLayer(
        codes=tensors["weight"].data_ptr(), scales=scale.data_ptr(), in_features=in_features, out_features=out_features,
        row_nbytes=in_features,
        block_out=block_out, block_in=block_in, scale_stride=stride, scale_dtype=_SCALES[scale.dtype],
        kind=_E4M3 if weight_format.codes_dtype == "F8_E4M3" else _E5M2, divides=weight_format.reciprocal,
    )  # fmt: skip


def _nibbles(
    weight_format: Mxfp4 | PackQuantized, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> NativeLayer:
    codes, scale = tensors[weight_format.codes_name], tensors["weight_scale"]
    groups = scale.shape[1] if scale.dim() == 2 else 1
    is_shared = scale.numel() == 1 and out_features > 1
    values = _VALUES[weight_format.values if isinstance(weight_format, Mxfp4) else _OFFSET]
    return NativeLayer(
        codes=codes.data_ptr(), row_nbytes=codes.shape[1] * codes.element_size(), scales=scale.data_ptr(),
        zeros=ctypes.addressof(values), in_features=in_features, out_features=out_features, kind=_NIBBLES, bits=4,
        block_out=out_features if is_shared else 1, block_in=-(-in_features // groups), scale_stride=groups,
        scale_dtype=_SCALES[scale.dtype],
    )  # fmt: skip


def _gptq(weight_format: Gptq, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> NativeLayer:
    scales, zeros = tensors["scales"], tensors["qzeros"]
    index = tensors["g_idx"] if weight_format.act_order else None
    return NativeLayer(
        codes=tensors["qweight"].data_ptr(), scales=scales.data_ptr(), zeros=zeros.data_ptr(),
        index=index.data_ptr() if index is not None else None, index_nbytes=index.element_size() if index is not None else 0,
        in_features=in_features, out_features=out_features, groups=scales.shape[0], zero_words=zeros.shape[1],
        block_in=in_features if weight_format.group_size == -1 else weight_format.group_size, kind=_GPTQ,
        bits=weight_format.num_bits, scale_dtype=_SCALES[scales.dtype],
        zero_reading=_ZERO_READINGS.index(weight_format.zero_reading),
    )  # fmt: skip


def _awq(weight_format: Awq, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int) -> NativeLayer:
    scales, zeros = tensors["scales"], tensors[weight_format.zeros_name]
    return NativeLayer(
        codes=tensors["qweight"].data_ptr(), scales=scales.data_ptr(), zeros=zeros.data_ptr(), in_features=in_features,
        out_features=out_features, groups=scales.shape[0], zero_words=zeros.shape[1], bits=weight_format.num_bits, kind=_AWQ,
        block_in=in_features if weight_format.group_size == -1 else weight_format.group_size, scale_dtype=_SCALES[scales.dtype],
    )  # fmt: skip
