"""Tells the compiled part where a layer's bytes lie, and how they are meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hfq.formats import Format
from hfq.formats.awq import Awq
from hfq.formats.bitsandbytes import Bnb4Bit
from hfq.formats.compressed_tensors import PackQuantized
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.formats.layouts.scaled import ScaledCodes
from hfq.formats.mlx.affine import Mlx
from hfq.formats.mlx.float_modes import MlxFp8
from hfq.formats.nvfp4 import Nvfp4
from hfq.kernels.cpp import nibble_layers
from hfq.kernels.cpp.layer_struct import (
    AWQ,
    BYTES,
    DTYPES,
    E4M3,
    E5M2,
    GPTQ,
    INT8,
    NONE,
    SCALES,
    ZERO_READINGS,
    NativeLayer,
)
from hfq.kernels.layer_tensors import LayerTensors

__all__ = ["DTYPES", "MOST_GROUPS", "NativeLayer", "describe_layer", "reason_against"]

MOST_GROUPS = 1024
"""The most groups of an input: their scales for a few columns must fit into the memory that each thread
keeps.
"""


def reason_against(weight_format: Format, in_features: int, out_features: int) -> str | None:
    """Why the compiled part cannot multiply by a layer, or None where it can."""
    if isinstance(weight_format, Fp8) and weight_format.block_offset != (0, 0):
        return "the layer is cut within a block"
    if _describer(weight_format) is None:
        return f"it does not read {weight_format.name}"
    if isinstance(weight_format, PackQuantized):
        return nibble_layers.against_pack_quantized(weight_format, in_features)
    if isinstance(weight_format, Mlx) and weight_format.num_bits != 4:
        return "of mlx's affine codes it reads those of 4 bits"
    if isinstance(weight_format, Bnb4Bit):
        return nibble_layers.against_bnb(weight_format, in_features)
    if isinstance(weight_format, ScaledCodes) and weight_format.has_columns:
        return "it does not read scales of input channels"
    return _against_groups(weight_format, in_features) if isinstance(weight_format, Gptq | Awq) else None


def _against_groups(weight_format: Gptq | Awq, in_features: int) -> str | None:
    if isinstance(weight_format, Awq) and weight_format.num_bits != 4:
        return f"it does not read awq of {weight_format.num_bits} bits"
    if (
        isinstance(weight_format, Awq)
        and weight_format.version == "gemv_fast"
        and weight_format.group_size % 32
    ):
        return None if weight_format.group_size == -1 else "a group ends within 32 interleaved channels"
    if isinstance(weight_format, Gptq) and weight_format.is_planar:
        return "it does not read gptq's bit planes"
    groups = 1 if weight_format.group_size == -1 else -(-in_features // weight_format.group_size)
    return f"{groups} groups are more than {MOST_GROUPS}" if groups > MOST_GROUPS else None


def describe_layer(weight_format: Format, tensors: Mapping[str, torch.Tensor]) -> NativeLayer | None:
    """Where the tensors of a layer lie; they must outlive what is returned. None for what the compiled part
    cannot read.

    It is kept with the tensors that a module holds, and else by their places and kinds, and found again where
    they are the same: to describe a layer takes longer than to multiply by a small one. Formats of which a
    layer's numbers are read, and not only their places, are described anew each time.
    """
    if type(tensors) is not LayerTensors:
        return _found_again(weight_format, tensors)
    answer = tensors.answers.get("cpp")
    if isinstance(answer, tuple) and answer[0] is weight_format:
        return answer[1]
    layer = _describe(weight_format, tensors)
    if not isinstance(weight_format, _READ):
        tensors.answers["cpp"] = weight_format, layer
    return layer


_READ = PackQuantized | Nvfp4
"""Formats of whose layers a number is read."""


def _found_again(weight_format: Format, tensors: Mapping[str, torch.Tensor]) -> NativeLayer | None:
    if isinstance(weight_format, _READ):
        return _describe(weight_format, tensors)
    key = (
        id(weight_format),
        *tensors,
        *[(part.data_ptr(), part.dtype, part.shape, part.stride()) for part in tensors.values()],
    )
    kept = _kept.get(key)
    if kept is None:
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        kept = _kept[key] = (
            weight_format,
            _describe(weight_format, tensors),
        )  # the format lives on, and nothing else gets its id
    return kept[1]


_kept: dict[tuple, tuple[Format, NativeLayer | None]] = {}
_MOST_KEPT = 1 << 12


def _describe(weight_format: Format, tensors: Mapping[str, torch.Tensor]) -> NativeLayer | None:
    out_features, in_features = weight_format.shape(tensors)
    if not out_features or not in_features:
        return None
    is_strided = not all(tensor.is_contiguous() for name, tensor in tensors.items() if name != "bias")
    describe, is_held = (
        _describer(weight_format),
        all(tensor.data_ptr() for tensor in tensors.values() if tensor.numel()),
    )
    if (
        describe is None
        or is_strided
        or not is_held
        or reason_against(weight_format, in_features, out_features) is not None
    ):
        return None
    return describe(weight_format, tensors, out_features, in_features)


def _describer(weight_format: Format) -> Callable[..., NativeLayer] | None:
    """What describes a format's layers; None for a subclass, which may mean its codes otherwise."""
    if isinstance(weight_format, Awq) and type(weight_format) is Awq:
        return _awq if weight_format.version == "gemm" else nibble_layers.awq_rows
    if isinstance(weight_format, ScaledCodes):
        kind = type(weight_format)
        is_plain = (
            kind.dequantize_into is ScaledCodes.dequantize_into and kind._rows_of is ScaledCodes._rows_of
        )
        return _scaled if is_plain and weight_format.zero_dtype in (None, "I8") else None
    if nibble_layers.is_fp4(weight_format):
        return nibble_layers.fp4
    describers: dict[type, Callable[..., NativeLayer]] = {
        Fp8: _fp8,
        Gptq: _gptq,
        PackQuantized: nibble_layers.pack_quantized,
        Bnb4Bit: nibble_layers.bnb,
        Mlx: nibble_layers.mlx_affine,
        MlxFp8: nibble_layers.mlx_fp8,
    }
    return describers.get(type(weight_format))


