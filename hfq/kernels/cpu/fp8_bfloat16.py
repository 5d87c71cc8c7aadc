"""Conversion of e4m3 codes to bfloat16 in plain torch, without a float32 panel.

Used on processors that multiply bfloat16. Shift the sign-extended bits of an e4m3 code by four, and clear
the copies of its sign. The result is a bfloat16 of 2^-120 of the code's value, also for subnormal codes.
bfloat16 instructions treat subnormal numbers as zeros, so one multiplication follows. It multiplies by the
scale of each block, which rounds the weight once, as the copy of a float32 panel does. If the sums are
scaled later, it multiplies by a power of two. torch's batch norm multiplies bfloat16 by float32 in one pass,
with blocks as channels, which is faster than one multiplication per block.

Intel's processors multiply vectors with a subnormal number far slower. Weights usually have few such codes.
Codes with many subnormal values are converted through float32, with bit-identical results.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TypeGuard

import torch

from hfq.formats.codecs.fp8_codes import has_nan, scale_as_float, widen_into
from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.formats.fp8 import Fp8

__all__ = [
    "PART_NUMEL",
    "block_factors",
    "fill_blocks",
    "fill_codes",
    "is_in_blocks",
    "is_shifted",
    "is_summed",
    "scale_sums",
]

PART_NUMEL = 1 << 20
"""Number of sums that are scaled together. One row of a matrix is never split.

