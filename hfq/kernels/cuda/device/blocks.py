"""Codes, scales, and minima in ggml's blocks, at their places in the bytes of a row.

A unit is 16 codes of one group. Its words hold a code in each byte: codes of four bits are in the lower or in
the upper halves of consecutive bytes, and the same holds for their high bits. Memory is read in words of
`LAYOUT.block.word` bits, as the address of the layer and the size of its blocks allow.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["block_element", "block_minimum", "block_scale", "block_unit", "stored_row"]


@triton.jit
def stored_row(n, LAYOUT: tl.constexpr):
    """Returns the row of the file that holds output n."""
    if LAYOUT.rows is not None:
        START: tl.constexpr = LAYOUT.rows[0]
        FIRST: tl.constexpr = LAYOUT.rows[1]
        SECOND: tl.constexpr = LAYOUT.rows[2]
        INNER: tl.constexpr = LAYOUT.rows[3]
        m = n - START
        inner = m % INNER
        first = m // INNER % FIRST
        second = m // (INNER * FIRST) % SECOND
        outer = m // (INNER * FIRST * SECOND)
        n = tl.where(m < 0, n, START + ((outer * FIRST + first) * SECOND + second) * INNER + inner)
    return n


@triton.jit
def _byte(row, place, mask, LAYOUT: tl.constexpr):
    """Loads a byte of a row as uint32."""
    if LAYOUT.block.word == 8:
        value = tl.load(row + place, mask=mask, other=0).to(tl.uint32)
    else:
        value = tl.load(row + place // 2, mask=mask, other=0).to(tl.uint32) >> (place % 2 * 8).to(tl.uint32)
    return value & 0xFF


@triton.jit
def _pair(row, place, mask, LAYOUT: tl.constexpr):
    """Loads two bytes of a row, at an even place of its block, as uint32."""
    if LAYOUT.block.word == 8:
        value = _byte(row, place, mask, LAYOUT) | (_byte(row, place + 1, mask, LAYOUT) << 8)
    else:
        value = tl.load(row + place // 2, mask=mask, other=0).to(tl.uint32) & 0xFFFF
    return value


@triton.jit
def _half(row, place, mask, LAYOUT: tl.constexpr):
    """Loads a float16 of a row as float32."""
    return _pair(row, place, mask, LAYOUT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _word(codes, row, place, mask, LAYOUT: tl.constexpr):
    """Loads four bytes, the first at byte `place` of a row, as uint32."""
    SIZE: tl.constexpr = LAYOUT.block.word // 8
    at = codes + row + place // SIZE
    value = tl.load(at, mask=mask, other=0).to(tl.uint32)
    if SIZE == 2:
        value = (value & 0xFFFF) | (tl.load(at + 1, mask=mask, other=0).to(tl.uint32) << 16)
    if SIZE == 1:
        for i in tl.static_range(1, 4):
            value = value | (tl.load(at + i, mask=mask, other=0).to(tl.uint32) << (8 * i))
    return value


@triton.jit
def _low_place(within, LAYOUT: tl.constexpr):
    """Returns the byte of a block with the low bits of a code, and the first of these bits."""
    RUN: tl.constexpr = LAYOUT.block.run
    if RUN == 0:
        place, shift = within, within * 0
    else:
        place, shift = within // (2 * RUN) * RUN + within % RUN, within // RUN % 2 * 4
    return place + LAYOUT.block.codes, shift.to(tl.uint32)


@triton.jit
def _high_place(within, LAYOUT: tl.constexpr):
    """Returns the byte of a block with the high bits of a code, and the first of these bits."""
    BITS: tl.constexpr = LAYOUT.block.high_bits
    SHARE: tl.constexpr = 256 // BITS
    place = within // SHARE * 32 + within % 32
    return place + LAYOUT.block.high, (within % SHARE // 32 * BITS).to(tl.uint32)


@triton.jit
def block_element(codes, n, k, code_other, mask, LAYOUT: tl.constexpr):
    """Loads the code of weight (n, k), both int64, in the low bits of a uint32."""
    row = codes + n * code_other + k // LAYOUT.block.size * LAYOUT.block.nbytes
    place, shift = _low_place(k % LAYOUT.block.size, LAYOUT)
    code = tl.load(row + place, mask=mask, other=0).to(tl.uint32) >> shift
    if LAYOUT.block.high_bits != 0:
        place, shift = _high_place(k % LAYOUT.block.size, LAYOUT)
        high = tl.load(row + place, mask=mask, other=0).to(tl.uint32) >> shift
        code = (code & 15) | (high << 4)
    return code


@triton.jit
def block_unit(codes, n, w, code_other, mask, LAYOUT: tl.constexpr):
    """Loads unit w of output n as a tuple of words, with a code in each byte."""
    COUNT: tl.constexpr = LAYOUT.count
    row = n.to(tl.int64) * code_other
    words = (_unit_word(codes, row, w, 0, mask, LAYOUT),)
    for i in tl.static_range(1, COUNT):
        words += (_unit_word(codes, row, w, i, mask, LAYOUT),)  # type: ignore[assignment]
    return words


@triton.jit
def _unit_word(codes, row, w, i: tl.constexpr, mask, LAYOUT: tl.constexpr):
    """Returns word i of unit w."""
    k = w * LAYOUT.positions + 4 * i
    start = k // LAYOUT.block.size * LAYOUT.block.nbytes
    place, shift = _low_place(k % LAYOUT.block.size, LAYOUT)
    word = _word(codes, row, start + place, mask, LAYOUT)
    if LAYOUT.block.run != 0:
        word = (word >> shift) & 0x0F0F0F0F
    if LAYOUT.block.high_bits != 0:
        place, shift = _high_place(k % LAYOUT.block.size, LAYOUT)
        high = _word(codes, row, start + place, mask, LAYOUT) >> shift
        word = word | ((high & (((1 << LAYOUT.block.high_bits) - 1) * 0x01010101)) << 4)
    return word


@triton.jit
def block_scale(scales, n, group, scale_n, mask, LAYOUT: tl.constexpr):
    """Loads the scales of (output, group) pairs as float32."""
    row = scales + n.to(tl.int64) * scale_n
    PER_BLOCK: tl.constexpr = LAYOUT.block.size // LAYOUT.span
    start, place = group // PER_BLOCK * LAYOUT.block.nbytes, group % PER_BLOCK
    if LAYOUT.scale == "half_power":
        exponent = _byte(row, start, mask, LAYOUT)
        bits = tl.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
        scale = bits.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)
    else:
        scale = _half(row, start + LAYOUT.block.scale, mask, LAYOUT)
    if LAYOUT.scale == "six_bits":
        scale = _six_bits(row, start, place, 0, mask, LAYOUT) * scale
    if LAYOUT.scale == "bytes":
        stored = _byte(row, start + 192 + place, mask, LAYOUT)
        scale = ((stored ^ 128).to(tl.int32) - 128).to(tl.float32) * scale
    if LAYOUT.scale == "split_bits":
        low = (_byte(row, start + 4 + place // 2, mask, LAYOUT) >> (place % 2 * 4).to(tl.uint32)) & 15
        high = (_pair(row, start + 2, mask, LAYOUT) >> (2 * place).to(tl.uint32)) & 3
        scale = ((low | (high << 4)).to(tl.int32) - 32).to(tl.float32) * scale
    return scale


@triton.jit
def block_minimum(zeros, n, group, zero_word, mask, LAYOUT: tl.constexpr):
    """Loads the offsets of the weights of (output, group) pairs as float32."""
    row = zeros + n.to(tl.int64) * zero_word
    PER_BLOCK: tl.constexpr = LAYOUT.block.size // LAYOUT.span
    start = group // PER_BLOCK * LAYOUT.block.nbytes
    minimum = _half(row, start + 2, mask, LAYOUT)
    if LAYOUT.scale == "six_bits":
        minimum = _six_bits(row, start, group % PER_BLOCK, 4, mask, LAYOUT) * minimum
    return minimum


@triton.jit
def _six_bits(row, start, place, FIRST: tl.constexpr, mask, LAYOUT: tl.constexpr):
    """Loads a scale, or a minimum with `FIRST` 4, of Q4_K and Q5_K as float32."""
    first = _byte(row, start + 4 + FIRST + place % 4, mask, LAYOUT)
    third = _byte(row, start + 12 + place % 4, mask, LAYOUT)
    code = tl.where(place < 4, first & 63, ((third >> FIRST) & 15) | ((first >> 6) << 4))
    return code.to(tl.int32).to(tl.float32)