def _fp8(
    weight_format: Fp8, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> NativeLayer:
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


def _scaled(
    weight_format: ScaledCodes, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> NativeLayer:
    """int8, or FP8 under another dialect's names."""
    scale, zero = (
        tensors[weight_format.scale],
        tensors.get(weight_format.zero) if weight_format.zero_dtype else None,
    )
    groups = scale.shape[1] if scale.dim() == 2 else 1
    block_out = (
        weight_format.block[0] if weight_format.block else max(out_features, 1) if scale.numel() == 1 else 1
    )
    return NativeLayer(
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


def _gptq(
    weight_format: Gptq, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> NativeLayer:
    scales, zeros = tensors["scales"], tensors["qzeros"]
    index = tensors["g_idx"] if weight_format.act_order else None
    return NativeLayer(
        codes=tensors["qweight"].data_ptr(),
        scales=scales.data_ptr(),
        zeros=zeros.data_ptr(),
        index=index.data_ptr() if index is not None else None,
        index_nbytes=index.element_size() if index is not None else 0,
        in_features=in_features,
        out_features=out_features,
        groups=scales.shape[0],
        zero_words=zeros.shape[1],
        row_nbytes=4 * out_features,
        block_in=in_features if weight_format.group_size == -1 else weight_format.group_size,
        kind=GPTQ,
        bits=weight_format.num_bits,
        scale_dtype=SCALES[scales.dtype],
        zero_reading=ZERO_READINGS.index(weight_format.zero_reading),
    )


def _awq(
    weight_format: Awq, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> NativeLayer:
    scales, zeros = tensors["scales"], tensors[weight_format.zeros_name]
    return NativeLayer(
        codes=tensors["qweight"].data_ptr(),
        scales=scales.data_ptr(),
        zeros=zeros.data_ptr(),
        in_features=in_features,
        out_features=out_features,
        groups=scales.shape[0],
        zero_words=zeros.shape[1],
        bits=weight_format.num_bits,
        kind=AWQ,
        row_nbytes=4 * zeros.shape[1],
        block_in=in_features if weight_format.group_size == -1 else weight_format.group_size,
        scale_dtype=SCALES[scales.dtype],
    )
