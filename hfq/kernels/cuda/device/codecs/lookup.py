"""Codes of 4 bits whose values are in a table."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode"]


@triton.jit
def decode(words, table, p: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns the value of code p of a unit."""
    BITS: tl.constexpr = LAYOUT.bits
    PER_WORD: tl.constexpr = LAYOUT.word // BITS
    return tl.load(table + ((words[p // PER_WORD] >> (p % PER_WORD * BITS)) & 15))
