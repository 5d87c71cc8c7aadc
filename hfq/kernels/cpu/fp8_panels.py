"""A few activation rows times e4m3 codes in plain torch: by parts that stay in a processor's caches, and are never scaled.

A code's bits shifted by seven, without the one that its sign was copied to, are a float16 of 1/256 of its value, subnormal values
included; so a part is three operations and one conversion away from float32. Scales of blocks are multiplied with the activations,
others with the sums.
"""

from __future__ import annotations

from typing import TypeGuard

import torch

from hfq.formats.codecs.fp8_codes import has_nan
from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.formats.fp8 import Fp8
from hfq.kernels.cpu import thread_team

__all__ = ["MOST_ROWS", "PART_NUMEL", "is_for_few", "multiply_few"]

MOST_ROWS = 16
"""The most activation rows: a scaled panel of the whole is worth its making for more. Where that is bfloat16, it is for two."""

PART_NUMEL = 1 << 19
"""Codes that a thread takes at once, or up to three times as many, unless `_STEP` rows have more: few enough for the last cache, and
enough for each call to pay."""

_STEP = 32
"""Parts are multiples of so many rows: a library's product may sum rows that are left over in another order."""

_LONG_STEP = 128
"""The usual rows of a block: parts are multiples of so many, where they have no more than three times as many codes for it."""

_CPU = torch.device("cpu")


def is_for_few(weight_format: object, weight: torch.Tensor, rows: torch.Tensor) -> TypeGuard[Fp8]:
    """Whether `multiply_few` takes this format, this weight and these activations, if none of its codes is NaN."""
    if not isinstance(weight_format, Fp8) or weight_format.codes_dtype != "F8_E4M3" or weight_format.strategy == "group":
        return False
    if weight_format.strategy == "block" and _block(weight_format)[0] < MOST_ROWS:
        return False  # scaled activations of all blocks of a part would be more than the part
    if rows.requires_grad and torch.is_grad_enabled():
        return False  # kept buffers would take part in what autograd records; panels refuse it
    return weight.numel() > 0 and 0 < rows.shape[0] <= MOST_ROWS and rows.dtype != torch.float64


def multiply_few(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, weight_format: Fp8) -> torch.Tensor | None:
    """`rows @ W.T` in float32.

    Args:
        rows: [rows, in_features], on a CPU.
        weight: float8_e4m3fn [out_features, in_features], see `is_for_few`.
        scale: float32, in a shape of the format.
        weight_format: The format of both.

    Returns:
        float32 [rows, out_features]; None where a code is NaN, which a float16 of its bits is not.
    """
    (out_features, in_features), count = weight.shape, rows.shape[0]
    has_blocks = weight_format.strategy == "block"
    block_out, block_in = _block(weight_format) if has_blocks else (1, in_features)
    above, before = weight_format.block_offset if has_blocks else (0, 0)  # where a slice begins within its first block
    sums = torch.empty(out_features, count, dtype=torch.float32, device=_CPU)
    wide = _widen_rows(rows, before, block_in)
    factors = scale.reshape(-1, 1, wide.shape[1], 1) if has_blocks else None
    bits, step, are_numbers = weight.view(torch.int8), _step(in_features), []

    def multiply(share: range) -> None:
        numel = min(step, len(share)) * in_features
        halves = thread_buffer("fp8", torch.int16, _CPU, numel).view(-1, in_features)
        panel = thread_buffer("panel", torch.float32, _CPU, numel).view(-1, in_features)
        blocks = step // block_out + 2 if has_blocks else 0
        scaled = thread_buffer("scaled", torch.float32, _CPU, blocks * wide.numel()).view(blocks, *wide.shape)
        are_numbers.append(_multiply_share(
            wide, bits, bits.view(torch.uint8), halves, halves.view(torch.float16), panel, factors, scaled, sums,
            share.start, share.stop, step, block_out, above, before, weight_format.reciprocal,
        ))  # fmt: skip

    members = thread_team.members(out_features, in_features)
    shares = thread_team.divide(out_features, out_features, (_LONG_STEP, _STEP), members)
    thread_team.for_each(multiply, shares, members)
    if not all(are_numbers):
        return None
    if not has_blocks:
        apply = torch.div if weight_format.reciprocal else torch.mul
        apply(sums, scale.reshape(-1, 1), out=sums)
    return sums.mul_(256).t()


def _multiply_share(
    rows: torch.Tensor, codes: torch.Tensor, unsigned: torch.Tensor, bits: torch.Tensor, halves: torch.Tensor, panel: torch.Tensor,
    factors: torch.Tensor | None, scaled: torch.Tensor, sums: torch.Tensor,
    start: int, stop: int, step: int, block_out: int, above: int, before: int, divides: bool,
) -> bool:  # fmt: skip
    """Output rows from `start` to `stop`, by `step` of them; whether none of their codes is NaN, else sums are left out."""
    in_features = codes.shape[1]
    for top in range(start, stop, step):
        bottom = min(top + step, stop)
        count = bottom - top
        if has_nan(codes[top:bottom], unsigned[top:bottom]):
            return False
        bits[:count].copy_(codes[top:bottom]).mul_(1 << 7).bitwise_and_(-0x4001)  # all but the bit that the sign was copied to
        panel[:count].copy_(halves[:count])
        if factors is None:
            _multiply(panel[:count], rows.flatten(1), sums[top:bottom])
        else:
            first, last = (top + above) // block_out, (bottom + above + block_out - 1) // block_out
            x = scaled[: last - first]
            if divides:
                torch.div(rows, factors[first:last], out=x)
            else:
                torch.mul(rows, factors[first:last], out=x)
            for block in range(first, last):
                upper, lower = max(block * block_out - above, top), min((block + 1) * block_out - above, bottom)
                given = x[block - first].flatten(1)[:, before : before + in_features]
                _multiply(panel[upper - top : lower - top], given, sums[upper:lower])
    return True


def _multiply(panel: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor) -> None:
    """[out_features, channels] times [rows, channels] into [out_features, rows]."""
    if rows.shape[0] == 1:
        torch.mv(panel, rows[0], out=sums[:, 0])
    else:
        torch.mm(panel, rows.t(), out=sums)


def _block(weight_format: Fp8) -> tuple[int, int]:
    return weight_format.block_structure or (128, 128)


def _step(in_features: int) -> int:
    """The rows of a part."""
    most = PART_NUMEL // in_features
    whole = -(-most // _LONG_STEP) * _LONG_STEP
    return whole if 0 < whole <= 3 * most else max(most // _STEP, 1) * _STEP


def _widen_rows(rows: torch.Tensor, before: int, width: int) -> torch.Tensor:
    """The activations in float32, and zeros where blocks go on: [rows, blocks, width]."""
    count, in_features = rows.shape
    blocks = -(-(before + in_features) // width)
    wide = thread_buffer("rows", torch.float32, _CPU, count * blocks * width).view(count, -1)
    if wide.shape[1] > in_features:
        wide.zero_()
    wide[:, before : before + in_features] = rows
    return wide.view(count, blocks, width)
