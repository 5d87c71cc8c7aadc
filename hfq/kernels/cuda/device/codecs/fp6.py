"""FP6 codes, E3M2 and E2M3, in a stream of words; see `fp8`."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode_e2m3", "decode_e3m2"]


@triton.jit
def decode_e3m2(words, table, p: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns code p of a unit, times 2**-124."""
    return _decode(words, p, 21)


@triton.jit
def decode_e2m3(words, table, p: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns code p of a unit, times 2**-126."""
    return _decode(words, p, 20)


@triton.jit
def _decode(words, p: tl.constexpr, MANTISSA: tl.constexpr):
    """Returns code p as a float32 whose mantissa begins at bit `MANTISSA`."""
    FIRST: tl.constexpr = p * 6 // 32
    SHIFT: tl.constexpr = p * 6 % 32
    field = words[FIRST] >> SHIFT
    if SHIFT > 26:
        field = field | (words[FIRST + 1] << (32 - SHIFT))
    return (((field & 31) << MANTISSA) | ((field & 32) << 26)).to(tl.float32, bitcast=True)
