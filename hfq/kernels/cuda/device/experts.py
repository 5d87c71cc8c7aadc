"""Products by the experts of a layer: each program finds its expert in tables on the device.

The experts of a stack have one layout, so that a program differs from that of a single layer by its addresses
alone. Tables hold the distance of each expert's tensors from those of expert 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hfq.kernels.cuda.device.across import few_across, some_across
from hfq.kernels.cuda.device.along import few, rounded, some

__all__ = ["combine", "few_across_of_expert", "few_of_expert", "some_across_of_expert", "some_of_expert"]


@triton.jit
def moved(tensor, distances, expert, place: tl.constexpr, COUNT: tl.constexpr, UNIT: tl.constexpr):
    """Returns the address of an expert's tensor, from that of expert 0."""
    return tensor + tl.load(distances + expert * COUNT + place) * UNIT


@triton.jit
def expert_of_pair(routed, experts):
    """Returns the expert of this program's pair and 1, or 0 and 0 if none is routed."""
    expert = tl.load(routed + tl.program_id(2)).to(tl.int64)
    is_routed = (expert >= 0) & (expert < experts)
    return tl.where(is_routed, expert, 0), is_routed.to(tl.int32)


@triton.jit(do_not_specialize=["experts", "share"])
def few_of_expert(
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
    routed,
    distances,
    numbers,
    experts,
    share,
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
    UNIT: tl.constexpr,
):
    """Multiplies one row of a pair of token and expert, as `few` does.

    Args:
        x: float32 [tokens or pairs, positions, units], from `prepare`.
        sums: float32 [tokens or pairs, units], from `prepare`.
        out: [pairs, out_features]; rows of pairs without an expert are left.
        parts: float32 [pairs, SPLITS, out_features].
        counters: int32 [pairs, tiles], zeros.
        routed: The expert of each pair, integers [pairs].
        distances: int64 [experts, 9], in `UNIT` elements, of the tensors from `codes` to `bias`.
        numbers: float32 [experts, 2], `factor` and `nested_offset`.
        experts: The number of experts.
        share: Pairs that share a row of `x`.

    The others are those of `few`, for expert 0.
    """
    expert, rows = expert_of_pair(routed, experts)
    pair = tl.program_id(2).to(tl.int64)
    POSITIONS: tl.constexpr = LAYOUT.positions
    few(
        x + pair // share * POSITIONS * units,
        sums + pair // share * units,
        moved(codes, distances, expert, 0, 9, UNIT),
        moved(scales, distances, expert, 1, 9, UNIT),
        moved(zeros, distances, expert, 2, 9, UNIT),
        moved(index, distances, expert, 3, 9, UNIT),
        moved(table, distances, expert, 4, 9, UNIT),
        moved(nested, distances, expert, 5, 9, UNIT),
        moved(nested_table, distances, expert, 6, 9, UNIT),
        moved(shared, distances, expert, 7, 9, UNIT),
        moved(bias, distances, expert, 8, 9, UNIT),
        out + pair * out_features,
        parts + pair * SPLITS * out_features,
        counters + pair * tl.num_programs(0),
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
        tl.load(numbers + expert * 2),
        tl.load(numbers + expert * 2 + 1),
        DECODE,
        INVALID,
        LAYOUT,
        RESCALE,
        HAS_BIAS,
        DTYPE,
        ROWS,
        BLOCK_W,
        BLOCK_N,
        STEPS,
        SPLITS,
    )


@triton.jit
def some_of_expert(
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
    blocks,
    distances,
    numbers,
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
    UNIT: tl.constexpr,
):
    """Multiplies a block of rows that one expert receives, as `some` does.

    Args:
        x: [pairs + BLOCK_M, positions, units], from `prepare`, sorted by expert.
        out: [pairs, out_features].
        parts: float32 [blocks, SPLITS, BLOCK_M, out_features].
        counters: int32 [blocks, tiles], zeros.
        blocks: int64 [blocks, 3]: expert, first row, and number of rows, 0 if the block is not used.

    The others are those of `some`, for expert 0, and of `few_of_expert`.
    """
    block = tl.program_id(2).to(tl.int64)
    expert = tl.load(blocks + block * 3)
    first = tl.load(blocks + block * 3 + 1)
    rows = tl.load(blocks + block * 3 + 2)
    POSITIONS: tl.constexpr = LAYOUT.positions
    if rows > 0:
        some(
            x + first * POSITIONS * units,
            moved(codes, distances, expert, 0, 9, UNIT),
            moved(scales, distances, expert, 1, 9, UNIT),
            moved(zeros, distances, expert, 2, 9, UNIT),
            moved(index, distances, expert, 3, 9, UNIT),
            moved(table, distances, expert, 4, 9, UNIT),
            moved(nested, distances, expert, 5, 9, UNIT),
            moved(nested_table, distances, expert, 6, 9, UNIT),
            moved(shared, distances, expert, 7, 9, UNIT),
            moved(bias, distances, expert, 8, 9, UNIT),
            out + first * out_features,
            parts + block * SPLITS * BLOCK_M * out_features,
            counters + block * tl.num_programs(0),
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
            tl.load(numbers + expert * 2),
            tl.load(numbers + expert * 2 + 1),
            DECODE,
            INVALID,
            LAYOUT,
            RESCALE,
            HAS_BIAS,
            DTYPE,
            DOT,
            BLOCK_M,
            BLOCK_W,
            BLOCK_N,
            STEPS,
            SPLITS,
        )


