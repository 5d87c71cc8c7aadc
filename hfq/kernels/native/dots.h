// Products of few rows of activations in bfloat16 with rows of floats of 8 bits, by AVX-512's dot products of bfloat16. Included by
// tiles.h, whose instructions, tables and order of activations it takes: codes are unpacked to registers and multiplied there.

namespace {
namespace dotted {

const int64_t MOST = 8;     // activation rows
const int64_t WIDTH = 32;   // output rows of a part
const int64_t TOGETHER = 2;  // output rows that are read side by side, with one activation row
const int64_t NEAR = 512;   // bytes of codes that are brought to the first cache before they are read
const int64_t FAR = 8192;   // and to the second

bool reads(const Layer &layer) {
    return tiled::has_bfloats() && (layer.kind == E4M3 || layer.kind == E5M2) && (layer.block_in >= layer.in_features || layer.block_in % 64 == 0);
}

#if defined(HFQ_AMX)
// 64 codes times as many activations of each of ROWS rows, which lie `wide` apart.
template <int KIND, int ROWS>
static HFQ_INLINE void dot(const tiled::Table<KIND> &table, const char *p, const char *x, int64_t wide, __m512 (*sums)[2]) {
    const __m512i codes = _mm512_loadu_si512(p), low = _mm512_permutex2var_epi8(table.low[0], codes, table.low[1]);
    __m512i high = _mm512_permutex2var_epi8(table.high[0], codes, table.high[1]);
    high = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8((char)0x80), 0xF8);  // or the codes' signs
    const __m512bh first = (__m512bh)_mm512_unpacklo_epi8(low, high), second = (__m512bh)_mm512_unpackhi_epi8(low, high);
    HFQ_UNROLL
    for (int m = 0; m < ROWS; m++) {
        sums[m][0] = _mm512_dpbf16_ps(sums[m][0], first, (__m512bh)_mm512_loadu_si512(x + m * wide));
        sums[m][1] = _mm512_dpbf16_ps(sums[m][1], second, (__m512bh)_mm512_loadu_si512(x + m * wide + 64));
    }
}

// OUT output rows times ROWS activation rows.
template <int KIND, int ROWS, int OUT> static void rows_of(const tiled::Job &job, const tiled::Table<KIND> &table, int64_t n, int64_t row) {
    const Layer &layer = *job.layer;
    const int64_t size = layer.in_features, wide = 2 * up(size, 64), pitch = layer.row_nbytes, far = FAR * OUT;
    const char *codes = layer.codes + n * pitch, *x = job.x + row * wide;
    __m512 totals[OUT][ROWS] = {};
    for (int64_t k = 0, stop, group = 0; k < size; k = stop, group++) {
        stop = least(size, k + layer.block_in);
        __m512 sums[OUT][ROWS][2] = {};
        int64_t i = k;
        for (; i + 64 <= stop; i += 64) {
            HFQ_UNROLL
            for (int r = 0; r < OUT; r++) {
                const char *at = codes + r * pitch + i;
                __builtin_prefetch(at + NEAR), __builtin_prefetch(at + far, 0, 2);
                dot<KIND, ROWS>(table, at, x + 2 * i, wide, sums[r]);
            }
        }
        for (int r = 0; r < OUT && i < stop; r++) {
            char rest[64];
            memset(rest, 0, sizeof(rest)), memcpy(rest, codes + r * pitch + i, stop - i);
            dot<KIND, ROWS>(table, rest, x + 2 * i, wide, sums[r]);
        }
        HFQ_UNROLL
        for (int r = 0; r < OUT; r++) {
            const int64_t place = scale_place(layer, n + r, group);
            const float scale = layer.scale_dtype == F32 ? as_float(load32(layer.scales + 4 * place)) : scale_at(layer, place);
            for (int m = 0; m < ROWS; m++) {
                const __m512 sum = _mm512_add_ps(sums[r][m][0], sums[r][m][1]), by = _mm512_set1_ps(scale);
                totals[r][m] = layer.divides ? _mm512_add_ps(totals[r][m], _mm512_div_ps(sum, by)) : _mm512_fmadd_ps(sum, by, totals[r][m]);
            }
        }
    }
    for (int r = 0; r < OUT; r++)
        for (int m = 0; m < ROWS; m++) {
            const float *factors = job.factors + 2 * (row + m);
            const uint16_t half = float_to_bfloat(_mm512_reduce_add_ps(totals[r][m]) * factors[0] * factors[1]);
            memcpy(job.y + 2 * ((row + m) * job.y_stride + n + r), &half, 2);
        }
}

template <int KIND> static void part_of(const tiled::Job &job, int64_t first, int64_t width) {
    const tiled::Table<KIND> table(*job.layer);
    const int64_t stop = first + width;
    int64_t n = first;
    for (; job.rows == 1 && n + TOGETHER <= stop; n += TOGETHER) rows_of<KIND, 1, TOGETHER>(job, table, n, 0);
    for (; n < stop; n++)
        for (int64_t row = 0; row < job.rows; row += 4) switch (job.rows - row) {
            case 1: rows_of<KIND, 1, 1>(job, table, n, row); break;
            case 2: rows_of<KIND, 2, 1>(job, table, n, row); break;
            case 3: rows_of<KIND, 3, 1>(job, table, n, row); break;
            default: rows_of<KIND, 4, 1>(job, table, n, row);
        }
}
#endif

void part(const tiled::Job &job, int64_t first, int64_t width) {
#if defined(HFQ_AMX)
    (job.layer->kind == E4M3 ? part_of<E4M3> : part_of<E5M2>)(job, first, width);
#endif
}

}  // namespace dotted
}  // namespace
