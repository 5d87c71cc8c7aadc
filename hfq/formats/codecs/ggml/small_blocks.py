"""Blocks with one scale: Q4_0 to Q8_0, IQ4_NL, MXFP4, NVFP4, Q1_0, Q2_0, TQ1_0, and TQ2_0.

Each function writes the values of blocks, uint8 [n, bytes], into float32 [n, elements], in ggml's order of
operations.

Source: `ggml-quants.c` of ggml (MIT).
"""

from __future__ import annotations

import torch

from hfq.formats.codecs.constants import constant
from hfq.formats.codecs.ggml.block_parts import halves, nibbles_into
from hfq.formats.codecs.nibbles import look_up_nibbles

__all__ = ["IQ4_VALUES", "SMALL_BLOCKS", "look_up_halves"]

IQ4_VALUES = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
"""The value of each code of IQ4_NL and IQ4_XS, before its scale."""

_E2M1 = tuple(map(float, (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)))
"""Twice the value of each code of MXFP4 and NVFP4; zero has no sign."""


def look_up_halves(values: torch.Tensor, packed: torch.Tensor, table: tuple[float, ...]) -> None:
    """Writes the values of 4-bit codes, the lower halves of all bytes first.

    Args:
        values: float32 [..., 2 * bytes], overwritten.
        packed: uint8 [..., bytes].
        table: The value of each code.
    """
    pairs = torch.empty(*packed.shape, 2, dtype=torch.float32, device=packed.device)
    flat = packed.reshape(-1, packed.shape[-1])
    look_up_nibbles(pairs.view(flat.shape[0], -1), flat, constant(table, packed.device))
    values.unflatten(-1, (2, packed.shape[-1])).copy_(pairs.transpose(-1, -2))


def _q4_0(blocks: torch.Tensor, values: torch.Tensor) -> None:
    nibbles_into(values, blocks[:, 2:])
    values.sub_(8).mul_(halves(blocks, 0))


def _q4_1(blocks: torch.Tensor, values: torch.Tensor) -> None:
    scales = halves(blocks, 0, 2)
    nibbles_into(values, blocks[:, 4:])
    values.mul_(scales[:, :1]).add_(scales[:, 1:])


def _q5_0(blocks: torch.Tensor, values: torch.Tensor) -> None:
    nibbles_into(values, blocks[:, 6:])
    _add_high_bits(values, blocks, 2)
    values.sub_(16).mul_(halves(blocks, 0))


def _q5_1(blocks: torch.Tensor, values: torch.Tensor) -> None:
    scales = halves(blocks, 0, 2)
    nibbles_into(values, blocks[:, 8:])
    _add_high_bits(values, blocks, 4)
    values.mul_(scales[:, :1]).add_(scales[:, 1:])


def _add_high_bits(values: torch.Tensor, blocks: torch.Tensor, start: int) -> None:
    """Adds 16 to each value whose bit in four bytes is set."""
    bits = blocks[:, start : start + 4]
    by_byte = values.unflatten(1, (4, 8))
    for bit in range(8):
        by_byte[:, :, bit].add_((bits >> bit) & 1, alpha=16)


def _q8_0(blocks: torch.Tensor, values: torch.Tensor) -> None:
    values.copy_(blocks[:, 2:].view(torch.int8)).mul_(halves(blocks, 0))


def _iq4_nl(blocks: torch.Tensor, values: torch.Tensor) -> None:
    look_up_halves(values, blocks[:, 2:], IQ4_VALUES)
    values.mul_(halves(blocks, 0))


def _mxfp4(blocks: torch.Tensor, values: torch.Tensor) -> None:
    exponent = blocks[:, :1].to(torch.int32)
    # half of 2**(e - 127), since the table has twice the values; the two smallest are subnormal
    bits = torch.where(exponent < 2, 1 << (exponent + 21).clamp_(max=22), (exponent - 1) << 23)
    look_up_halves(values, blocks[:, 1:], _E2M1)
    values.mul_(bits.view(torch.float32))


def _nvfp4(blocks: torch.Tensor, values: torch.Tensor) -> None:
    look_up_halves(values.unflatten(1, (4, 16)), blocks[:, 4:].unflatten(1, (4, 8)), _E2M1)
    values.unflatten(1, (4, 16)).mul_(_ue4m3_halves(blocks[:, :4])[:, :, None])


def _ue4m3_halves(codes: torch.Tensor) -> torch.Tensor:
    """Returns half the value of each scale of NVFP4.

    The sign bit has no meaning, and 0x7F is zero.
    """
    exponent, fraction = (codes >> 3) & 15, (codes & 7).to(torch.float32)
    power = ((exponent.to(torch.int32) + 119) << 23).view(torch.float32)  # 2**(exponent - 8)
    found = torch.where(exponent == 0, fraction * 2**-10, (fraction / 8 + 1) * power)
    return found.masked_fill_(codes == 127, 0)


def _q1_0(blocks: torch.Tensor, values: torch.Tensor) -> None:
    by_byte = values.unflatten(1, (16, 8))
    for bit in range(8):
        by_byte[:, :, bit].copy_((blocks[:, 2:] >> bit) & 1)
    values.mul_(2).sub_(1).mul_(halves(blocks, 0))


def _q2_0(blocks: torch.Tensor, values: torch.Tensor) -> None:
    by_byte = values.unflatten(1, (16, 4))
    for place in range(4):
        by_byte[:, :, place].copy_((blocks[:, 2:] >> 2 * place) & 3)
    values.sub_(1).mul_(halves(blocks, 0))


def _tq1_0(blocks: torch.Tensor, values: torch.Tensor) -> None:
    start = 0
    for first, count, digits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        packed = blocks[:, first : first + count]
        for _ in range(digits):
            values[:, start : start + count] = (packed.to(torch.int16) * 3) >> 8
            packed = packed * 3  # modulo 256
            start += count
    values.sub_(1).mul_(halves(blocks, 52))


def _tq2_0(blocks: torch.Tensor, values: torch.Tensor) -> None:
    packed, by_place = blocks[:, :64].unflatten(1, (2, 32)), values.unflatten(1, (2, 4, 32))
    for place in range(4):
        by_place[:, :, place].copy_((packed >> 2 * place) & 3)
    values.sub_(1).mul_(halves(blocks, 64))


SMALL_BLOCKS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
"""The decoder of each type."""
