"""The device code of the Triton kernels, imported only if Triton is installed.

Triton's interpreter computes wrong products of bfloat16, truncates where it should round to bfloat16, and
reports neither (triton-lang/triton#4972, #11584). Factors therefore have the type `DOT`: the activations'
dtype on a device, float32 in the interpreter. With numpy 2.4 the interpreter cannot loop to a bound that is
not a constant, so all bounds here are constants. FP8 is decoded and encoded by integer operations, which
every device has.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["fp8_linear", "gptq_linear", "quantize_e4m3"]


@triton.jit
def _field(words, following, shift, BITS: tl.constexpr):
    """Extracts `BITS` bits from bit `shift` of unsigned words.

    A field may end in the following words.
    """
    fields = words >> shift
    if 32 % BITS != 0:
        fields = fields | (following << tl.where(shift + BITS > 32, 32 - shift, 0))
    return (fields & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def _rounded(values, DTYPE: tl.constexpr, DOT: tl.constexpr):
    """Rounds float32 values to `DTYPE` and returns them as `DOT`.

    In the interpreter, integer operations round, since its conversion to bfloat16 truncates.
    """
    if DTYPE == tl.bfloat16 and DOT == tl.float32:  # noqa: SIM300
        bits = values.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return values.to(DTYPE).to(DOT)


@triton.jit
def _words(pointers, mask):
    return tl.load(pointers, mask=mask, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _zero_points(
    qzeros, group, n, zero_words, mask, BITS: tl.constexpr, READING: tl.constexpr, ONES: tl.constexpr
):
    """Returns the zero points of (group, output) pairs; see `Gptq.zero_points`."""
    shift = (n * BITS) % 32
    places = qzeros + group * zero_words + (n * BITS) // 32
    words = _words(places, mask)
    if READING == "word_plus_one":
        words = words + ONES
    following = words
    if 32 % BITS != 0:
        following = _words(places + 1, mask & (shift + BITS > 32))
    zeros = _field(words, following, shift, BITS)
    if READING == "field_plus_one":
        zeros = zeros + 1
    if READING == "masked_plus_one":
        zeros = (zeros + 1) & ((1 << BITS) - 1)
    return zeros


@triton.jit
def gptq_linear(
    x,
    qweight,
    qzeros,
    scales,
    index,
    partial,
    rows,
    out_features,
    in_features,
    span,
    x_stride,
    zero_words,
    BITS: tl.constexpr,
    READING: tl.constexpr,
    ONES: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Computes one tile of one split of the sum over inputs.

    partial[split, m, n] is the sum of x[m, k] * W[n, k] over the k of the split.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(STEPS):
        k = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = (k < in_features)[:, None] & (n < out_features)[None, :]
        values = tl.load(
            x + m[:, None].to(tl.int64) * x_stride + k[None, :],
            mask=(m < rows)[:, None] & (k < in_features)[None, :],
            other=0.0,
        )
        shift = ((k * BITS) % 32)[:, None]
        places = qweight + ((k * BITS) // 32)[:, None].to(tl.int64) * out_features + n[None, :]
        words = _words(places, inside)
        following = words
        if 32 % BITS != 0:
            following = _words(places + out_features, inside & (shift + BITS > 32))
        codes = _field(words, following, shift, BITS)
        group = k // span
        if HAS_INDEX:
            group = tl.load(index + k, mask=k < in_features, other=0).to(tl.int32)
        zeros = _zero_points(qzeros, group[:, None], n[None, :], zero_words, inside, BITS, READING, ONES)
        steps = tl.load(scales + group[:, None] * out_features + n[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        weight = _rounded((codes - zeros).to(tl.float32) * steps, DTYPE, DOT)
        total = tl.dot(values.to(DOT), weight, total, input_precision="ieee")
    target = partial + (split * rows + m[:, None]).to(tl.int64) * out_features + n[None, :]
    tl.store(target, total, mask=(m < rows)[:, None] & (n < out_features)[None, :])


@triton.jit
def _decode(codes, IS_E4M3: tl.constexpr):
    """Returns FP8 codes (int8) as float32.

    An e4m3 code, shifted by seven bits, is a float16 of 1/256 of its value. An e5m2 code is the upper half of
    a float16.
    """
    bits = codes.to(tl.int16)
    if IS_E4M3:
        values = ((bits << 7) & -16385).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), values)
    return (bits << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _encode(values):
    """Rounds float32 within ±448 to e4m3 codes (int8), to nearest, ties to even."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # below 2**-6, codes are multiples of 2**-9; adding 2**14 rounds to such a multiple
    subnormal = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    codes = tl.where(magnitude < 0x3C800000, subnormal, normal)
    codes = tl.where(magnitude > 0x7F800000, 0x7F, codes)
    return (codes | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def quantize_e4m3(
    x,
    codes,
    scales,
    in_features,
    group_size,
    x_stride,
    upper_bound,
    HAS_BOUND: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Computes one scale and its codes in program (row, group)."""
    row, group = tl.program_id(0), tl.program_id(1)
    first, last = group * group_size, tl.minimum((group + 1) * group_size, in_features)
    amax = 0.0
    for step in range(STEPS):
        k = first + step * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + row.to(tl.int64) * x_stride + k, mask=k < last, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.max(tl.abs(values)))
    if HAS_BOUND:
        amax = tl.minimum(amax, upper_bound)
    scale = tl.where(amax == 0.0, 1.0, tl.div_rn(amax, 448.0))
    tl.store(scales + row * tl.num_programs(1) + group, scale)
    for step in range(STEPS):
        k = first + step * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + row.to(tl.int64) * x_stride + k, mask=k < last, other=0.0).to(tl.float32)
        scaled = tl.div_rn(values, tl.zeros_like(values) + scale)
        scaled = tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled))
        tl.store(codes + row.to(tl.int64) * in_features + k, _encode(scaled), mask=k < last)


@triton.jit
def _scale(pointers, mask, IS_POWER: tl.constexpr):
    """Returns scales as float32; a byte is the exponent of a power of two."""
    stored = tl.load(pointers, mask=mask, other=0)
    if IS_POWER:
        exponents = stored.to(tl.int32) & 0xFF
        return tl.where(exponents == 0, 0x00400000, exponents << 23).to(tl.float32, bitcast=True)
    return stored.to(tl.float32)


@triton.jit
def fp8_linear(
    x,
    x_scales,
    weight,
    scales,
    partial,
    rows,
    out_features,
    in_features,
    x_stride,
    x_group,
    x_groups,
    block_out,
    block_in,
    scale_stride,
    IS_QUANTIZED: tl.constexpr,
    IS_E4M3: tl.constexpr,
    IS_POWER: tl.constexpr,
    DIVIDES: tl.constexpr,
    DTYPE: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Computes the same tile as `gptq_linear`, for FP8 weights [out_features, in_features].

    Activations are floats, or codes with scales.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(STEPS):
        k = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        within = (m < rows)[:, None] & (k < in_features)[None, :]
        values = tl.load(x + m[:, None].to(tl.int64) * x_stride + k[None, :], mask=within, other=0)
        if IS_QUANTIZED:
            steps = tl.load(
                x_scales + m[:, None] * x_groups + (k // x_group)[None, :], mask=within, other=0.0
            )
            values = _rounded(_decode(values, True) * steps, DTYPE, DOT)
        inside = (k < in_features)[:, None] & (n < out_features)[None, :]
        codes = tl.load(weight + n[None, :].to(tl.int64) * in_features + k[:, None], mask=inside, other=0)
        places = scales + (n // block_out)[None, :].to(tl.int64) * scale_stride + (k // block_in)[:, None]
        steps = _scale(places, inside, IS_POWER)
        floats = _decode(codes, IS_E4M3)
        if DIVIDES:
            floats = tl.where(inside, tl.div_rn(floats, tl.where(inside, steps, 1.0)), 0.0)
        else:
            floats = floats * steps
        total = tl.dot(values.to(DOT), _rounded(floats, DTYPE, DOT), total, input_precision="ieee")
    target = partial + (split * rows + m[:, None]).to(tl.int64) * out_features + n[None, :]
    tl.store(target, total, mask=(m < rows)[:, None] & (n < out_features)[None, :])
