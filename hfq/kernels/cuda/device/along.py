"""Products by layers whose words hold codes of one output: words along the input.

`prepare` makes the activations ready once for all programs. `few` multiplies up to four rows without tensor
cores and accumulates exact products in float32. `some` multiplies up to 64 rows by `tl.dot`, with the weight
rounded once to the dtype of the factors, as in the reference kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hfq.kernels.cuda.device.blocks import block_unit, stored_row
from hfq.kernels.cuda.device.elements import channel_of, element, fetch, group_of, scale_of, unit, zero_of

__all__ = ["few", "prepare", "some"]


@triton.jit
def rounded(values, DTYPE: tl.constexpr, DOT: tl.constexpr):
    """Rounds float32 values to `DTYPE` and returns them as `DOT`.

    In the interpreter, integer operations round, since its conversion to bfloat16 truncates.
    """
    if DTYPE == tl.bfloat16 and DOT == tl.float32:  # noqa: SIM300
        bits = values.to(tl.int32, bitcast=True)
        found = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        result = tl.where(values == values, found, values)
    else:
        result = values.to(DTYPE).to(DOT)
    return result


@triton.jit(do_not_specialize=["rows", "x_stride"])
def prepare(
    x,
    columns,
    values,
    sums,
    rows,
    in_features,
    units,
    x_stride,
    LAYOUT: tl.constexpr,
    FACTOR: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes rows of activations in the order of the codes, and the sum of each unit.

    Args:
        x: [rows, in_features].
        columns: [in_features], a scale of each channel.
        values: [programs * BLOCK_M, positions, units], the activations times `FACTOR`; zero beyond the input
            and for rows that are not there.
        sums: float32 [programs * BLOCK_M, units].
        rows: The number of rows.
        in_features: The number of channels.
        units: The number of units.
        x_stride: Elements from a row to the next one.
        LAYOUT: See `Layout`.
        FACTOR: A power of two.
        HAS_COLUMNS: True if there are scales of channels.
        HAS_SUMS: True if sums are needed.
        DTYPE: The dtype of `values`.
        DOT: See `rounded`.
        BLOCK_M: Rows of a program.
        BLOCK: Units of a program.
    """
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None].to(tl.int64)
    w = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    total = tl.zeros((BLOCK_M, BLOCK), dtype=tl.float32)
    inside = (w < units) & (m >= 0)
    POSITIONS: tl.constexpr = LAYOUT.positions
    for p in tl.static_range(POSITIONS):
        k = channel_of(w, p, LAYOUT)
        mask = inside & (k < in_features) & (m < rows)
        value = tl.load(x + m * x_stride + k, mask=mask, other=0.0).to(tl.float32)
        if HAS_COLUMNS:
            value = value * tl.load(columns + k, mask=(w < units) & (k < in_features), other=0.0).to(
                tl.float32
            )
        total += value
        place = values + (m * LAYOUT.positions + p) * units + w
        tl.store(place, rounded(value * FACTOR, DTYPE, DOT), mask=inside)
    if HAS_SUMS:
        tl.store(sums + m * units + w, total, mask=inside)


@triton.jit
def loaded(codes, n, w, in_features, code_word, code_other, slab, mask, LAYOUT: tl.constexpr):
    """Loads the words of units, or single codes if the layer has no units of whole words."""
    if LAYOUT.loading == "blocks" and LAYOUT.positions != 1:
        words = block_unit(codes, n, w, code_other, mask, LAYOUT)
    elif LAYOUT.loading == "runs" or (LAYOUT.loading == "quads" and LAYOUT.positions == 8):
        words = unit(codes, n, w, code_word, code_other, mask, LAYOUT)
    else:
        wide_n, wide_w = n.to(tl.int64), w.to(tl.int64)
        words = (element(codes, wide_n, wide_w, in_features, code_word, code_other, slab, mask, LAYOUT),)
    return words


