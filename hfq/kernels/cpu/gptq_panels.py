"""Panels of GPTQ in plain torch, in the order that its codes lie in: [in_features, rows], so that nothing is transposed.

A code is masked out of its word where it stands, at bit b; with the bits of 2^23 set above it, it is the float 2^23 + code * 2^b.
Less 2^23 + zero_point * 2^b, that is (code - zero_point) * 2^b, exactly, and scales are taken times 2^-b: what is rounded is the
product that `Gptq.dequantize_into` rounds, to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

import torch

from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.formats.gptq import Gptq

__all__ = ["fill_gptq", "is_fillable"]

_CPU = torch.device("cpu")


def is_fillable(weight_format: object) -> TypeGuard[Gptq]:
    """Whether codes lie one after the other along the input."""
    return isinstance(weight_format, Gptq) and not weight_format.is_planar


def fill_gptq(
    weight_format: Gptq, tensors: Mapping[str, torch.Tensor], start: int, rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """Output rows [start, start + rows) of the weight: [rows, in_features], rounded to `dtype`, a transposed view of a kept buffer."""
    num_bits = weight_format.num_bits
    period = num_bits // math.gcd(num_bits, 32)  # words that hold whole codes
    share = 32 * period // num_bits
    words = tensors["qweight"][:, start : start + rows].unflatten(0, (-1, period))
    count = words.shape[0]
    panel = thread_buffer("panel", dtype, _CPU, count * share * rows).view(count, share, rows)
    zeros = weight_format.zero_points(tensors["qzeros"], start, start + rows)
    scales = tensors["scales"][:, start : start + rows].to(torch.float32)
    bits, spare = (thread_buffer(use, torch.int32, _CPU, count * rows).view(count, rows) for use in ("bits", "spare"))
    high = thread_buffer("high", torch.int32, _CPU, words.numel()).view(words.shape)
    magic = torch.empty_like(zeros)
    _fill(
        words, high, bits, bits.view(torch.float32), spare, spare.view(torch.float32), zeros, magic, magic.view(torch.float32),
        scales, _groups(weight_format, tensors, count, share), panel, num_bits, tensors["scales"].dtype != torch.float16,
    )  # fmt: skip
    return panel.view(-1, rows).t()


def _groups(weight_format: Gptq, tensors: Mapping[str, torch.Tensor], count: int, share: int) -> torch.Tensor:
    """The group of each channel, int64 [share, count]; none where all channels of a period are of one group, as many of each."""
    in_features, groups = count * share, tensors["scales"].shape[0]
    span = in_features if weight_format.group_size == -1 else weight_format.group_size
    if weight_format.act_order:
        index = tensors["g_idx"].to(torch.int64)
    elif span % share or span * groups != in_features:
        index = torch.arange(in_features) // span
    else:
        return torch.empty(0, 0, dtype=torch.int64)
    return index.view(count, share).t().contiguous()


def _fill(
    words: torch.Tensor, high: torch.Tensor, bits: torch.Tensor, floats: torch.Tensor, spare: torch.Tensor,
    spread: torch.Tensor, zeros: torch.Tensor, magic: torch.Tensor, magic_floats: torch.Tensor, scales: torch.Tensor,
    index: torch.Tensor, panel: torch.Tensor, num_bits: int, is_shifted: bool,
) -> None:  # fmt: skip
    """Writes [count, share, rows] of words [count, period, rows]; the other tensors but zeros, scales and the index are overwritten.

    Where `is_shifted`, codes are brought to the first bit, for scales of which 2^-16 may be subnormal.
    """
    mask = (1 << num_bits) - 1
    torch.bitwise_right_shift(words, 16, out=high)
    for place in range(panel.shape[1]):
        word, offset = place * num_bits // 32, place * num_bits % 32
        here, position = words[:, word], 0
        if offset + num_bits > 32:  # its upper bits are the next word's lowest
            torch.bitwise_right_shift(here, offset, out=bits)
            bits.bitwise_and_((1 << (32 - offset)) - 1)
            torch.bitwise_left_shift(words[:, word + 1], 32 - offset, out=spare)
            bits.bitwise_or_(spare.bitwise_and_(mask ^ ((1 << (32 - offset)) - 1)))
        elif is_shifted:
            torch.bitwise_right_shift(here, offset, out=bits)
            bits.bitwise_and_(mask)
        else:
            position = offset % 16
            torch.bitwise_and(here if offset < 16 else high[:, word], mask << position, out=bits)
        bits.bitwise_or_(0x4B000000)  # of 2^23
        torch.mul(zeros, 1 << position, out=magic)
        magic.bitwise_or_(0x4B000000)
        scale = scales * (1.0 / (1 << position))
        if index.numel():
            floats.sub_(torch.index_select(magic_floats, 0, index[place], out=spread))
            floats.mul_(torch.index_select(scale, 0, index[place], out=spread))
        else:
            grouped = floats.view(scales.shape[0], floats.shape[0] // scales.shape[0], floats.shape[1])
            grouped.sub_(magic_floats[:, None]).mul_(scale[:, None])
        panel[:, place].copy_(floats)
