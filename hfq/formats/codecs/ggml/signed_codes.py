"""Blocks whose values are products of a signed code and the scale of its group.

    W = code * scale                      in float32, as ggml computes it
    Q4_0, Q5_0, Q8_0                      groups of 32, scales in float16
    Q3_K, Q6_K                            groups of 16, a scale is the product of two

A decoder returns the codes of a block whose scales are all one, and its scales if all codes are one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hfq.checkpoint.gguf.block_types import block_type
from hfq.formats.codecs.ggml.blocks import DECODERS

__all__ = ["SIGNED_TYPES", "WRITTEN_TYPES", "SignedType", "pack_blocks", "unpack_codes", "unpack_scales"]

_SLAB_ROWS = 1024
_ONE = torch.ones(1, dtype=torch.float16).view(torch.uint8).tolist()


@dataclass(frozen=True)
class SignedType:
    """A type of blocks of signed codes with scales.

    Attributes:
        num_bits: Bits of a code, in [-2**(num_bits - 1), 2**(num_bits - 1)).
        group_size: Elements that share a scale.
        scale_dtype: The dtype that holds every scale exactly.
        scales: The first byte of the scales, and bytes that make each scale one.
        codes: The first byte of the codes, and bytes that make each code one.
    """

    num_bits: int
    group_size: int
    scale_dtype: torch.dtype
    scales: tuple[int, list[int]]
    codes: tuple[int, list[int]]


SIGNED_TYPES = {
    "Q4_0": SignedType(4, 32, torch.float16, (0, _ONE), (2, [0x99] * 16)),
    "Q5_0": SignedType(5, 32, torch.float16, (0, _ONE), (2, [0xFF] * 4 + [0x11] * 16)),
    "Q8_0": SignedType(8, 32, torch.float16, (0, _ONE), (2, [1] * 32)),
    "Q3_K": SignedType(
        3,
        16,
        torch.float32,
        (96, [0x11] * 8 + [0xAA] * 4 + _ONE),
        (0, [0xFF] * 32 + [0x55] * 64),
    ),
    "Q6_K": SignedType(6, 16, torch.float32, (192, [1] * 16 + _ONE), (0, [0x11] * 128 + [0xAA] * 64)),
}
"""The types of such blocks."""

WRITTEN_TYPES = {8: "Q8_0", 5: "Q5_0", 4: "Q4_0"}
"""The types that `pack_blocks` makes, by bits of a code."""


def unpack_codes(rows: torch.Tensor, name: str) -> torch.Tensor:
    """Returns the signed codes of rows of blocks, int8 [rows, columns].

    Args:
        rows: uint8 [rows, bytes of a row].
        name: The type, one of `SIGNED_TYPES`.
    """
    return _decoded(rows, name, SIGNED_TYPES[name].scales).to(torch.int8)


def unpack_scales(rows: torch.Tensor, name: str) -> torch.Tensor:
    """Returns the scales of rows of blocks, [rows, groups].

    Args:
        rows: uint8 [rows, bytes of a row].
        name: The type, one of `SIGNED_TYPES`.
    """
    found, kind = SIGNED_TYPES[name], block_type(name)
    if found.group_size == kind.size:  # one float16, stored as it is
        start = found.scales[0]
        raw = rows.unflatten(1, (-1, kind.nbytes))[:, :, start : start + 2].contiguous()
        return raw.view(found.scale_dtype).flatten(1)
    slabs = rows.split(_SLAB_ROWS)
    return torch.cat([_decoded(slab, name, found.codes)[:, :: found.group_size] for slab in slabs])


def pack_blocks(codes: torch.Tensor, scales: torch.Tensor, name: str) -> torch.Tensor:
    """Returns rows of blocks, uint8 [rows, bytes of a row].

    Args:
        codes: int8 [rows, columns].
        scales: float16 [rows, columns / 32].
        name: The type, one of `WRITTEN_TYPES`.
    """
    parts = [scales.contiguous().view(torch.uint8).unflatten(1, (-1, 2))]
    grouped = codes.unflatten(1, (-1, 32))
    if name == "Q8_0":
        parts.append(grouped.contiguous().view(torch.uint8))
    else:
        unsigned = (grouped + (1 << (SIGNED_TYPES[name].num_bits - 1))).view(torch.uint8)
        if name == "Q5_0":
            bits = (unsigned >> 4).unflatten(2, (4, 8)) << torch.arange(8, dtype=torch.uint8)
            parts.append(bits.sum(3, dtype=torch.uint8))
        low = unsigned & 15
        parts.append(low[..., :16] | low[..., 16:] << 4)
    return torch.cat(parts, 2).flatten(1)


def _decoded(rows: torch.Tensor, name: str, ones: tuple[int, list[int]]) -> torch.Tensor:
    """Returns the values of rows of blocks of which some bytes are replaced."""
    kind, (start, replaced) = block_type(name), ones
    blocks = rows.reshape(-1, kind.nbytes).clone()
    blocks[:, start : start + len(replaced)] = torch.tensor(replaced, dtype=torch.uint8)
    values = torch.empty(len(blocks), kind.size, dtype=torch.float32)
    DECODERS[name](blocks, values)
    return values.view(rows.shape[0], -1)
