"""A few activation rows times e4m3 codes in plain torch: in halves, that are never put together, nor scaled.

The codes lie two to an int16. The upper one shifted by a bit, or the lower one by eight to the left and back by one, is a float16
of 1/256 of its value, subnormal values included; so each half is a few operations and one conversion away from float32. Scales of
blocks are multiplied with the activations, others with the sums.
"""

from __future__ import annotations

from typing import TypeGuard

import torch

from hfq.formats.buffers import thread_buffer
from hfq.formats.fp8 import Fp8
from hfq.formats.fp8_codes import has_nan

__all__ = ["MOST_ROWS", "PART_NUMEL", "is_for_halves", "multiply_halves"]

MOST_ROWS = 16
"""The most activation rows: a scaled panel of the whole is worth its making for more."""

PART_NUMEL = 1 << 20
"""Codes that are taken at once, unless a row has more: enough that torch's calls cost less than what they do."""

_KEPT = -0x4080
"""Of 16 bits all but those that the sign was copied to, and what is left of the other code: 0xBF80."""

_CPU = torch.device("cpu")


def is_for_halves(weight_format: object, weight: torch.Tensor, rows: torch.Tensor) -> TypeGuard[Fp8]:
    """Whether `multiply_halves` takes this format, this weight and these activations, if none of its codes is NaN."""
    if not isinstance(weight_format, Fp8) or weight_format.codes_dtype != "F8_E4M3" or weight_format.strategy == "group":
        return False
    if weight_format.strategy == "block":
        block_out, block_in = _block(weight_format)
        if block_in % 2 or weight_format.block_offset[1] % 2:
            return False  # a pair of codes must not have two scales
        if block_out < MOST_ROWS:
            return False  # scaled activations of all blocks of a part would be more than the part
    if rows.requires_grad and torch.is_grad_enabled():
        return False  # kept buffers would take part in what autograd records; panels refuse it
    are_pairs = weight.shape[1] % 2 == 0 and weight.numel() > 0
    return are_pairs and 0 < rows.shape[0] <= MOST_ROWS and rows.dtype != torch.float64


def multiply_halves(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, weight_format: Fp8) -> torch.Tensor | None:
    """`rows @ W.T` in float32.

    Args:
        rows: [rows, in_features], on a CPU.
        weight: float8_e4m3fn [out_features, in_features], see `is_for_halves`.
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
    halves = _halves(rows, before // 2, block_in // 2)
    step = max(PART_NUMEL // in_features, 1)
    step -= step % 32 if step > 32 else 0  # a library's product may sum rows that are left over in another order
    for start in range(0, out_features, step):
        stop = min(start + step, out_features)
        codes = weight[start:stop]
        if has_nan(codes.view(torch.int8)):
            return None
        panels = _widen_halves(_in_pairs(codes))
        if has_blocks:
            first, last = (start + above) // block_out, -(-(stop + above) // block_out)
            factors = scale.reshape(-1, 1, 1, halves.shape[2], 1)[first:last]
            scaled = thread_buffer("scaled", torch.float32, _CPU, factors.shape[0] * halves.numel())
            scaled = apply(halves, factors, out=scaled.view(-1, *halves.shape)).flatten(3)
            for block, x in enumerate(scaled[..., before // 2 : (before + in_features) // 2], first):
                top, bottom = max(block * block_out - above, start), min((block + 1) * block_out - above, stop)
                _multiply(panels[:, top - start : bottom - start], x, sums[top:bottom])
        else:
            _multiply(panels, halves.flatten(2), sums[start:stop])
    return (sums if has_blocks else apply(sums, scale.reshape(-1, 1), out=sums)).mul_(256).t()


def _block(weight_format: Fp8) -> tuple[int, int]:
    return weight_format.block_structure or (128, 128)


def _halves(rows: torch.Tensor, before: int, width: int) -> torch.Tensor:
    """The activations of even channels and of odd ones in float32, and zeros where blocks go on: [2, rows, parts, width]."""
    count, pairs = rows.shape[0], rows.shape[1] // 2
    parts = -(-(before + pairs) // width)
    halves = thread_buffer("halves", torch.float32, _CPU, 2 * count * parts * width).view(2, count, -1)
    halves[..., :before] = 0
    halves[..., before + pairs :] = 0
    halves[..., before : before + pairs] = rows.unflatten(1, (pairs, 2)).permute(2, 0, 1)
    return halves.view(2, count, parts, width)


def _multiply(panels: torch.Tensor, halves: torch.Tensor, sums: torch.Tensor) -> None:
    """[2, out_features, channels] times [2, rows, channels] into [out_features, rows]."""
    if halves.shape[1] == 1:
        torch.mv(panels[0], halves[0, 0], out=sums[:, 0])
        sums[:, 0].addmv_(panels[1], halves[1, 0])
    else:
        torch.mm(panels[0], halves[0].t(), out=sums)
        sums.addmm_(panels[1], halves[1].t())


def _in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes two to an int16, copied where they do not lie so: results must not depend on where a weight rests."""
    if codes.is_contiguous() and not any(place % 2 for place in (codes.data_ptr(), codes.storage_offset(), codes.stride(0))):
        return codes.view(torch.int16)
    pairs = thread_buffer("pairs", torch.int16, _CPU, codes.numel() // 2).view(codes.shape[0], -1)
    pairs.view(torch.int8).copy_(codes.view(torch.int8))
    return pairs


def _widen_halves(pairs: torch.Tensor) -> torch.Tensor:
    """1/256 of the lower codes of int16s, and of the upper ones: float32 [2, *pairs.shape], in a kept buffer."""
    bits = thread_buffer("fp8", torch.int16, _CPU, 2 * pairs.numel()).view(2, *pairs.shape)
    torch.bitwise_left_shift(pairs, 8, out=bits[0]).bitwise_right_shift_(1)
    torch.bitwise_right_shift(pairs, 1, out=bits[1])
    bits.bitwise_and_(_KEPT)
    panels = thread_buffer("panel", torch.float32, _CPU, bits.numel()).view(bits.shape)
    return panels.copy_(bits.view(torch.float16))
