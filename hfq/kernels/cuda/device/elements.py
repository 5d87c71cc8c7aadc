"""Loads of codes, groups, scales, and zero points of single weights and of units of words."""

from __future__ import annotations

import triton
import triton.language as tl

from hfq.kernels.cuda.device.blocks import block_element, block_minimum, block_scale

__all__ = ["channel_of", "element", "group_of", "scale_of", "unit", "zero_of"]


@triton.jit
def fetch(places, mask, IS_EVEN: tl.constexpr):
    """Loads values, and zeros outside the mask; with `IS_EVEN`, all are inside."""
    if IS_EVEN:
        values = tl.load(places)
    else:
        values = tl.load(places, mask=mask, other=0)
    return values


@triton.jit
def load_word(places, mask, IS_EVEN: tl.constexpr = False):
    """Loads words or bytes as uint32."""
    return fetch(places, mask, IS_EVEN).to(tl.uint32)


@triton.jit
def stream(
    codes,
    i,
    j,
    word_stride,
    other_stride,
    mask,
    BITS: tl.constexpr,
    WORD: tl.constexpr,
    ADDED: tl.constexpr = 0,
    IS_EVEN: tl.constexpr = False,
):
    """Loads code i of stream j, in the low bits of a uint32; a code may end in the next word.

    `ADDED` is added to each word first.
    """
    bit = i * BITS
    shift = (bit % WORD).to(tl.uint32)
    places = codes + j * other_stride + (bit // WORD) * word_stride
    words = (load_word(places, mask, IS_EVEN) + ADDED) >> shift
    if WORD % BITS != 0:
        is_cut = shift + BITS > WORD
        following = load_word(places + word_stride, mask & is_cut)
        words = words | (following << tl.where(is_cut, WORD - shift, 0))
    return words & ((1 << BITS) - 1)


@triton.jit
def planes(codes, i, j, word_stride, other_stride, mask, BITS: tl.constexpr):
    """Loads code i of stream j, whose bits are in planes of 32 codes."""
    LOW: tl.constexpr = 2 if BITS == 3 else 4
    HIGH: tl.constexpr = 2 if BITS > 5 else 1
    start = codes + j * other_stride + (i // 32) * BITS * word_stride
    place = i % 32
    code = stream(start, place, 0, word_stride, 0, mask, LOW, 32)
    code = code | (stream(start + LOW * word_stride, place, 0, word_stride, 0, mask, HIGH, 32) << LOW)
    if BITS == 7:
        code = code | (stream(start + 6 * word_stride, place, 0, word_stride, 0, mask, 1, 32) << 6)
    return code


@triton.jit
def placed(i, PLACE: tl.constexpr):
    """Returns the position in a stream of code i."""
    if PLACE == "awq":
        place = i // 8 * 8 + i % 8 // 2 + i % 2 * 4
    elif PLACE == "high_first":
        place = i ^ 1
    else:
        place = i
    return place


@triton.jit
def element(codes, n, k, in_features, code_word, code_other, slab, mask, LAYOUT: tl.constexpr):
    """Loads the code of weight (n, k), in the low bits of a uint32; n and k are int64."""
    BITS: tl.constexpr = LAYOUT.bits
    WORD: tl.constexpr = LAYOUT.word
    PLACE: tl.constexpr = LAYOUT.place
    SHARE: tl.constexpr = WORD // BITS
    if LAYOUT.loading == "blocks":
        code = block_element(codes, n, k, code_other, mask, LAYOUT)
    elif LAYOUT.loading == "planes":
        code = planes(codes, k, n, code_word, code_other, mask, BITS)
    elif LAYOUT.loading == "slabs":
        flat = n * in_features + k
        number = flat // slab
        if PLACE == "high_first":
            number = LAYOUT.slabs - 1 - number
        code = load_word(codes + flat % slab, mask) >> (number * BITS).to(tl.uint32)
    elif LAYOUT.loading == "quads":
        within = k % 32
        word = k // 64 * 32 + n % 4 * 8 + k % 64 // 32 * 4 + within % 8 // 2
        shift = (within % 2 * 4 + within // 8) * 4
        code = load_word(codes + n // 4 * code_other + word, mask) >> shift.to(tl.uint32)
    else:
        if LAYOUT.along == "flat":
            i, j = n * in_features + k, n * 0
        elif LAYOUT.along == "n":
            i, j = n, k
        else:
            i, j = k, n
        i = placed(i, PLACE)
        if LAYOUT.straddles:
            code = stream(codes, i, j, code_word, code_other, mask, BITS, WORD)
        else:
            words = load_word(codes + j * code_other + i // SHARE * code_word, mask)
            code = words >> (i % SHARE * BITS).to(tl.uint32)
    return code & ((1 << BITS) - 1)


@triton.jit
def unit(codes, n, w, code_word, code_other, mask, LAYOUT: tl.constexpr):
    """Loads the words of unit w of output n, as a tuple."""
    COUNT: tl.constexpr = LAYOUT.count
    if LAYOUT.loading == "quads":
        places = codes + (n // 4).to(tl.int64) * code_other + w // 8 * 32 + n % 4 * 8 + w % 8
    else:
        places = codes + n.to(tl.int64) * code_other + (w * COUNT).to(tl.int64) * code_word
    IS_EVEN: tl.constexpr = LAYOUT.is_even
    words = (load_word(places, mask, IS_EVEN),)
    for i in tl.static_range(1, COUNT):
        words += (load_word(places + i * code_word, mask, IS_EVEN),)  # type: ignore[assignment]
    return words


@triton.jit
def channel_of(w, p: tl.constexpr, LAYOUT: tl.constexpr):
    """Returns the input channel of code p of unit w."""
    if LAYOUT.loading == "quads" and LAYOUT.positions == 8:
        channel = w // 8 * 64 + w % 8 // 4 * 32 + p % 4 * 8 + w % 4 * 2 + p // 4
    elif LAYOUT.place == "high_first" and LAYOUT.loading == "runs":
        channel = w * LAYOUT.positions + (p ^ 1)
    elif LAYOUT.place == "awq" and LAYOUT.loading == "runs":
        channel = w * LAYOUT.positions + p // 8 * 8 + p % 4 * 2 + p % 8 // 4
    else:
        channel = w * LAYOUT.positions + p
    return channel


@triton.jit
def group_of(index, n, k, in_features, mask, LAYOUT: tl.constexpr):
    """Returns the group of weight (n, k)."""
    if LAYOUT.grouping == "index":
        group = tl.load(index + k, mask=mask, other=0).to(tl.int32)
    elif LAYOUT.grouping == "flat":
        group = (n * in_features + k) // LAYOUT.span
    elif LAYOUT.grouping == "columns":
        group = (n * in_features + k) % LAYOUT.span
    else:
        group = (k + LAYOUT.offset[1]) // LAYOUT.span
    return group


@triton.jit
def scale_of(
    scales,
    nested,
    nested_table,
    nested_offset,
    factor,
    n,
    group,
    scale_n,
    scale_g,
    mask,
    LAYOUT: tl.constexpr,
):
    """Loads the scales of (output, group) pairs as float32."""
    if LAYOUT.block is not None:
        scale = block_scale(scales, n, group, scale_n, mask, LAYOUT)
    else:
        scale = _separate_scale(
            scales, nested, nested_table, nested_offset, factor, n, group, scale_n, scale_g, mask, LAYOUT
        )
    return scale


@triton.jit
def _separate_scale(
    scales,
    nested,
    nested_table,
    nested_offset,
    factor,
    n,
    group,
    scale_n,
    scale_g,
    mask,
    LAYOUT: tl.constexpr,
):
    """Loads scales from tensors of their own."""
    block = n
    if LAYOUT.block_out != 1:
        block = (n + LAYOUT.offset[0]) // LAYOUT.block_out
    places = block * scale_n + group * scale_g
    IS_EVEN: tl.constexpr = LAYOUT.is_even
    stored = fetch(scales + places, mask, IS_EVEN)
    if LAYOUT.scale == "nested":
        scale = fetch(nested_table + stored.to(tl.int32), mask, IS_EVEN)
        scale = scale * fetch(nested + places // LAYOUT.nested_size, mask, IS_EVEN) + nested_offset
    elif LAYOUT.scale == "power":
        scale = tl.maximum(stored.to(tl.int32) << 23, 0x00400000).to(tl.float32, bitcast=True)
    elif LAYOUT.scale == "e4m3":
        word = (stored.to(tl.uint32) << 24).to(tl.int32, bitcast=True)
        scale = ((word >> 4) & -2014314496).to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif LAYOUT.scale == "e5m3":
        scale = (stored.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 5.192296858534828e33
    else:
        scale = stored.to(tl.float32)
    if LAYOUT.has_factor:
        scale = scale * factor
    if LAYOUT.divides:
        scale = tl.div_rn(1.0, tl.where(mask, scale, 1.0))
    return scale


@triton.jit
def zero_of(zeros, n, group, zero_word, zero_other, mask, LAYOUT: tl.constexpr):
    """Loads the zero points of (output, group) pairs as float32."""
    if LAYOUT.block is not None:
        zero = block_minimum(zeros, n, group, zero_word, mask, LAYOUT)
    else:
        zero = _separate_zero(zeros, n, group, zero_word, zero_other, mask, LAYOUT)
    return zero


@triton.jit
def _separate_zero(zeros, n, group, zero_word, zero_other, mask, LAYOUT: tl.constexpr):
    """Loads zero points from tensors of their own."""
    if LAYOUT.zero_along == "n":
        i, j = n, group
    else:
        i, j = group, n
    BITS: tl.constexpr = LAYOUT.zero_bits
    PLACE: tl.constexpr = LAYOUT.zero_place
    IS_EVEN: tl.constexpr = LAYOUT.is_even
    ONES: tl.constexpr = 0xFFFFFFFF // ((1 << BITS) - 1) if LAYOUT.zero_reading == "word_plus_one" else 0
    if LAYOUT.zero != "packed":
        zero = fetch(zeros + i * zero_word + j * zero_other, mask, IS_EVEN).to(tl.float32)
    else:
        if PLACE == "planes":
            codes = planes(zeros, i, j, zero_word, zero_other, mask, BITS)
        else:
            codes = stream(zeros, placed(i, PLACE), j, zero_word, zero_other, mask, BITS, 32, ONES, IS_EVEN)
        if LAYOUT.zero_reading == "field_plus_one":
            codes = codes + 1
        elif LAYOUT.zero_reading == "masked_plus_one":
            codes = (codes + 1) & ((1 << BITS) - 1)
        zero = codes.to(tl.int32).to(tl.float32) - LAYOUT.zero_middle
    return zero
