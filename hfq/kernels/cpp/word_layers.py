"""Descriptions of layers of codes in 32-bit words: GPTQ, AWQ, and Quark's uint4."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hfq.formats.awq import Awq
from hfq.formats.gptq import Gptq
from hfq.formats.quark import QuarkInt4
from hfq.kernels.cpp.layer_registry import reads
from hfq.kernels.cpp.layer_struct import AWQ, GPTQ, SCALES, ZERO_READINGS, CppLayer
from hfq.kernels.cpp.nibble_layers import awq_rows

__all__ = ["MOST_GROUPS", "awq", "gptq", "quark"]

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
    return _gemm(tensors["qweight"], tensors["scales"], tensors[weight_format.zeros_name])


def _against_quark(weight_format: QuarkInt4, in_features: int) -> str | None:
    if weight_format.is_signed or weight_format.is_in_order or weight_format.group_size is None:
        return "it reads uint4 of quark in groups and in Quark's usual order only"
    return _against_groups(weight_format.group_size, in_features)


@reads(QuarkInt4, refuses=_against_quark)
def quark(
    weight_format: QuarkInt4, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> CppLayer:
    """Describes a layer in groups, which is one of AWQ's gemm."""
    return _gemm(tensors["weight"], tensors["weight_scale"], tensors["weight_zero_point"])


def _gemm(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> CppLayer:
    in_features, groups = codes.shape[0], scales.shape[0]
    return CppLayer(
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        zeros=zeros.data_ptr(),
        in_features=in_features,
        out_features=scales.shape[1],
        groups=groups,
        zero_words=zeros.shape[1],
        bits=4,
        kind=AWQ,
        row_nbytes=4 * zeros.shape[1],
        block_in=in_features // groups,
        scale_dtype=SCALES[scales.dtype],
    )