@triton.jit(do_not_specialize=["experts", "share"])
def few_across_of_expert(
    x,
    codes,
    scales,
    zeros,
    shared,
    bias,
    out,
    parts,
    counters,
    routed,
    distances,
    numbers,
    experts,
    share,
    out_features,
    in_features,
    code_word,
    code_other,
    scale_n,
    scale_g,
    zero_word,
    zero_other,
    LAYOUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Multiplies one row of a pair of token and expert, as `few_across` does.

    `distances` is int64 [experts, 5]; see `few_of_expert` for the other arguments.
    """
    expert, rows = expert_of_pair(routed, experts)
    pair = tl.program_id(2).to(tl.int64)
    few_across(
        x + pair // share * in_features,
        moved(codes, distances, expert, 0, 5, UNIT),
        moved(scales, distances, expert, 1, 5, UNIT),
        moved(zeros, distances, expert, 2, 5, UNIT),
        moved(shared, distances, expert, 3, 5, UNIT),
        moved(bias, distances, expert, 4, 5, UNIT),
        out + pair * out_features,
        parts + pair * SPLITS * out_features,
        counters + pair * tl.num_programs(0),
        rows,
        out_features,
        in_features,
        code_word,
        code_other,
        scale_n,
        scale_g,
        zero_word,
        zero_other,
        tl.load(numbers + expert * 2),
        LAYOUT,
        HAS_BIAS,
        DTYPE,
        ROWS,
        BLOCK_K,
        BLOCK_J,
        TILES,
        STEPS,
        SPLITS,
    )


@triton.jit
def some_across_of_expert(
    x,
    codes,
    scales,
    zeros,
    shared,
    bias,
    out,
    parts,
    counters,
    blocks,
    distances,
    numbers,
    out_features,
    in_features,
    code_word,
    code_other,
    scale_n,
    scale_g,
    zero_word,
    zero_other,
    LAYOUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_J: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Multiplies a block of rows that one expert receives, as `some_across` does.

    `distances` is int64 [experts, 5]; see `some_of_expert` for the other arguments.
    """
    block = tl.program_id(2).to(tl.int64)
    expert = tl.load(blocks + block * 3)
    first = tl.load(blocks + block * 3 + 1)
    rows = tl.load(blocks + block * 3 + 2)
    if rows > 0:
        some_across(
            x + first * in_features,
            moved(codes, distances, expert, 0, 5, UNIT),
            moved(scales, distances, expert, 1, 5, UNIT),
            moved(zeros, distances, expert, 2, 5, UNIT),
            moved(shared, distances, expert, 3, 5, UNIT),
            moved(bias, distances, expert, 4, 5, UNIT),
            out + first * out_features,
            parts + block * SPLITS * BLOCK_M * out_features,
            counters + block * tl.num_programs(0),
            rows,
            out_features,
            in_features,
            code_word,
            code_other,
            scale_n,
            scale_g,
            zero_word,
            zero_other,
            tl.load(numbers + expert * 2),
            LAYOUT,
            HAS_BIAS,
            DTYPE,
            DOT,
            BLOCK_M,
            BLOCK_K,
            BLOCK_J,
            STEPS,
            SPLITS,
        )


@triton.jit(do_not_specialize=["experts"])
def combine(
    outputs,
    weights,
    routed,
    places,
    result,
    experts,
    features,
    PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the weighted sums of the outputs of a token's experts, in the order of the pairs.

    Args:
        outputs: [pairs, features].
        weights: [tokens, PAIRS], float32 or `DTYPE`.
        routed: integers [tokens, PAIRS], the experts in rising order.
        places: int64 [tokens, PAIRS], rows of `outputs`.
        result: [tokens, features]; each product and each sum is rounded to `DTYPE`.
        experts: The number of experts; pairs outside are left out.
        features: Numbers of a row.
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for pair in tl.static_range(PAIRS):
        at = token * PAIRS + pair
        expert = tl.load(routed + at)
        mask = (n < features) & (expert >= 0) & (expert < experts)
        output = tl.load(outputs + tl.load(places + at) * features + n, mask=mask, other=0.0).to(tl.float32)
        weighted = rounded(output * tl.load(weights + at).to(tl.float32), DTYPE, tl.float32)
        total = tl.where(mask, rounded(total + weighted, DTYPE, tl.float32), total)
    tl.store(result + token * features + n, total.to(DTYPE), mask=n < features)
