"""Dequantization of panels of a weight, for products of many rows."""

from __future__ import annotations

import triton
import triton.language as tl

from hfq.kernels.cuda.device.along import rounded, weight_of
from hfq.kernels.cuda.device.blocks import stored_row
from hfq.kernels.cuda.device.elements import element, group_of, scale_of, zero_of

__all__ = ["expand"]


@triton.jit(do_not_specialize=["first", "rows"])
def expand(
    panel,
    codes,
    scales,
    zeros,
    index,
    table,
    nested,
    nested_table,
    shared,
    columns,
    first,
    rows,
    in_features,
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
    HAS_COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Writes a tile of the weight, rounded once to `DTYPE`.

    Args:
        panel: [rows, in_features], output rows [first, first + rows) of the weight.
        first: The first row.
        rows: The number of rows.

    The others are the attributes of `Layer`, described by elements.
    """
    row = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    k = (tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    mask = (row < rows) & (k < in_features)
    n = stored_row((first + row).to(tl.int64), LAYOUT)
    words = (element(codes, n, k.to(tl.int64), in_features, code_word, code_other, slab, mask, LAYOUT),)
    group = group_of(index, n, k, in_features, mask, LAYOUT)
    scale = scale_of(
        scales, nested, nested_table, nested_offset, factor, n, group, scale_n, scale_g, mask, LAYOUT
    )
    zero = scale
    if LAYOUT.zero != "none":
        zero = zero_of(zeros, n, group, zero_word, zero_other, mask, LAYOUT)
    weight = weight_of(DECODE(words, table, 0, LAYOUT), scale, zero, LAYOUT, RESCALE)
    if INVALID is not None:
        weight = tl.where(INVALID(words) != 0, float("nan"), weight)
    if LAYOUT.shared == "multiplies":
        weight = weight * tl.load(shared).to(tl.float32)
    if LAYOUT.shared == "divides":
        weight = tl.div_rn(weight, tl.zeros_like(weight) + tl.load(shared).to(tl.float32))
    if HAS_COLUMNS:
        weight = weight * tl.load(columns + k, mask=k < in_features, other=0.0).to(tl.float32)
    place = panel + row.to(tl.int64) * in_features + k
    tl.store(place, rounded(weight, DTYPE, DOT), mask=mask)
