"""Blocks of 256 elements that index a grid of vectors: IQ1_S to IQ3_S.

Each function writes the values of blocks, uint8 [n, bytes], into float32 [n, 256], in ggml's order of
operations.

Source: `ggml-quants.c` of ggml (MIT).
"""

from __future__ import annotations

import torch

from hfq.formats.codecs.ggml.block_parts import halves, words
from hfq.formats.codecs.ggml.grids import grid, signs

__all__ = ["GRID_BLOCKS"]


def _look_up(values: torch.Tensor, name: str, index: torch.Tensor) -> None:
    """Writes the vectors of a grid.

    Args:
        values: float32 [n, 256], overwritten.
        name: The type whose grid it is.
        index: Integers [n, 256 / length of a vector].
    """
    table = grid(name, values.device)
    flat = index.reshape(-1).to(torch.int32)
    torch.index_select(table, 0, flat, out=values.view(-1, table.shape[1]))


def _flip(values: torch.Tensor, bits: torch.Tensor) -> None:
    """Changes the sign of each value whose bit is set.

    Args:
        values: float32 [n, 256].
        bits: Integers [n, 32] of eight bits each, or of seven; the eighth then makes their number even.
    """
    flat = bits.reshape(-1).to(torch.int32)
    values.view(-1, 8).mul_(torch.index_select(signs(values.device), 0, flat))


def _even(bits: torch.Tensor) -> torch.Tensor:
    """Returns seven bits with an eighth that makes the number of set bits even."""
    parity = bits ^ bits >> 4
    parity = parity ^ parity >> 2
    return bits | ((parity ^ parity >> 1) & 1) << 7


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Returns the nibbles of bytes [n, bytes] in order, the lower one first."""
    return torch.stack([packed & 15, packed >> 4], 2).flatten(1)


def _bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the fields of `count` bits of bytes [n, bytes] in order, the lowest one first."""
    mask = (1 << count) - 1
    return torch.stack([(packed >> place) & mask for place in range(0, 8, count)], 2).flatten(1)


def _seven_bits(packed: torch.Tensor) -> torch.Tensor:
    """Returns the four fields of seven bits of words [n, words] in order."""
    return torch.stack([(packed >> place) & 127 for place in range(0, 28, 7)], 2).flatten(1)


def _deltas(bits: torch.Tensor) -> torch.Tensor:
    """Returns the shift of the vectors of IQ1, negative where the lowest bit is set."""
    return 0.125 - 0.25 * (bits & 1).to(torch.float32)


def _iq2_xxs(blocks: torch.Tensor, values: torch.Tensor) -> None:
    packed = blocks[:, 2:].unflatten(1, (8, 8))
    high = words(packed.reshape(-1, 8), 4, 1, torch.int32).view(-1, 8)
    _look_up(values, "IQ2_XXS", packed[:, :, :4])
    _flip(values, _even(_seven_bits(high)))
    scales = halves(blocks, 0) * (((high >> 28) & 15).to(torch.float32) + 0.5) * 0.25
    values.unflatten(1, (8, 32)).mul_(scales[:, :, None])


def _iq2_xs(blocks: torch.Tensor, values: torch.Tensor) -> None:
    packed = words(blocks, 2, 32, torch.int16)
    _look_up(values, "IQ2_XS", packed & 511)
    _flip(values, _even((packed >> 9) & 127))
    scales = halves(blocks, 0) * (_nibbles(blocks[:, 66:]).to(torch.float32) + 0.5) * 0.25
    values.unflatten(1, (16, 16)).mul_(scales[:, :, None])


def _iq2_s(blocks: torch.Tensor, values: torch.Tensor) -> None:
    high = _bits(blocks[:, 66:74], 2).to(torch.int32)
    _look_up(values, "IQ2_S", blocks[:, 2:34] | high << 8)
    _flip(values, blocks[:, 34:66])
    scales = halves(blocks, 0) * (_nibbles(blocks[:, 74:]).to(torch.float32) + 0.5) * 0.25
    values.unflatten(1, (16, 16)).mul_(scales[:, :, None])


def _iq3_xxs(blocks: torch.Tensor, values: torch.Tensor) -> None:
    high = words(blocks, 66, 8, torch.int32)
    _look_up(values, "IQ3_XXS", blocks[:, 2:66])
    _flip(values, _even(_seven_bits(high)))
    scales = halves(blocks, 0) * (((high >> 28) & 15).to(torch.float32) + 0.5) * 0.5
    values.unflatten(1, (8, 32)).mul_(scales[:, :, None])


def _iq3_s(blocks: torch.Tensor, values: torch.Tensor) -> None:
    high = _bits(blocks[:, 66:74], 1).to(torch.int32)
    _look_up(values, "IQ3_S", blocks[:, 2:66] | high << 8)
    _flip(values, blocks[:, 74:106])
    scales = halves(blocks, 0) * (2 * _nibbles(blocks[:, 106:]) + 1)
    values.unflatten(1, (8, 32)).mul_(scales[:, :, None])


def _iq1_s(blocks: torch.Tensor, values: torch.Tensor) -> None:
    high = words(blocks, 34, 8, torch.int16)
    top = torch.stack([(high >> place) & 7 for place in range(0, 12, 3)], 2).flatten(1)
    _look_up(values, "IQ1_S", blocks[:, 2:34] | top << 8)
    groups = values.unflatten(1, (8, 32))
    groups.add_(_deltas(high >> 15)[:, :, None])
    groups.mul_((halves(blocks, 0) * (2 * ((high >> 12) & 7) + 1))[:, :, None])


def _iq1_m(blocks: torch.Tensor, values: torch.Tensor) -> None:
    high, packed = _nibbles(blocks[:, 32:48]), words(blocks, 48, 4, torch.int16)
    _look_up(values, "IQ1_S", blocks[:, :32] | (high & 7).to(torch.int32) << 8)
    values.unflatten(1, (32, 8)).add_(_deltas(high >> 3)[:, :, None])
    top = (packed >> 12) & 15  # the scale is spread over the highest bits of four words
    d = (top[:, :1] | top[:, 1:2] << 4 | top[:, 2:3] << 8 | top[:, 3:] << 12).to(torch.int16)
    steps = torch.stack([(packed >> place) & 7 for place in range(0, 12, 3)], 2).flatten(1)
    scales = d.view(torch.float16).to(torch.float32) * (2 * steps + 1)
    values.unflatten(1, (16, 16)).mul_(scales[:, :, None])


GRID_BLOCKS = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
"""The decoder of each type."""
