"""FP4 codes (E2M1), times 2**-126; see `fp8`."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode"]


@triton.jit
def decode(words, table, p: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns code p of a unit, times 2**-126."""
    BITS: tl.constexpr = LAYOUT.bits
    PER_WORD: tl.constexpr = LAYOUT.word // BITS
    word = (words[p // PER_WORD] << (28 - p % PER_WORD * BITS)).to(tl.int32, bitcast=True)
    return ((word >> 6) & -2118123520).to(tl.float32, bitcast=True)
