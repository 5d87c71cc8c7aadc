"""Integers of 3, 5, 6, and 7 bits in bit planes of 32 codes (gptqmodel's `gptq_p`)."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode"]


@triton.jit
def decode(words, table, p: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns code p of a unit."""
    BITS: tl.constexpr = LAYOUT.bits
    LOW: tl.constexpr = 2 if BITS == 3 else 4
    HIGH: tl.constexpr = 2 if BITS > 5 else 1
    code = _plane(words, p, 0, LOW) | (_plane(words, p, LOW, HIGH) << LOW)
    if BITS == 7:
        code = code | (_plane(words, p, 6, 1) << 6)
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LAYOUT.middle)


@triton.jit
def _plane(words, p: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the bits of code p in the plane that begins with word `FIRST`."""
    return (words[FIRST + p * WIDTH // 32] >> (p * WIDTH % 32)) & ((1 << WIDTH) - 1)
