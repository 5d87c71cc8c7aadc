"""Codes of 4 bits whose values are in a table."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode"]


@triton.jit
def decode(words, table, p: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns the value of code p of a unit."""
    return tl.load(table + ((words[0] >> (4 * p)) & 15))
