"""FP8 codes, e4m3 and e5m2.

An arithmetic shift moves a code of e4m3 to the sign, exponent, and mantissa of a float32. Its exponent is
then too small by a constant. Kernels multiply activations by 2**64, so that no product is subnormal, and sums
of few products by the rest.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode_e4m3", "decode_e5m2", "invalid_e4m3"]


@triton.jit
def decode_e4m3(words, table, p: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns code p of a unit, times 2**-120."""
    word = (words[0] << (24 - 8 * p)).to(tl.int32, bitcast=True)
    return ((word >> 4) & -2014314496).to(tl.float32, bitcast=True)


@triton.jit
def invalid_e4m3(words):
    """Returns bits that are not zero where a code of the word is NaN."""
    return ((words[0] & 0x7F7F7F7F) + 0x01010101) & 0x80808080


@triton.jit
def decode_e5m2(words, table, p: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns code p of a unit; it is the upper half of a float16."""
    half = ((words[0] >> (8 * p)) << 8).to(tl.int16)
    return half.to(tl.float16, bitcast=True).to(tl.float32)