@triton.jit
def emit(
    result,
    place,
    n,
    mask,
    out,
    bias,
    shared,
    LAYOUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Writes float32 results, with the numbers that scale the whole layer, and the bias."""
    if LAYOUT.shared == "multiplies":
        result = result * tl.load(shared).to(tl.float32)
    if LAYOUT.shared == "divides":
        result = tl.div_rn(result, tl.zeros_like(result) + tl.load(shared).to(tl.float32))
    result = rounded(result, DTYPE, tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)
        result = rounded(result + rounded(added, DTYPE, tl.float32), DTYPE, tl.float32)
    tl.store(out + place, result.to(DTYPE), mask=mask)


@triton.jit
def is_last(counters, tile, SPLITS: tl.constexpr):
    """Returns True in the last program of a tile that ends; resets the tile's counter."""
    tl.debug_barrier()
    is_end = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_end:
        tl.store(counters + tile, 0)
    tl.debug_barrier()
    return is_end


@triton.jit
def added(parts, place, stride, mask, like, SPLITS: tl.constexpr):
    """Adds the parts of the sum in one order."""
    total = tl.zeros_like(like)
    for split in range(SPLITS):
        total += tl.load(parts + split * stride + place, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def write_few(
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
    LAYOUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Writes the results of up to four rows, or their parts, which the last program adds."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    for row in tl.static_range(ROWS):
        place = row * out_features + n
        if SPLITS == 1:
            emit(results[row], place, n, inside & (row < rows), out, bias, shared, LAYOUT, HAS_BIAS, DTYPE)
        else:
            tl.store(parts + split * ROWS * out_features + place, results[row], mask=inside)
    if SPLITS > 1:
        is_end = is_last(counters, tile, SPLITS)
        for row in tl.static_range(ROWS):
            mask = inside & (row < rows) & is_end
            place = row * out_features + n
            result = added(parts, place, ROWS * out_features, mask, results[0], SPLITS)
            emit(result, place, n, mask, out, bias, shared, LAYOUT, HAS_BIAS, DTYPE)


@triton.jit
def products_of(
    words, table, x, w, units, like, DECODE: tl.constexpr, LAYOUT: tl.constexpr, ROWS: tl.constexpr
):
    """Returns the products of up to four rows by the units of a tile, [units, outputs] each."""
    IS_EVEN: tl.constexpr = LAYOUT.is_even
    POSITIONS: tl.constexpr = LAYOUT.positions
    total0 = tl.zeros_like(like)
    total1, total2, total3 = total0, total0, total0
    inside = w < units
    for p in tl.static_range(POSITIONS):
        value = DECODE(words, table, p, LAYOUT)
        total0 += value * fetch(x + p * units + w, inside, IS_EVEN)[:, None]
        if ROWS > 1:
            total1 += value * fetch(x + (POSITIONS + p) * units + w, inside, IS_EVEN)[:, None]
        if ROWS > 2:
            total2 += value * fetch(x + (2 * POSITIONS + p) * units + w, inside, IS_EVEN)[:, None]
            total3 += value * fetch(x + (3 * POSITIONS + p) * units + w, inside, IS_EVEN)[:, None]
    return total0, total1, total2, total3


@triton.jit
def scaled_units(total, sums, row, w, units, scale, zero, LAYOUT: tl.constexpr):
    """Returns the products of one row with scales and zero points applied."""
    IS_EVEN: tl.constexpr = LAYOUT.is_even
    if LAYOUT.zero == "none":
        product = total * scale
    else:
        channels = fetch(sums + row * units + w, w < units, IS_EVEN)[:, None]
        if LAYOUT.zero_sign == 0:
            product = (total - zero * channels) * scale
        else:
            product = total * scale + LAYOUT.zero_sign * zero * channels
    return product


@triton.jit(do_not_specialize=["rows"])
def few(
    x,
    sums,
    codes,
    scales,
    zeros,
    index,
    table,
    nested,
    nested_table,
    shared,
    bias,
    out,
    parts,
    counters,
    rows,
    out_features,
    in_features,
    units,
    code_word,
    code_other,
    slab,
    scale_n,
    scale_g,
    zero_word,
    zero_other,
    factor,
    nested_offset,
    DECODE: tl.constexpr,
    INVALID: tl.constexpr,
    LAYOUT: tl.constexpr,
    RESCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Multiplies at most `ROWS` rows by `BLOCK_N` outputs in one split of the input.

    Args:
        ROWS: 1, 2, or 4.
        x: float32 [ROWS, positions, units], from `prepare`.
        sums: float32 [ROWS, units], from `prepare`; read only if there are zero points.
        out: [rows, out_features].
        parts: float32 [SPLITS, ROWS, out_features].
        counters: int32, a zero for each tile of outputs.

    The others are the attributes of `Layer`.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    total0 = tl.zeros((BLOCK_W, BLOCK_N), dtype=tl.float32)
    total1, total2, total3 = total0, total0, total0
    bad = tl.zeros((BLOCK_W, BLOCK_N), dtype=tl.uint32)
    for step in range(STEPS):
        w = (split * STEPS + step) * BLOCK_W + tl.arange(0, BLOCK_W)
        at_n, at_w = stored_row(n, LAYOUT)[None, :], w[:, None]
        mask = (at_w < units) & (n < out_features)[None, :]
        words = loaded(codes, at_n, at_w, in_features, code_word, code_other, slab, mask, LAYOUT)
        if INVALID is not None:
            bad = bad | INVALID(words)
        group = group_of(index, at_n, at_w * LAYOUT.positions, in_features, mask, LAYOUT)
        scale = scale_of(
            scales, nested, nested_table, nested_offset, factor, at_n, group, scale_n, scale_g, mask, LAYOUT
        )
        zero = scale
        if LAYOUT.zero != "none":
            zero = zero_of(zeros, at_n, group, zero_word, zero_other, mask, LAYOUT)
        parts0, parts1, parts2, parts3 = products_of(words, table, x, w, units, scale, DECODE, LAYOUT, ROWS)
        total0 += scaled_units(parts0, sums, 0, w, units, scale, zero, LAYOUT)
        if ROWS > 1:
            total1 += scaled_units(parts1, sums, 1, w, units, scale, zero, LAYOUT)
        if ROWS > 2:
            total2 += scaled_units(parts2, sums, 2, w, units, scale, zero, LAYOUT)
            total3 += scaled_units(parts3, sums, 3, w, units, scale, zero, LAYOUT)
    spoiled = tl.max(bad, 0) != 0
    write_few(
        (
            tl.where(spoiled, float("nan"), tl.sum(total0, 0) * RESCALE),
            tl.where(spoiled, float("nan"), tl.sum(total1, 0) * RESCALE),
            tl.where(spoiled, float("nan"), tl.sum(total2, 0) * RESCALE),
            tl.where(spoiled, float("nan"), tl.sum(total3, 0) * RESCALE),
        ),
        n,
        n < out_features,
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
def some(
    x,
    codes,
    scales,
    zeros,
    index,
    table,
    nested,
    nested_table,
    shared,
    bias,
    out,
    parts,
    counters,
    rows,
    out_features,
    in_features,
    units,
    code_word,
    code_other,
    slab,
    scale_n,
    scale_g,
    zero_word,
    zero_other,
    factor,
    nested_offset,
    DECODE: tl.constexpr,
    INVALID: tl.constexpr,
    LAYOUT: tl.constexpr,
    RESCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Multiplies `BLOCK_M` rows by `BLOCK_N` outputs in one split of the input.

    Args:
        x: `DOT` [BLOCK_M, positions, units], from `prepare`.
        out: [rows, out_features].
        parts: float32 [SPLITS, BLOCK_M, out_features].
        counters: int32, a zero for each tile of outputs.

    The others are the attributes of `Layer`.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    bad = tl.zeros((BLOCK_W, BLOCK_N), dtype=tl.uint32)
    for step in range(STEPS):
        w = (split * STEPS + step) * BLOCK_W + tl.arange(0, BLOCK_W)
        at_n, at_w = stored_row(n, LAYOUT)[None, :], w[:, None]
        mask = (at_w < units) & (n < out_features)[None, :]
        words = loaded(codes, at_n, at_w, in_features, code_word, code_other, slab, mask, LAYOUT)
        if INVALID is not None:
            bad = bad | INVALID(words)
        group = group_of(index, at_n, at_w * LAYOUT.positions, in_features, mask, LAYOUT)
        scale = scale_of(
            scales, nested, nested_table, nested_offset, factor, at_n, group, scale_n, scale_g, mask, LAYOUT
        )
        zero = scale
        if LAYOUT.zero != "none":
            zero = zero_of(zeros, at_n, group, zero_word, zero_other, mask, LAYOUT)
        IS_EVEN: tl.constexpr = LAYOUT.is_even
        POSITIONS: tl.constexpr = LAYOUT.positions
        for p in tl.static_range(POSITIONS):
            weight = weight_of(DECODE(words, table, p, LAYOUT), scale, zero, LAYOUT, RESCALE)
            place = (m[:, None] * POSITIONS + p) * units + w[None, :]
            values = fetch(x + place, w[None, :] < units, IS_EVEN)
            total = tl.dot(values, rounded(weight, DTYPE, DOT), total, input_precision="ieee")
    total = tl.where((tl.max(bad, 0) != 0)[None, :], float("nan"), total)
    place = m[:, None] * out_features + n[None, :]
    mask = (m < rows)[:, None] & (n < out_features)[None, :]
    at_n = tl.broadcast_to(n[None, :], (BLOCK_M, BLOCK_N))
    if SPLITS == 1:
        emit(total, place, at_n, mask, out, bias, shared, LAYOUT, HAS_BIAS, DTYPE)
    else:
        tl.store(parts + split * BLOCK_M * out_features + place, total, mask=mask)
        if is_last(counters, tile, SPLITS):
            total = added(parts, place, BLOCK_M * out_features, mask, total, SPLITS)
            emit(total, place, at_n, mask, out, bias, shared, LAYOUT, HAS_BIAS, DTYPE)


@triton.jit
def weight_of(value, scale, zero, LAYOUT: tl.constexpr, RESCALE: tl.constexpr):
    """Returns the weights of decoded codes."""
    if RESCALE != 1.0:
        value = value * RESCALE
    if LAYOUT.zero == "none":
        weight = value * scale
    elif LAYOUT.zero_sign == 0:
        weight = (value - zero) * scale
    else:
        weight = value * scale + LAYOUT.zero_sign * zero
    return weight
