// Products of few rows of bfloat16 activations and rows of 8-bit floats, by AVX-512's dot products of
// bfloat16. Codes are unpacked to registers and multiplied there. Included by bfloat16.h; uses its
// instructions, tables, and order of activations.

namespace {
namespace bfloat16_dots {

const int64_t MOST = 8;     // the most activation rows
const int64_t WIDTH = 32;   // output rows per part
// output rows per part for up to two activation rows, if there are enough parts; prefetches cross part
// borders
const int64_t LONG = 128;
// bytes of activations that stay in the first-level cache while a part's rows are read; four times as many
// for up to two activation rows
const int64_t PASSED = 16 << 10;
// the most output rows that are read together; for up to two activation rows, they are spread evenly over a
// part
const int64_t MOST_TOGETHER = 8;
// for up to two activation rows, bytes from the codes being read to those prefetched to the first-level cache
const int64_t NEAR = 512;
// the same for the second-level cache, rounded down to whole rows, but at least one row
const int64_t FAR = 4096;
const int64_t USUAL = 128;  // channels of the usual block, whose loop is unrolled
// output rows from the row being read to the row prefetched to the first-level cache, for 3 or more
// activation rows
const int64_t LATER = 2;

// Output rows per part. A part of LONG rows is used only if all of its rows share their scales, or none do.
int64_t part_width(const Layer &layer, int64_t rows, int threads) {
    const bool is_even =
        layer.block_out == 1 || layer.block_out % LONG == 0 || layer.block_out >= layer.out_features;
    return rows <= 2 && is_even && layer.out_features >= 4 * LONG * threads ? LONG : WIDTH;
}

bool reads(const Layer &layer) {
#if defined(HFQ_AMX)
    if (!bfloat16::has_bfloats() || (layer.kind != E4M3 && layer.kind != E5M2)) return false;
    return layer.block_in >= layer.in_features ||
           (layer.block_in % 64 == 0 &&
            bfloat16::row_groups(layer) * MOST_TOGETHER <= bfloat16::MOST_SCALES * bfloat16::PAIR);
#else
    return false;
#endif
}

#if defined(HFQ_AMX)
// Output rows that are read together, so that independent sums hide latency. For any number of activation
// rows, each has one sum, computed in the same order.
template <int ROWS> constexpr int TOGETHER = ROWS > 4 ? 1 : ROWS > 2 ? 2 : ROWS > 1 ? 4 : MOST_TOGETHER;

// Multiplies 64 codes by the activations of each of ROWS rows.
template <int KIND, int ROWS>
static HFQ_INLINE void dot(const bfloat16::Table<KIND> &table, __m512i codes, const char *x, __m512 *sums) {
    const __m512i low = _mm512_permutex2var_epi8(table.low[0], codes, table.low[1]);
    __m512i high = _mm512_permutex2var_epi8(table.high[0], codes, table.high[1]);
    high = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8((char)0x80), 0xF8);  // ORs the signs
    const __m512bh first = (__m512bh)_mm512_unpacklo_epi8(low, high),
                   second = (__m512bh)_mm512_unpackhi_epi8(low, high);
    HFQ_UNROLL
    for (int m = 0; m < ROWS; m++) {
        sums[m] = _mm512_dpbf16_ps(sums[m], first, (__m512bh)_mm512_loadu_si512(x + 128 * m));
        sums[m] = _mm512_dpbf16_ps(sums[m], second, (__m512bh)_mm512_loadu_si512(x + 128 * m + 64));
    }
}

// Multiplies the next up to 64 channels of OUT output rows, `pitch` bytes apart. `later` is the address to
// prefetch for the first row.
template <int KIND, int ROWS, int OUT>
static HFQ_INLINE void add_codes(const bfloat16::Table<KIND> &table, const char *codes, int64_t pitch,
                                 __mmask64 there, const char *later, const char *x, __m512 (*sums)[ROWS]) {
    if (ROWS <= 2) avx512::keep_place(codes), avx512::keep_place(later);
    HFQ_UNROLL
    for (int r = 0; r < OUT; r++) {
        const char *at = codes + r * pitch;
        if (ROWS > 2) __builtin_prefetch(later + r * pitch);
        else __builtin_prefetch(at + NEAR), __builtin_prefetch(later + r * pitch, 0, 2);
        __m512i word = _mm512_maskz_loadu_epi8(there, at);
        avx512::keep_here(word);  // otherwise, it is loaded three times
        dot<KIND, ROWS>(table, word, x, sums[r]);
    }
}

// Multiplies channels [k, last) of OUT output rows by ROWS activation rows. Output rows begin with n and are
// `spaced` rows apart; their scales are `apart` floats apart. If a group ends after `last`, its sums are kept
// unscaled. The number of channels per pass depends on the activation rows, and results must not.
template <int KIND, int ROWS, int OUT>
static void add_rows(const bfloat16::Job &job, const bfloat16::Table<KIND> &table, int64_t n, int64_t spaced,
                     int64_t k, int64_t last, const float *scales, int64_t apart, const char *ahead,
                     __m512 (*kept)[ROWS]) {
    const Layer &layer = *job.layer;
    const int64_t pitch = spaced * layer.row_nbytes;
    const char *codes = layer.codes + n * layer.row_nbytes, *x = job.x;
    const char *later =
        ROWS > 2 ? ahead
                 : codes + (spaced > 1 ? 1 : OUT) * most(FAR / layer.row_nbytes, 1) * layer.row_nbytes;
    const bool divides = job.divides, is_single = layer.block_in >= layer.in_features;
    __m512 totals[OUT][ROWS];
    HFQ_UNROLL
    for (int i = 0; i < OUT * ROWS; i++) totals[i / ROWS][i % ROWS] = kept[i / ROWS * spaced][i % ROWS];
    for (int64_t stop; k < last; k = stop, scales++) {
        stop = least(last, k + layer.block_in);
        __m512 sums[OUT][ROWS] = {};
        HFQ_UNROLL
        for (int i = 0; i < OUT * ROWS && is_single; i++)
            sums[i / ROWS][i % ROWS] = totals[i / ROWS][i % ROWS],
                               totals[i / ROWS][i % ROWS] = _mm512_setzero_ps();
        int64_t i = k;
        if (stop - k == USUAL) {
            add_codes<KIND, ROWS, OUT>(table, codes + k, pitch, ~0ull, later + k, x + 2 * ROWS * k, sums);
            add_codes<KIND, ROWS, OUT>(table, codes + k + 64, pitch, ~0ull, later + k + 64,
                                       x + 2 * ROWS * (k + 64), sums);
            i = stop;
        }
        for (; i < stop; i += 64) {
            const __mmask64 there = stop - i < 64 ? (1ull << (stop - i)) - 1 : ~0ull;
            add_codes<KIND, ROWS, OUT>(table, codes + i, pitch, there, later + i, x + 2 * ROWS * i, sums);
        }
        HFQ_UNROLL
        for (int i = 0; i < OUT * ROWS; i++) {
            const __m512 scale = _mm512_set1_ps(scales[i / ROWS * apart]), sum = sums[i / ROWS][i % ROWS];
            __m512 &total = totals[i / ROWS][i % ROWS];
            if (is_single && stop < layer.in_features) total = sum;
            else
                total = divides ? _mm512_add_ps(total, _mm512_div_ps(sum, scale))
                                : _mm512_fmadd_ps(sum, scale, total);
        }
    }
    HFQ_UNROLL
    for (int i = 0; i < OUT * ROWS; i++) kept[i / ROWS * spaced][i % ROWS] = totals[i / ROWS][i % ROWS];
}

// Channels per pass over the rows of a part: whole blocks.
template <int ROWS> static int64_t passed(const Layer &layer) {
    const int64_t room = ROWS > 2 ? PASSED : 4 * PASSED, whole = room / (2 * ROWS) / 64 * 64;
    if (2 * ROWS * layer.in_features <= room) return layer.in_features;
    return layer.block_in >= layer.in_features ? whole : most(whole / layer.block_in, 1) * layer.block_in;
}

template <int KIND, int ROWS>
static void part_of(const bfloat16::Job &job, int64_t first, int64_t width, bfloat16::TileScratch &work) {
    const Layer &layer = *job.layer;
    const bfloat16::Table<KIND> table(layer);
    const int64_t stop = first + width, groups = bfloat16::row_groups(layer), step = passed<ROWS>(layer);
    const int64_t together = TOGETHER<ROWS>, spaced = ROWS <= 2 ? width / together : 1,
                  fits = ROWS <= 2 ? first + spaced : stop - together + 1;
    const bool shared = first / layer.block_out == (stop - 1) / layer.block_out;
    __m512 (*totals)[ROWS] = (__m512 (*)[ROWS])work.totals;
    memset(work.totals, 0, sizeof(__m512) * ROWS * width);
    if (shared) bfloat16::find_row_scales(layer, first, work.scales);
    for (int64_t k = 0; k < layer.in_features; k += step)
        for (int64_t n = first; n < stop;) {
            const int64_t last = least(k + step, layer.in_features),
                          group = groups > 1 ? k / layer.block_in : 0, count = n < fits ? together : 1;
            for (int64_t r = 0; r < count && !shared; r++)
                bfloat16::find_row_scales(layer, n + r * spaced, work.scales + r * groups);
            const float *scales = work.scales + group;
            const char *ahead =
                layer.codes + (n + LATER < stop ? (n + LATER) * layer.row_nbytes
                                                : (n + LATER - width) * layer.row_nbytes + step);
            if (count > 1)
                add_rows<KIND, ROWS, TOGETHER<ROWS>>(job, table, n, spaced, k, last, scales,
                                                     shared ? 0 : groups, ahead, totals + (n - first));
            else add_rows<KIND, ROWS, 1>(job, table, n, 1, k, last, scales, 0, ahead, totals + (n - first));
            n += ROWS > 2 ? count : n + 1 == fits ? 1 + (together - 1) * spaced : 1;
        }
    for (int64_t n = first; n < stop; n++)
        for (int m = 0; m < ROWS; m++) {
            const uint16_t half = float_to_bfloat(_mm512_reduce_add_ps(totals[n - first][m]) *
                                                  job.factors[2 * m] * job.factors[2 * m + 1]);
            memcpy(job.y + 2 * (m * job.y_stride + n), &half, 2);
        }
}

typedef void (*Part)(const bfloat16::Job &, int64_t, int64_t, bfloat16::TileScratch &);
template <int KIND> const Part parts[MOST] = {part_of<KIND, 1>, part_of<KIND, 2>, part_of<KIND, 3>,
                                              part_of<KIND, 4>, part_of<KIND, 5>, part_of<KIND, 6>,
                                              part_of<KIND, 7>, part_of<KIND, 8>};
#endif

void part(const bfloat16::Job &job, int64_t first, int64_t width, float *scratch) {
#if defined(HFQ_AMX)
    (job.layer->kind == E4M3 ? parts<E4M3> : parts<E5M2>)[job.rows - 1](
        job, first, width, *(bfloat16::TileScratch *)scratch);
#endif
}

}  // namespace bfloat16_dots
}  // namespace
