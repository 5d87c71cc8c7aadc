"""Descriptions of layers whose codes are packed in 32-bit words: GPTQ and AWQ."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hfq.formats.awq import Awq
from hfq.formats.gptq import Gptq
from hfq.kernels.cpp.layer_registry import reads
from hfq.kernels.cpp.layer_struct import AWQ, GPTQ, SCALES, ZERO_READINGS, CppLayer
from hfq.kernels.cpp.nibble_layers import awq_rows

__all__ = ["MOST_GROUPS", "awq", "gptq"]

MOST_GROUPS = 1024
"""The most groups of input channels.

The scales of a few columns must fit into the scratch memory of a thread.
"""


def _against_gptq(weight_format: Gptq, in_features: int) -> str | None:
    if weight_format.is_planar:
        return "it does not read gptq's bit planes"
    return _against_groups(weight_format.group_size, in_features)


def _against_awq(weight_format: Awq, in_features: int) -> str | None:
    if weight_format.num_bits != 4:
        return f"it does not read awq of {weight_format.num_bits} bits"
    if weight_format.version == "gemv_fast" and weight_format.group_size % 32:
        return None if weight_format.group_size == -1 else "a group ends within 32 interleaved channels"
    return _against_groups(weight_format.group_size, in_features)


def _against_groups(group_size: int, in_features: int) -> str | None:
    groups = 1 if group_size == -1 else -(-in_features // group_size)
    return f"{groups} groups are more than {MOST_GROUPS}" if groups > MOST_GROUPS else None


@reads(Gptq, refuses=_against_gptq)
def gptq(
    weight_format: Gptq, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> CppLayer:
    scales, zeros = tensors["scales"], tensors["qzeros"]
    index = tensors["g_idx"] if weight_format.act_order else None
    return CppLayer(
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


@reads(Awq, refuses=_against_awq)
def awq(
    weight_format: Awq, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> CppLayer:
    """Describes a gemm layer; layers of gemv and gemv_fast have rows of nibbles."""
    if weight_format.version != "gemm":
        return awq_rows(weight_format, tensors, out_features, in_features)
    scales, zeros = tensors["scales"], tensors[weight_format.zeros_name]
    return CppLayer(
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
