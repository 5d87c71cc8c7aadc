"""A few activation rows times e4m3 codes in plain torch: by parts that stay in a processor's caches, and are never scaled.

A code's bits shifted by seven, without the one that its sign was copied to, are a float16 of 1/256 of its value, subnormal values
included; so a part is three operations and one conversion away from float32. Scales of blocks are multiplied with the activations,
others with the sums.
"""

from __future__ import annotations

from typing import TypeGuard

import torch

from hfq.formats.buffers import thread_buffer
from hfq.formats.fp8 import Fp8
from hfq.formats.fp8_codes import has_nan

__all__ = ["MOST_ROWS", "PART_NUMEL", "is_for_few", "multiply_few"]

MOST_ROWS = 16
"""The most activation rows: a scaled panel of the whole is worth its making for more. Where that is bfloat16, it is for two."""

PART_NUMEL = 1 << 20
"""Codes that are taken at once, or up to twice as many, unless `_STEP` rows have more: few enough for the last cache, and enough for
each call to pay."""

_STEP = 32
"""Parts are multiples of so many rows: a library's product may sum rows that are left over in another order."""

_LONG_STEP = 128
"""The usual rows of a block: parts are multiples of so many, where they have no more than twice as many codes for it."""

_KEPT = -0x4001
"""Of 16 bits all but the one that the sign was copied to: 0xBFFF."""

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
    apply = torch.div if weight_format.reciprocal else torch.mul
    above, before = weight_format.block_offset if has_blocks else (0, 0)  # where a slice begins within its first block
    sums = torch.empty(out_features, count, dtype=torch.float32, device=_CPU)
    wide = _widen_rows(rows, before, block_in)
    step = _step(in_features)
    for start in range(0, out_features, step):
        stop = min(start + step, out_features)
        codes = weight[start:stop]
        if has_nan(codes.view(torch.int8)):
            return None
        panel = _widen_codes(codes)
        if has_blocks:
            first, last = (start + above) // block_out, -(-(stop + above) // block_out)
            factors = scale.reshape(-1, 1, wide.shape[1], 1)[first:last]
            scaled = thread_buffer("scaled", torch.float32, _CPU, factors.shape[0] * wide.numel())
            scaled = apply(wide, factors, out=scaled.view(-1, *wide.shape)).flatten(2)
            for block, x in enumerate(scaled[..., before : before + in_features], first):
                top, bottom = max(block * block_out - above, start), min((block + 1) * block_out - above, stop)
                _multiply(panel[top - start : bottom - start], x, sums[top:bottom])
        else:
            _multiply(panel, wide.flatten(1), sums[start:stop])
    return (sums if has_blocks else apply(sums, scale.reshape(-1, 1), out=sums)).mul_(256).t()


def _block(weight_format: Fp8) -> tuple[int, int]:
    return weight_format.block_structure or (128, 128)


def _step(in_features: int) -> int:
    """The rows of a part."""
    most = PART_NUMEL // in_features
    whole = -(-most // _LONG_STEP) * _LONG_STEP
    return whole if 0 < whole <= 2 * most else max(most // _STEP, 1) * _STEP


def _widen_rows(rows: torch.Tensor, before: int, width: int) -> torch.Tensor:
    """The activations in float32, and zeros where blocks go on: [rows, blocks, width]."""
    count, in_features = rows.shape
    blocks = -(-(before + in_features) // width)
    wide = thread_buffer("rows", torch.float32, _CPU, count * blocks * width).view(count, -1)
    wide[:, :before] = 0
    wide[:, before + in_features :] = 0
    wide[:, before : before + in_features] = rows
    return wide.view(count, blocks, width)


def _multiply(panel: torch.Tensor, rows: torch.Tensor, sums: torch.Tensor) -> None:
    """[out_features, channels] times [rows, channels] into [out_features, rows]."""
    if rows.shape[0] == 1:
        torch.mv(panel, rows[0], out=sums[:, 0])
    else:
        torch.mm(panel, rows.t(), out=sums)


def _widen_codes(codes: torch.Tensor) -> torch.Tensor:
    """1/256 of the codes: float32 of their shape, in a kept buffer."""
    bits = thread_buffer("fp8", torch.int16, _CPU, codes.numel()).view(codes.shape)
    bits.copy_(codes.view(torch.int8)).mul_(1 << 7).bitwise_and_(_KEPT)
    return thread_buffer("panel", torch.float32, _CPU, codes.numel()).view(codes.shape).copy_(bits.view(torch.float16))
