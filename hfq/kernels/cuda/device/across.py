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
def factors_of(x, row, k, in_features, LAYOUT: tl.constexpr):
    """Returns the activations of one row for the channels of a tile."""
    IS_EVEN: tl.constexpr = LAYOUT.is_even
    return fetch(x + row * in_features + k, k < in_features, IS_EVEN)


@triton.jit
def products_of_group(
    words,
    x,
    first,
    is_word,
    shifts,
    in_features,
    code_other,
    like,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
):
    """Returns sums of products and of activations over the tiles of a group."""
    IS_EVEN: tl.constexpr = LAYOUT.is_even
    group0 = tl.zeros_like(like)
    group1, group2, group3 = group0, group0, group0
    sum0 = tl.zeros((BLOCK_K,), dtype=tl.float32)
    sum1, sum2, sum3 = sum0, sum0, sum0
    for number in range(TILES):
        k = first + number * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = (k < in_features)[:, None] & is_word
        places = words + k[:, None].to(tl.int64) * code_other
        value = codes_of(load_word(places, mask, IS_EVEN), shifts, LAYOUT)
        factors = factors_of(x, 0, k, in_features, LAYOUT)
        group0 += value * factors[:, None, None]
        sum0 += factors
        if ROWS > 1:
            factors = factors_of(x, 1, k, in_features, LAYOUT)
            group1 += value * factors[:, None, None]
            sum1 += factors
        if ROWS > 2:
            factors = factors_of(x, 2, k, in_features, LAYOUT)
            group2 += value * factors[:, None, None]
            sum2 += factors
            factors = factors_of(x, 3, k, in_features, LAYOUT)
            group3 += value * factors[:, None, None]
            sum3 += factors
    return (group0, group1, group2, group3), (sum0, sum1, sum2, sum3)


@triton.jit
def scaled_group(products, factors, scale, zero, LAYOUT: tl.constexpr):
    """Returns the products of a group with its scales and zero points applied."""
    if LAYOUT.zero == "none":
        result = products * scale[None]
    elif LAYOUT.zero_sign == 0:
        result = (products - zero[None] * factors[:, None, None]) * scale[None]
    else:
        result = products * scale[None] + LAYOUT.zero_sign * zero[None] * factors[:, None, None]
    return result


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
    """Multiplies at most `ROWS` rows by the outputs of `BLOCK_J` words, in one split.

    A step is `TILES` tiles of `BLOCK_K` channels, all of one group. The others are as in `along.few`.
    """
    POSITIONS: tl.constexpr = LAYOUT.positions
    j = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    p = tl.arange(0, POSITIONS)
    n = output_of(j[:, None], p[None, :], out_features, LAYOUT)
    inside = (j * POSITIONS < out_features)[:, None] & (p >= 0)[None, :]
    shifts = place_of(p, LAYOUT)[None, None, :]
    is_word = (j * POSITIONS < out_features)[None, :]
    places = codes + j[None, :].to(tl.int64) * code_word
    total0 = tl.zeros((BLOCK_K, BLOCK_J, POSITIONS), dtype=tl.float32)
    total1, total2, total3 = total0, total0, total0
    for step in range(STEPS):
        first = (tl.program_id(1) * STEPS + step) * TILES * BLOCK_K
        groups, sums = products_of_group(
            places, x, first, is_word, shifts, in_features, code_other, total0, LAYOUT, ROWS, BLOCK_K, TILES
        )
        mask = inside & (first < in_features)
        group = first // LAYOUT.span
        scale = scale_of(scales, scales, scales, 0.0, factor, n, group, scale_n, scale_g, mask, LAYOUT)
        zero = scale
        if LAYOUT.zero != "none":
            zero = zero_of(zeros, n, group, zero_word, zero_other, mask, LAYOUT)
        total0 += scaled_group(groups[0], sums[0], scale, zero, LAYOUT)
        if ROWS > 1:
            total1 += scaled_group(groups[1], sums[1], scale, zero, LAYOUT)
        if ROWS > 2:
            total2 += scaled_group(groups[2], sums[2], scale, zero, LAYOUT)
            total3 += scaled_group(groups[3], sums[3], scale, zero, LAYOUT)
    results = tl.sum(total0, 0), tl.sum(total1, 0), tl.sum(total2, 0), tl.sum(total3, 0)
    write_few(
        results,
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
