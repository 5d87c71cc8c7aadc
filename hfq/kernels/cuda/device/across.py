"""Products by layers whose words hold codes of several outputs: AWQ's gemm, and slabs.

Tiles have three dimensions: channels, words, and codes of a word. A loop over the tiles of a group sums
products of codes, and each group is scaled once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hfq.kernels.cuda.device.along import added, emit, is_last, rounded, weight_of, write_few
from hfq.kernels.cuda.device.elements import fetch, load_word, placed, scale_of, zero_of

__all__ = ["few_across", "some_across"]


@triton.jit
def codes_of(words, p, LAYOUT: tl.constexpr):
    """Returns the codes of words as float32; p has one more dimension than words."""
    BITS: tl.constexpr = LAYOUT.bits
    field = (words[:, :, None] >> (p * BITS).to(tl.uint32)) & ((1 << BITS) - 1)
    if LAYOUT.signed:
        field = field ^ (1 << (BITS - 1))
    MIDDLE: tl.constexpr = LAYOUT.middle + ((1 << BITS) // 2 if LAYOUT.signed else 0)
    return (field | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)


@triton.jit
def output_of(j, p, out_features, LAYOUT: tl.constexpr):
    """Returns the output of code p of words j."""
    if LAYOUT.slabs > 1:
        n = p * (out_features // LAYOUT.positions) + j
    else:
        n = j * LAYOUT.positions + p
    return n


@triton.jit
def place_of(p, LAYOUT: tl.constexpr):
    """Returns the position in a word of the code of output p of the word."""
    PLACE: tl.constexpr = LAYOUT.place
    if LAYOUT.slabs == 1:
        place = placed(p, PLACE)
    elif PLACE == "high_first":
        place = LAYOUT.positions - 1 - p
    else:
        place = p
    return place


@triton.jit
def row_of(value, x, row, k, in_features, LAYOUT: tl.constexpr):
    """Returns the products of one row by the values of a tile, and the sum of its activations."""
    IS_EVEN: tl.constexpr = LAYOUT.is_even
    factor = fetch(x + row * in_features + k, k < in_features, IS_EVEN)
    return value * factor[:, None, None], tl.sum(factor, 0)


@triton.jit
def scaled(total, channels, scale, zero, LAYOUT: tl.constexpr):
    """Returns the sums of a group, and what is added to them once for all channels."""
    if LAYOUT.zero == "none":
        constant = tl.zeros_like(scale)
    elif LAYOUT.zero_sign == 0:
        constant = -zero * scale * channels
    else:
        constant = LAYOUT.zero_sign * zero * channels
    return total * scale[None], constant


@triton.jit(do_not_specialize=["rows"])
def few_across(
    x,
    codes,
    scales,
    zeros,
    shared,
    bias,
    out,
    parts,
    counters,
    rows,
    out_features,
    in_features,
    code_word,
    code_other,
    scale_n,
    scale_g,
    zero_word,
    zero_other,
    factor,
    LAYOUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Multiplies at most `ROWS` rows by the outputs of `BLOCK_J` words in one split of the input.

    A step is `TILES` tiles of `BLOCK_K` channels, all of one group. The others are as in `along.few`.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    IS_EVEN: tl.constexpr = LAYOUT.is_even
    POSITIONS: tl.constexpr = LAYOUT.positions
    j = tile * BLOCK_J + tl.arange(0, BLOCK_J)
    p = tl.arange(0, POSITIONS)
    n = output_of(j[:, None], p[None, :], out_features, LAYOUT)
    inside = (j * POSITIONS < out_features)[:, None] & (p >= 0)[None, :]
    shifts = place_of(p, LAYOUT)[None, None, :]
    total0 = tl.zeros((BLOCK_K, BLOCK_J, POSITIONS), dtype=tl.float32)
    total1 = total0
    total2 = total0
    total3 = total0
    once0 = tl.zeros((BLOCK_J, POSITIONS), dtype=tl.float32)
    once1 = once0
    once2 = once0
    once3 = once0
    for step in range(STEPS):
        first = (split * STEPS + step) * TILES * BLOCK_K
        group0 = tl.zeros((BLOCK_K, BLOCK_J, POSITIONS), dtype=tl.float32)
        group1 = group0
        group2 = group0
        group3 = group0
        sum0 = 0.0
        sum1 = 0.0
        sum2 = 0.0
        sum3 = 0.0
        for number in range(TILES):
            k = first + number * BLOCK_K + tl.arange(0, BLOCK_K)
            mask = (k < in_features)[:, None] & (j * POSITIONS < out_features)[None, :]
            places = codes + k[:, None].to(tl.int64) * code_other + j[None, :].to(tl.int64) * code_word
            words = load_word(places, mask, IS_EVEN)
            value = codes_of(words, shifts, LAYOUT)
            product, channels = row_of(value, x, 0, k, in_features, LAYOUT)
            group0 += product
            sum0 += channels
            if ROWS > 1:
                product, channels = row_of(value, x, 1, k, in_features, LAYOUT)
                group1 += product
                sum1 += channels
            if ROWS > 2:
                product, channels = row_of(value, x, 2, k, in_features, LAYOUT)
                group2 += product
                sum2 += channels
                product, channels = row_of(value, x, 3, k, in_features, LAYOUT)
                group3 += product
                sum3 += channels
        mask = inside & (first < in_features)
        group = first // LAYOUT.span
        scale = scale_of(scales, scales, scales, 0.0, factor, n, group, scale_n, scale_g, mask, LAYOUT)
        zero = scale
        if LAYOUT.zero != "none":
            zero = zero_of(zeros, n, group, zero_word, zero_other, mask, LAYOUT)
        product, constant = scaled(group0, sum0, scale, zero, LAYOUT)
        total0 += product
        once0 += constant
        if ROWS > 1:
            product, constant = scaled(group1, sum1, scale, zero, LAYOUT)
            total1 += product
            once1 += constant
        if ROWS > 2:
            product, constant = scaled(group2, sum2, scale, zero, LAYOUT)
            total2 += product
            once2 += constant
            product, constant = scaled(group3, sum3, scale, zero, LAYOUT)
            total3 += product
            once3 += constant
    write_few(
        (
            tl.sum(total0, 0) + once0,
            tl.sum(total1, 0) + once1,
            tl.sum(total2, 0) + once2,
            tl.sum(total3, 0) + once3,
        ),
        n,
        inside,
        out,
        parts,
        bias,
        shared,
        counters,
        rows,
        out_features,
        LAYOUT,
        HAS_BIAS,
        DTYPE,
        ROWS,
        SPLITS,
    )


@triton.jit(do_not_specialize=["rows"])
def some_across(
    x,
    codes,
    scales,
    zeros,
    shared,
    bias,
    out,
    parts,
    counters,
    rows,
    out_features,
    in_features,
    code_word,
    code_other,
    scale_n,
    scale_g,
    zero_word,
    zero_other,
    factor,
    LAYOUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Multiplies `BLOCK_M` rows by the outputs of `BLOCK_J` words in one split of the input.

    A step is one tile of `BLOCK_K` channels of one group. The others are as in `along.some`.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    IS_EVEN: tl.constexpr = LAYOUT.is_even
    POSITIONS: tl.constexpr = LAYOUT.positions
    j = tile * BLOCK_J + tl.arange(0, BLOCK_J)
    p = tl.arange(0, POSITIONS)
    m = tl.arange(0, BLOCK_M)
    n = output_of(j[:, None], p[None, :], out_features, LAYOUT)
    inside = (j * POSITIONS < out_features)[:, None] & (p >= 0)[None, :]
    shifts = place_of(p, LAYOUT)[None, None, :]
    total = tl.zeros((BLOCK_M, BLOCK_J * POSITIONS), dtype=tl.float32)
    for step in range(STEPS):
        first = (split * STEPS + step) * BLOCK_K
        k = first + tl.arange(0, BLOCK_K)
        mask = (k < in_features)[:, None] & (j * POSITIONS < out_features)[None, :]
        places = codes + k[:, None].to(tl.int64) * code_other + j[None, :].to(tl.int64) * code_word
        words = load_word(places, mask, IS_EVEN)
        group = first // LAYOUT.span
        is_group = inside & (first < in_features)
        scale = scale_of(scales, scales, scales, 0.0, factor, n, group, scale_n, scale_g, is_group, LAYOUT)
        zero = scale
        if LAYOUT.zero != "none":
            zero = zero_of(zeros, n, group, zero_word, zero_other, is_group, LAYOUT)
        weight = weight_of(codes_of(words, shifts, LAYOUT), scale[None], zero[None], LAYOUT, 1.0)
        weight = tl.reshape(weight, (BLOCK_K, BLOCK_J * POSITIONS))
        values = fetch(x + m[:, None] * in_features + k[None, :], (k < in_features)[None, :], IS_EVEN)
        total = tl.dot(values, rounded(weight, DTYPE, DOT), total, input_precision="ieee")
    n = tl.reshape(n, (BLOCK_J * POSITIONS,))
    inside = tl.reshape(inside, (BLOCK_J * POSITIONS,))
    place = m[:, None] * out_features + n[None, :]
    mask = (m < rows)[:, None] & inside[None, :]
    at_n = tl.broadcast_to(n[None, :], (BLOCK_M, BLOCK_J * POSITIONS))
    if SPLITS == 1:
        emit(total, place, at_n, mask, out, bias, shared, LAYOUT, HAS_BIAS, DTYPE)
    else:
        tl.store(parts + split * BLOCK_M * out_features + place, total, mask=mask)
        if is_last(counters, tile, SPLITS):
            total = added(parts, place, BLOCK_M * out_features, mask, total, SPLITS)
            emit(total, place, at_n, mask, out, bias, shared, LAYOUT, HAS_BIAS, DTYPE)