A quarter as many codes are converted through float32 together.
"""

_UNIT = 2.0**120  # value of 1 in the shifted bits
_LEAST_BLOCK = 32  # edge of a block: smaller blocks cost one call per row of blocks and one loop per row
_SCALE_LIMIT = 2.0**7  # times _UNIT, scales below are finite floats
_SUM_UNIT = 256.0  # codes are divided by this, so that sums do not overflow a float
_SUBNORMAL = bytes(code for code in range(256) if 0 < code % 128 < 8)
_SAMPLE = 4096  # codes
_MOST_SUBNORMAL = 8  # codes of a sample
_LEAST = 2.0**-1074  # a variable, so that the processor and not the compiler multiplies it


def is_summed(weight_format: object) -> TypeGuard[Fp8]:
    """Returns True if unscaled codes are multiplied, and the sums are scaled."""
    return _has_e4m3(weight_format) and weight_format.strategy in ("tensor", "channel")


def is_in_blocks(weight_format: object) -> TypeGuard[Fp8]:
    """Returns True if `fill_blocks` supports this format."""
    if not _has_e4m3(weight_format) or weight_format.strategy != "block" or weight_format.reciprocal:
        return False
    return min(weight_format.block_structure or (128, 128)) >= _LEAST_BLOCK


def is_shifted(codes: torch.Tensor) -> bool:
    """Returns True if few codes of a sample are subnormal.

    Returns False under `torch.set_flush_denormal`, which turns subnormal codes into zeros.
    """
    if not codes.numel() or _flushes_subnormals():
        return False
    rows = codes.view(torch.uint8)[:: max(codes.shape[0] // 8, 1)]
    sample = rows[:8, : _SAMPLE // 8].numpy().tobytes()
    count = len(sample) - len(sample.translate(None, _SUBNORMAL))  # faster than torch's operations
    return count * _SAMPLE <= _MOST_SUBNORMAL * len(sample)


def fill_codes(codes: torch.Tensor, shifts: bool) -> torch.Tensor:
    """Converts codes to bfloat16, divided by 256.

    Args:
        codes: float8_e4m3fn [rows, in_features].
        shifts: The result of `is_shifted`. It affects the speed only.

    Returns:
        bfloat16 [rows, in_features], in the thread's reused buffer.
    """
    panel, bits = _panel(codes), codes.view(torch.int8)
    if shifts and not _flushes_subnormals() and _shift(bits, bits.view(torch.uint8), panel.view(torch.int16)):
        return panel.mul_(_UNIT / _SUM_UNIT)
    step = max(PART_NUMEL // 4 // max(codes.shape[1], 1), 1)
    for part, target in zip(codes.split(step), panel.split(step), strict=True):
        wide = thread_buffer("wide", torch.float32, part.device, part.numel()).view(part.shape)
        widen_into(wide, part)
        target.copy_(wide.mul_(1 / _SUM_UNIT))
    return panel


def scale_sums(sums: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Fp8) -> None:
    """Scales products of activations and `fill_codes` in place: bfloat16 [rows, out_features]."""
    scale = scale_as_float(tensors[weight_format.scale_name]).reshape(-1)
    scale = scale / _SUM_UNIT if weight_format.reciprocal else scale * _SUM_UNIT
    apply = torch.Tensor.div_ if weight_format.reciprocal else torch.Tensor.mul_
    for part in sums.split(max(PART_NUMEL // max(sums.shape[1], 1), 1)):
        wide = thread_buffer("product", torch.float32, part.device, part.numel()).view(part.shape).copy_(part)
        part.copy_(apply(wide, scale))


def block_factors(tensors: Mapping[str, torch.Tensor], weight_format: Fp8) -> torch.Tensor | None:
    """Returns the factor for the shifted bits of each block.

    Returns:
        float32 [rows of blocks, columns of blocks]; None if a scale is too large.
    """
    scale = scale_as_float(tensors[weight_format.scale_name])
    return scale.reshape(scale.shape[0], -1) * _UNIT if float(scale.abs().amax()) < _SCALE_LIMIT else None


def fill_blocks(
    codes: torch.Tensor, factors: torch.Tensor, weight_format: Fp8, start: int, rows: int
) -> torch.Tensor | None:
    """Dequantizes `rows` rows of the weight from `start`, rounded once.

    Returns:
        bfloat16 [rows, in_features], in the thread's reused buffer; None if a code is NaN.
    """
    bits, (above, before) = codes[start : start + rows].view(torch.int8), weight_format.block_offset
    if not bits.numel() or _flushes_subnormals():
        return None
    block_out, block_in = weight_format.block_structure or (128, 128)
    count = factors.shape[1]
    whole = thread_buffer("panel", torch.bfloat16, codes.device, rows * count * block_in).view(
        rows, count * block_in
    )
    inside = slice(before, before + codes.shape[1])  # outside, where blocks continue, values are arbitrary
    if not _shift(bits, bits.view(torch.uint8), whole.view(torch.int16)[:, inside]):
        return None
    _scale_blocks(whole.view(rows, count, block_in), factors, *_unused(count), start + above, block_out)
    return whole[:, inside]


def _shift(codes: torch.Tensor, unsigned: torch.Tensor, bits: torch.Tensor) -> bool:
    """Writes 2^-120 of codes as bfloat16 bits; returns False if a code is NaN."""
    if has_nan(codes, unsigned):
        return False
    bits.copy_(codes).mul_(1 << 4).bitwise_and_(-0x7810)  # 0x87F0 clears the copies of the sign
    return True


def _scale_blocks(
    panel: torch.Tensor,
    factors: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    none: torch.Tensor,
    first: int,
    block_out: int,
) -> None:
    """Multiplies [rows, blocks, block_in] in place; its first row is row `first` of the weight."""
    stop = first + panel.shape[0]
    for block in range(first // block_out, (stop + block_out - 1) // block_out):
        some = panel[max(block * block_out - first, 0) : min((block + 1) * block_out, stop) - first]
        torch.ops.aten.native_batch_norm(
            some,
            factors[block],
            None,
            mean,
            variance,
            False,
            0.0,
            0.0,
            out=some,
            save_mean=none,
            save_invstd=none,
        )


def _has_e4m3(weight_format: object) -> TypeGuard[Fp8]:
    return isinstance(weight_format, Fp8) and weight_format.codes_dtype == "F8_E4M3"


def _panel(codes: torch.Tensor) -> torch.Tensor:
    return thread_buffer("panel", torch.bfloat16, codes.device, codes.numel()).view(codes.shape)


def _flushes_subnormals() -> bool:
    """Returns True if `torch.set_flush_denormal` is on for this thread."""
    return _LEAST * 2 == 0


@functools.lru_cache(maxsize=64)
def _unused(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a mean of 0, a variance of 1, and an empty output for batch norm.

    This mean and variance leave channels unchanged.
    """
    with torch.inference_mode(False):
        zeros = torch.zeros(count, dtype=torch.float32, device="cpu")
        return zeros, zeros + 1, zeros[:0]
