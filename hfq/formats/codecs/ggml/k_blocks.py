"""Blocks of 256 elements with quantized scales: Q2_K to Q6_K, and IQ4_XS.

Each function writes the values of blocks, uint8 [n, bytes], into float32 [n, 256], in ggml's order of
operations.

Source: `ggml-quants.c` of ggml (MIT).
"""

from __future__ import annotations

import torch

from hfq.formats.codecs.ggml.block_parts import halves, nibbles_into, words
from hfq.formats.codecs.ggml.small_blocks import IQ4_VALUES, look_up_halves

__all__ = ["K_BLOCKS"]


def _q2_k(blocks: torch.Tensor, values: torch.Tensor) -> None:
    scales, codes = blocks[:, :16], blocks[:, 16:80].unflatten(1, (2, 32))
    by_place = values.unflatten(1, (2, 4, 32))
    for place in range(4):
        by_place[:, :, place].copy_((codes >> 2 * place) & 3)
    d, least = halves(blocks, 80, 2).split(1, 1)
    groups = values.unflatten(1, (16, 16))
    groups.mul_(((scales & 15) * d)[:, :, None]).sub_(((scales >> 4) * least)[:, :, None])


def _q3_k(blocks: torch.Tensor, values: torch.Tensor) -> None:
    high, codes = blocks[:, :32], blocks[:, 32:96].unflatten(1, (2, 32))
    by_place = values.unflatten(1, (2, 4, 32))
    for half in range(2):
        for place in range(4):
            bits = (high >> 4 * half + place) & 1
            by_place[:, half, place].copy_(((codes[:, half] >> 2 * place) & 3) | bits << 2)
    packed = blocks[:, 96:108]
    low = torch.cat([packed[:, :8] & 15, packed[:, :8] >> 4], 1)
    top = torch.cat([(packed[:, 8:] >> 2 * place) & 3 for place in range(4)], 1)
    scales = (low | top << 4).to(torch.float32).sub_(32).mul_(halves(blocks, 108))
    values.sub_(4).unflatten(1, (16, 16)).mul_(scales[:, :, None])


def _q4_k(blocks: torch.Tensor, values: torch.Tensor) -> None:
    nibbles_into(values.unflatten(1, (4, 64)), blocks[:, 16:].unflatten(1, (4, 32)))
    _scale(values, blocks)


def _q5_k(blocks: torch.Tensor, values: torch.Tensor) -> None:
    nibbles_into(values.unflatten(1, (4, 64)), blocks[:, 48:].unflatten(1, (4, 32)))
    high, groups = blocks[:, 16:48], values.unflatten(1, (8, 32))
    for group in range(8):
        groups[:, group].add_((high >> group) & 1, alpha=16)
    _scale(values, blocks)


def _scale(values: torch.Tensor, blocks: torch.Tensor) -> None:
    """Applies the scales and minima of Q4_K and Q5_K: six bits each, in twelve bytes."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], 1)
    least = torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], 1)
    d, step = halves(blocks, 0, 2).split(1, 1)
    values.unflatten(1, (8, 32)).mul_((scales * d)[:, :, None]).sub_((least * step)[:, :, None])


def _q6_k(blocks: torch.Tensor, values: torch.Tensor) -> None:
    low, high = blocks[:, :128].unflatten(1, (2, 64)), blocks[:, 128:192].unflatten(1, (2, 32))
    by_place = values.unflatten(1, (2, 4, 32))
    for place in range(4):
        part = low[:, :, 32 * (place % 2) :][:, :, :32]
        part = part & 15 if place < 2 else part >> 4
        by_place[:, :, place].copy_(part | ((high >> 2 * place) & 3) << 4)
    scales = blocks[:, 192:208].view(torch.int8) * halves(blocks, 208)
    values.sub_(32).unflatten(1, (16, 16)).mul_(scales[:, :, None])


def _iq4_xs(blocks: torch.Tensor, values: torch.Tensor) -> None:
    groups = values.unflatten(1, (8, 32))
    look_up_halves(groups, blocks[:, 8:].unflatten(1, (8, 16)), IQ4_VALUES)
    packed, high = blocks[:, 4:8], words(blocks, 2, 1, torch.int16)
    low = torch.stack([packed & 15, packed >> 4], 2).flatten(1)
    top = torch.cat([(high >> 2 * group) & 3 for group in range(8)], 1)
    scales = (low | top << 4).to(torch.float32).sub_(32).mul_(halves(blocks, 0))
    groups.mul_(scales[:, :, None])


K_BLOCKS = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}
"""The decoder of each type."""
