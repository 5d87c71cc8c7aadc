"""e4m3 codes as bfloat16 in plain torch, for processors that multiply bfloat16: no panel of float32 on the
way.

The bits of e4m3, shifted by four and without those that its sign was copied to, are a bfloat16 of 2^-120 of
its value, subnormal values included. bfloat16's instructions take subnormal numbers for zeros, so one
multiplication follows: by the scale of each block, which rounds the weight once, as the copy of a float32
panel does, or by a power of two, where the sums are scaled. torch's batch norm multiplies bfloat16 by float32
in one pass, with blocks for channels; to multiply block by block takes three times as long.

To multiply a vector with a subnormal number in it takes Intel's processors twenty times as long. Weights have
one such code in ten thousand; codes that have many go through float32, to the same bits.
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
"""Sums that are scaled at once, and four times the codes that go through float32 at once, unless a row has
more.
"""

_UNIT = 2.0**120
_LEAST_BLOCK = 32  # each row of blocks is a call, and each row of one a loop
_SCALE_LIMIT = 2.0**7  # times _UNIT it is a float
_SUM_UNIT = 256.0  # sums of whole codes could be too large for a float
_SUBNORMAL = bytes(code for code in range(256) if 0 < code % 128 < 8)
_SAMPLE = 4096
_MOST_SUBNORMAL = 8  # of a sample
_LEAST = 2.0**-1074  # no constant expression: the processor is to multiply it


def is_summed(weight_format: object) -> TypeGuard[Fp8]:
    """Whether codes are multiplied by themselves, and the sums are scaled."""
    return _has_e4m3(weight_format) and weight_format.strategy in ("tensor", "channel")


def is_in_blocks(weight_format: object) -> TypeGuard[Fp8]:
    """Whether `fill_blocks` takes this format."""
    if not _has_e4m3(weight_format) or weight_format.strategy != "block" or weight_format.reciprocal:
        return False
    return min(weight_format.block_structure or (128, 128)) >= _LEAST_BLOCK


def is_shifted(codes: torch.Tensor) -> bool:
    """Whether few of the codes are subnormal, by a sample; `torch.set_flush_denormal` would make zeros of
    them.
    """
    if not codes.numel() or _flushes_subnormals():
        return False
    rows = codes.view(torch.uint8)[:: max(codes.shape[0] // 8, 1)]
    sample = rows[:8, : _SAMPLE // 8].numpy().tobytes()
    count = len(sample) - len(sample.translate(None, _SUBNORMAL))  # torch's operations take twice as long
    return count * _SAMPLE <= _MOST_SUBNORMAL * len(sample)


def fill_codes(codes: torch.Tensor, shifts: bool) -> torch.Tensor:
    """1/256 of codes: bfloat16 [rows, in_features], in a kept buffer; `shifts` as `is_shifted` says, for
    speed alone.
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
    """Scales bfloat16 [rows, out_features] of activations times `fill_codes`, in place."""
    scale = scale_as_float(tensors[weight_format.scale_name]).reshape(-1)
    scale = scale / _SUM_UNIT if weight_format.reciprocal else scale * _SUM_UNIT
    apply = torch.Tensor.div_ if weight_format.reciprocal else torch.Tensor.mul_
    for part in sums.split(max(PART_NUMEL // max(sums.shape[1], 1), 1)):
        wide = thread_buffer("product", torch.float32, part.device, part.numel()).view(part.shape).copy_(part)
        part.copy_(apply(wide, scale))


def block_factors(tensors: Mapping[str, torch.Tensor], weight_format: Fp8) -> torch.Tensor | None:
    """What the bits of each block are multiplied by: float32 [rows, columns] of blocks; None for scales that
    are too large.
    """
    scale = scale_as_float(tensors[weight_format.scale_name])
    return scale.reshape(scale.shape[0], -1) * _UNIT if float(scale.abs().amax()) < _SCALE_LIMIT else None


def fill_blocks(
    codes: torch.Tensor, factors: torch.Tensor, weight_format: Fp8, start: int, rows: int
) -> torch.Tensor | None:
    """Some rows of the weight, rounded once: bfloat16 [rows, in_features], in a kept buffer; None for NaN."""
    bits, (above, before) = codes[start : start + rows].view(torch.int8), weight_format.block_offset
    if not bits.numel() or _flushes_subnormals():
        return None
    block_out, block_in = weight_format.block_structure or (128, 128)
    count = factors.shape[1]
    whole = thread_buffer("panel", torch.bfloat16, codes.device, rows * count * block_in).view(
        rows, count * block_in
    )
    inside = slice(before, before + codes.shape[1])  # beside it, where blocks go on, is anything
    if not _shift(bits, bits.view(torch.uint8), whole.view(torch.int16)[:, inside]):
        return None
    _scale_blocks(whole.view(rows, count, block_in), factors, *_unused(count), start + above, block_out)
    return whole[:, inside]


def _shift(codes: torch.Tensor, unsigned: torch.Tensor, bits: torch.Tensor) -> bool:
    """Writes the bits of 2^-120 of codes in bfloat16; False for NaN, which would become a number."""
    if has_nan(codes, unsigned):
        return False
    bits.copy_(codes).mul_(1 << 4).bitwise_and_(-0x7810)  # 0x87F0: without those that the sign was copied to
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
    """Multiplies [rows, blocks, block_in], whose first row is the weight's `first`, in place."""
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
    """Returns True if this thread treats subnormal numbers as zeros (`torch.set_flush_denormal`)."""
    return _LEAST * 2 == 0


@functools.lru_cache(maxsize=64)
def _unused(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The statistics of a batch norm that leave its channels as they are, and a place for those that it does
    not write.
    """
    with torch.inference_mode(False):
        zeros = torch.zeros(count, dtype=torch.float32, device="cpu")
        return zeros, zeros + 1, zeros[:0]
