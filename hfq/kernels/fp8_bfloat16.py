"""e4m3 codes as bfloat16 in plain torch, for processors that multiply bfloat16: no panel of float32 on the way.

The bits of e4m3, shifted by four and without those that its sign was copied to, are a bfloat16 of 2^-120 of its value, subnormal
values included. bfloat16's instructions take subnormal numbers for zeros, so one multiplication follows: by the scale of each block,
which rounds the weight once, as the copy of a float32 panel does, or by a power of two, where the sums are scaled.

To multiply a vector with a subnormal number in it takes Intel's processors twenty times as long. Weights have one such code in
ten thousand; codes that have many go through float32, to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TypeGuard

import torch

from hfq.formats.buffers import thread_buffer
from hfq.formats.fp8 import Fp8
from hfq.formats.fp8_codes import has_nan, scale_as_float, widen_into

__all__ = ["PART_NUMEL", "fill_blocks", "fill_codes", "is_in_blocks", "is_shifted", "is_summed", "scale_sums"]

PART_NUMEL = 1 << 19
"""Codes that are taken at once, unless a row or a block has more: their panel stays in the second cache."""

_KEPT = -0x7810
"""Of 16 bits all but those that the sign was copied to: 0x87F0."""

_UNIT = 2.0**120
_LEAST_BLOCK = 32  # each block of a part is a call
_SCALE_LIMIT = 2.0**7  # times _UNIT it is a float
_SUM_UNIT = 256.0  # sums of whole codes could be too large for a float
_SAMPLE = 4096
_MOST_SUBNORMAL = 8  # of a sample


def is_summed(weight_format: object) -> TypeGuard[Fp8]:
    """Whether codes are multiplied by themselves, and the sums are scaled."""
    return _has_e4m3(weight_format) and weight_format.strategy in ("tensor", "channel")


def is_in_blocks(weight_format: object) -> TypeGuard[Fp8]:
    """Whether `fill_blocks` takes this format."""
    if not _has_e4m3(weight_format) or weight_format.strategy != "block" or weight_format.reciprocal:
        return False
    return min(weight_format.block_structure or (128, 128)) >= _LEAST_BLOCK


def is_shifted(codes: torch.Tensor) -> bool:
    """Whether few of the codes are subnormal, by a sample; `torch.set_flush_denormal` would make zeros of them."""
    least = torch.full((), 1 / _UNIT / 512, dtype=torch.float32, device="cpu")
    if not codes.numel() or not bool(least.mul_(_UNIT)):
        return False
    rows = codes.view(torch.uint8)[:: max(codes.shape[0] // 8, 1)]
    sample = rows[:8, : _SAMPLE // 8].bitwise_and(0x7F).sub_(1)  # zero becomes the largest
    return int((sample < 7).sum()) * _SAMPLE <= _MOST_SUBNORMAL * sample.numel()


def fill_codes(codes: torch.Tensor, shifts: bool) -> torch.Tensor:
    """1/256 of codes: bfloat16 [rows, in_features], in a kept buffer; `shifts` as `is_shifted` says, for speed alone."""
    panel = _panel(codes)
    step = max((PART_NUMEL if shifts else PART_NUMEL // 4) // max(codes.shape[1], 1), 1)
    for part, target in zip(codes.split(step), panel.split(step), strict=True):
        if shifts and not has_nan(part.view(torch.int8)):
            _shift_into(target, part).mul_(_UNIT / _SUM_UNIT)
        else:
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


def fill_blocks(tensors: Mapping[str, torch.Tensor], weight_format: Fp8, start: int, rows: int) -> torch.Tensor | None:
    """Some rows of the weight, rounded once: bfloat16 [rows, in_features], in a kept buffer; None for NaN and large scales."""
    codes, (above, before) = tensors["weight"][start : start + rows], weight_format.block_offset
    block_out, block_in = weight_format.block_structure or (128, 128)
    first, last = (start + above) // block_out, -(-(start + above + rows) // block_out)
    scale = scale_as_float(tensors[weight_format.scale_name])
    scale = scale.reshape(scale.shape[0], -1)[first:last]
    if not codes.numel() or not float(scale.abs().amax()) < _SCALE_LIMIT:
        return None
    panel, in_features = _panel(codes), codes.shape[1]
    borders = [min(max(block * block_in - before, 0), in_features) for block in range(scale.shape[1] + 1)]
    width = max(PART_NUMEL // (block_out * block_in), 1)  # blocks of a part
    for block, scales in enumerate(scale, first):
        at = slice(max(block * block_out - above - start, 0), (block + 1) * block_out - above - start)
        for left in range(0, scales.shape[0], width):
            some = borders[left : left + width + 1]
            part = codes[at, some[0] : some[-1]]
            if has_nan(part.view(torch.int8)):
                return None
            values = _shift_into(panel[at, some[0] : some[-1]], part).split([b - a for a, b in pairwise(some)], 1)
            for value, factor in zip(values, (scales[left : left + width] * _UNIT).tolist(), strict=True):
                value.mul_(factor)
    return panel


def _has_e4m3(weight_format: object) -> TypeGuard[Fp8]:
    return isinstance(weight_format, Fp8) and weight_format.codes_dtype == "F8_E4M3"


def _panel(codes: torch.Tensor) -> torch.Tensor:
    return thread_buffer("panel", torch.bfloat16, codes.device, codes.numel()).view(codes.shape)


def _shift_into(panel: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Writes 2^-120 of codes into bfloat16; none of them may be NaN, which would become a number."""
    panel.view(torch.int16).copy_(codes.view(torch.int8)).mul_(1 << 4).bitwise_and_(_KEPT)
    return panel
