// Products of few rows of bfloat16 activations and rows of ggml's blocks, by AVX-512's dot products of
// bfloat16. Included by bfloat16.h; uses its instructions, tables, and packed activations.
//
// Codes convert to bfloat16 without loss. The sum of a part of 32 channels is multiplied by its scale, and
// parts are added, in float32. A row's result does not depend on the other rows.

namespace {
namespace block_dots {

const int64_t MOST = 8;        // the most activation rows
const int64_t WIDTH = 64;      // output rows per part
const int64_t LONG = 128;      // output rows per part if there are enough parts
const int64_t NEAR = 1024;     // bytes from the blocks being read to those prefetched

int64_t part_width(const Layer &layer, int threads) {
    return layer.out_features >= 4 * LONG * threads ? LONG : WIDTH;
}

// True if a number of rows is multiplied here. A single row of Q8_0 takes longer than in float32.
bool reads(const Layer &layer, int64_t rows) {
#if defined(HFQ_AMX)
    if (!bfloat16::has_parts(layer) || rows > MOST) return false;
    return bfloat16::has_bfloats() && (rows > 1 || layer.block_type != Q8_0);
#else
    return false;
#endif
}

#if defined(HFQ_AMX)
using avx512::Block;
using bfloat16::has_least;
using bfloat16::Values;

// Returns the factors of the sums of part `part`. `scales` are those of `scales_of` in memory.
template <int TYPE> static HFQ_INLINE __m512 factors_of(const float *scales, int part) {
    if constexpr (TYPE == Q6_K)
        return _mm512_mask_mov_ps(_mm512_set1_ps(scales[2 * part]), 0xFF00,
                                  _mm512_set1_ps(scales[2 * part + 1]));
    return _mm512_set1_ps(scales[part]);
}

// Output rows that are multiplied together, so that independent sums hide latency.
template <int ROWS> constexpr int TOGETHER = ROWS == 1 ? 4 : ROWS <= 3 ? 2 : 1;

// Multiplies a block of each of OUT output rows, at `p`, by the activations at `x` of ROWS rows, which begin
// with part `turn` of 64 channels. `sums` has per row, and per 256 channels, eight zeros and the negative
// sums of eight parts.
template <int TYPE, int ROWS, int OUT>
static HFQ_INLINE void dot_blocks(const Values<TYPE> &values, const char *const *p, int64_t offset,
                                  const char *x, int turn, const float *sums, int64_t pitch,
                                  __m512 (*totals)[ROWS]) {
    typedef Block<TYPE> Of;
    alignas(64) float scales[OUT][16];
    HFQ_UNROLL
    for (int r = 0; r < OUT; r++) {
        const __m512 found = bfloat16::scales_of<TYPE>(p[r] + offset);
        _mm512_store_ps(scales[r], found);
        if constexpr (has_least<TYPE>())
            HFQ_UNROLL
            for (int m = 0; m < ROWS; m++)
                totals[r][m] = _mm512_fmadd_ps(found, _mm512_loadu_ps(sums + m * pitch), totals[r][m]);
    }
    avx512::keep_in_memory(scales);
    HFQ_UNROLL
    for (int r = 0; r < OUT; r++) {
        const char *at = p[r] + offset;
        HFQ_UNROLL
        for (int part = 0; part < Of::SIZE / 32; part++) {
            const __m512bh codes = bfloat16::take<TYPE>(values, at, part);
            const __m512 by = factors_of<TYPE>(scales[r], part);
            const char *row = x + ((part + turn) / 2 * ROWS * 2 + (part + turn) % 2) * 64;
            HFQ_UNROLL
            for (int m = 0; m < ROWS; m++) {
                const __m512 piece = _mm512_dpbf16_ps(_mm512_setzero_ps(), codes,
                                                      (__m512bh)_mm512_loadu_si512(row + 128 * m));
                totals[r][m] = _mm512_fmadd_ps(piece, by, totals[r][m]);
            }
        }
    }
}

// Multiplies OUT output rows, `spaced` rows apart, by ROWS activation rows.
template <int TYPE, int ROWS, int OUT>
static HFQ_INLINE void dot_rows(const bfloat16::Job &job, const Values<TYPE> &values, int64_t n,
                                int64_t spaced) {
    typedef Block<TYPE> Of;
    const Layer &layer = *job.layer;
    const int64_t size = layer.in_features, pitch = size / 16;
    const char *p[OUT], *x = job.x;
    for (int r = 0; r < OUT; r++) p[r] = avx512::row_of_blocks(layer, n + r * spaced);
    const float *sums = job.sums;
    __m512 totals[OUT][ROWS] = {};
    int64_t offset = 0, k = 0;
    const int64_t step = Of::SIZE == 32 ? 64 : 256, stop = size / step * step;
    const int64_t nbytes = step / Of::SIZE * Of::NBYTES;
    for (; k < stop; k += step, x += step / 64 * ROWS * 128, sums += 16, offset += nbytes) {
        HFQ_UNROLL
        for (int r = 0; r < OUT; r++)
            for (int64_t line = 0; line < nbytes; line += 64)
                __builtin_prefetch(p[r] + offset + NEAR + line);
        HFQ_UNROLL
        for (int turn = 0; turn < step / Of::SIZE; turn++)
            dot_blocks<TYPE, ROWS, OUT>(values, p, offset + turn * Of::NBYTES, x, turn, sums, pitch, totals);
    }
    if constexpr (Of::SIZE == 32)
        if (k < size) dot_blocks<TYPE, ROWS, OUT>(values, p, offset, x, 0, sums, pitch, totals);
    HFQ_UNROLL
    for (int r = 0; r < OUT; r++)
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++) {
            const float sum = _mm512_reduce_add_ps(totals[r][m]);
            const uint16_t half = float_to_bfloat(sum * job.factors[2 * m] * job.factors[2 * m + 1]);
            memcpy(job.y + 2 * (m * job.y_stride + n + r * spaced), &half, 2);
        }
}

template <int TYPE, int ROWS>
static void part_of(const bfloat16::Job &job, int64_t first, int64_t width) {
    const Values<TYPE> values;
    const int64_t spaced = width / TOGETHER<ROWS>;
    for (int64_t n = first; n < first + spaced; n++)
        dot_rows<TYPE, ROWS, TOGETHER<ROWS>>(job, values, n, spaced);
    for (int64_t n = first + spaced * TOGETHER<ROWS>; n < first + width; n++)
        dot_rows<TYPE, ROWS, 1>(job, values, n, 1);
}

typedef void (*Part)(const bfloat16::Job &, int64_t, int64_t);
template <int TYPE> static Part part_for(int64_t rows) {
    static const Part parts[MOST] = {part_of<TYPE, 1>, part_of<TYPE, 2>, part_of<TYPE, 3>, part_of<TYPE, 4>,
                                     part_of<TYPE, 5>, part_of<TYPE, 6>, part_of<TYPE, 7>, part_of<TYPE, 8>};
    return parts[rows - 1];
}
static Part part_for(const bfloat16::Job &job) {
    switch (job.layer->block_type) {
        case Q4_0: return part_for<Q4_0>(job.rows);
        case Q5_0: return part_for<Q5_0>(job.rows);
        case Q8_0: return part_for<Q8_0>(job.rows);
        case Q4_K: return part_for<Q4_K>(job.rows);
        case Q5_K: return part_for<Q5_K>(job.rows);
        case Q6_K: return part_for<Q6_K>(job.rows);
        case IQ4_NL: return part_for<IQ4_NL>(job.rows);
        case IQ4_XS: return part_for<IQ4_XS>(job.rows);
        default: return part_for<MXFP4>(job.rows);
    }
}
#endif

void part(const bfloat16::Job &job, int64_t first, int64_t width) {
#if defined(HFQ_AMX)
    part_for(job)(job, first, width);
#endif
}

}  // namespace block_dots
}  // namespace
