"""Integers of 1 to 8 bits, minus the constant of the layout.

A field of at most 23 bits, placed in the mantissa of a large power of two, is that power plus a small
integer. The difference is exact, without a conversion from integer to float.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode"]


@triton.jit
def decode(words, table, p: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns code p of a unit."""
    BITS: tl.constexpr = LAYOUT.bits
    MASK: tl.constexpr = (1 << BITS) - 1
    PER_WORD: tl.constexpr = LAYOUT.word // BITS
    if LAYOUT.straddles and LAYOUT.word % BITS != 0:
        FIRST: tl.constexpr = p * BITS // 32
        SHIFT: tl.constexpr = p * BITS % 32
        field = words[FIRST] >> SHIFT
        if SHIFT + BITS > 32:
            field = field | (words[FIRST + 1] << (32 - SHIFT))
        value = _number(field & MASK, 0, LAYOUT)
    else:
        PLACE: tl.constexpr = p % PER_WORD * BITS
        word = words[p // PER_WORD]
        if LAYOUT.signed:
            word = word ^ (0xFFFFFFFF // MASK << (BITS - 1))
        if PLACE + BITS <= 16:
            value = _number(word & (MASK << PLACE), PLACE, LAYOUT)
        elif PLACE >= 16:
            value = _number((word >> 16) & (MASK << (PLACE - 16)), PLACE - 16, LAYOUT)
        else:
            value = _number((word >> PLACE) & MASK, 0, LAYOUT)
    return value


@triton.jit
def _number(field, PLACE: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns the float of a field at bit `PLACE`."""
    LARGE: tl.constexpr = 2.0 ** (23 - PLACE)
    value = (field | ((150 - PLACE) << 23)).to(tl.float32, bitcast=True)
    return value - (LARGE + LAYOUT.middle + ((1 << LAYOUT.bits) // 2 if LAYOUT.signed else 0))
