"""Rounding of activations to e4m3 under one scale for each token or group."""

from __future__ import annotations

import triton
import triton.language as tl

from hfq.kernels.cuda.device.along import rounded

__all__ = ["round_e4m3"]


@triton.jit
def decode(codes):
    """Returns e4m3 codes as float32.

    A code, shifted by seven bits, is a float16 of 1/256 of its value.
    """
    bits = codes.to(tl.int16)
    values = ((bits << 7) & -16385).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def encode(values):
    """Rounds float32 within ±448 to e4m3 codes (int8), to nearest, ties to even."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # below 2**-6, codes are multiples of 2**-9; adding 2**14 rounds to such a multiple
    subnormal = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    codes = tl.where(magnitude < 0x3C800000, subnormal, normal)
    codes = tl.where(magnitude > 0x7F800000, 0x7F, codes)
    return (codes | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def round_e4m3(
    x,
    codes,
    scales,
    in_features,
    group_size,
    x_stride,
    upper_bound,
    HAS_BOUND: tl.constexpr,
    KEEPS_CODES: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Rounds one group of one row, in program (row, group).

    Args:
        x: [rows, in_features].
        codes: int8 [rows, in_features]; without `KEEPS_CODES`, the rounded values in `DTYPE`.
        scales: float32 [rows, groups]; written with `KEEPS_CODES`.
        upper_bound: The largest amplitude that a scale is computed from, with `HAS_BOUND`.
    """
    row, group = tl.program_id(0), tl.program_id(1)
    first, last = group * group_size, tl.minimum((group + 1) * group_size, in_features)
    amax = 0.0
    for step in range(STEPS):
        k = first + step * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + row.to(tl.int64) * x_stride + k, mask=k < last, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.max(tl.abs(values)))
    if HAS_BOUND:
        amax = tl.minimum(amax, upper_bound)
    scale = tl.where(amax == 0.0, 1.0, tl.div_rn(amax, 448.0))
    if KEEPS_CODES:
        tl.store(scales + row * tl.num_programs(1) + group, scale)
    for step in range(STEPS):
        k = first + step * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + row.to(tl.int64) * x_stride + k, mask=k < last, other=0.0).to(tl.float32)
        scaled = tl.div_rn(values, tl.zeros_like(values) + scale)
        scaled = tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled))
        place = codes + row.to(tl.int64) * in_features + k
        if KEEPS_CODES:
            tl.store(place, encode(scaled), mask=k < last)
        else:
            value = rounded(decode(encode(scaled)) * scale, DTYPE, tl.float32)
            tl.store(place, value.to(DTYPE), mask=k < last)
