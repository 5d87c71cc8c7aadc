// Products of int8 and rounding to int8 by AVX-512's dot products of bytes (VNNI) and Intel's tiles (AMX), or
// their emulation. Included by int8.cpp, in its namespace.

// Tiles. Activations are packed once, as the right factor: [block of 16 rows][step of 64 channels][16 fours
// of channels][16 rows][4], with zeros beyond the last row and channel. The weight is the left factor, 16
// output features by 64 channels per tile, in its order in memory. Pieces of it (32 output features by 256 or
// 512 channels) are copied to scratch in the first-level cache. Tiles load faster from there, above all if
// rows of the weight do not begin with a cache line. A piece is then multiplied by pairs of blocks, with four
// tiles of sums.

// rows or output features per tile, output features per strip, and channels per step
const int64_t SIDE = 16, WIDTH = 2 * SIDE, STEP = 64;
// steps per piece, steps per piece for up to FEW_PAIRS pairs of blocks, and that number of pairs
const int64_t PIECE = 8, SHORT_PIECE = 4, FEW_PAIRS = 4;
// the most pairs of blocks, and strips of 32 output features, whose sums are kept together: 512 KB
const int64_t MOST_PAIRS = 16, MOST_STRIPS = 8;
// bytes of activations that stay in the second-level cache while the weight is read
const int64_t RESIDENT = 768 << 10;
// channels of a row that are rounded together before they are packed
const int64_t CHUNK = 256;

inline int64_t blocks_of(int64_t rows) { return (rows + SIDE - 1) / SIDE; }
inline int64_t steps_of(int64_t in_features) { return (in_features + STEP - 1) / STEP; }

// Dot products require an unsigned and a signed factor. Flipping the highest bits makes the weight's codes
// unsigned, and 128 times the sum of a row's codes is then subtracted from its sums. Activations are packed
// once, as [group of rows][step of 64 channels][rows of the group][64], with zeros beyond the last channel.
// The weight is read in place, at any alignment. Four output features are multiplied by each group of a pass,
// for chunks of channels that meanwhile stay in the first-level cache.

const int64_t FOUR = 4, GROUP = 6;   // output features, and the most rows, together: 24 vectors of sums
const int64_t CHUNK_STEPS = 96;      // the most steps per chunk
// bytes of a pass's activations in a chunk, which stay in the second-level cache
const int64_t PASS = 384 << 10;
// rows per pass; sums of 16 output features are kept, or of MOST_STRIPS times as many if there are chunks
const int64_t MOST_ROWS = 1024;
// bytes from the activations being read to those prefetched to the first-level cache
const int64_t ROWS_AHEAD = 3 << 10;

#if defined(HFQ_AMX)  // a compiler that supports AMX also supports the older sets
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))
#define UNROLLED_GROUP _Pragma("GCC unroll 6")
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

inline bool has_dots() { return cpu_features::found().vnni; }

inline bool has_tiles() {
    static const bool found = cpu_features::found().avx512 && amx::detect();
    return found;
}

AVX512 inline __mmask16 lanes(int64_t count) {
    return count < 16 ? (__mmask16)((1u << count) - 1) : (__mmask16)0xffff;
}

AVX512 void widen_avx512(const uint16_t *narrow, int64_t count, float *values) {
    int64_t k = 0;
    for (; k + 16 <= count; k += 16) {
        __m512i wide =
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(narrow + k))), 16);
        _mm512_storeu_si512(values + k, wide);
    }
    widen_plainly(narrow + k, count - k, values + k);
}

// Magnitudes of floats have the order of their bits, and NaN is above all.
AVX512 float amplitude_avx512(const float *values, int64_t count, float amax) {
    const __m512i unsign = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512();
    int64_t k = 0;
    for (; k + 16 <= count; k += 16)
        most = _mm512_max_epi32(most, _mm512_and_si512(unsign, _mm512_loadu_si512(values + k)));
    const int32_t bits = _mm512_reduce_max_epi32(most);
    float size;
    memcpy(&size, &bits, 4);
    if (size != size) return size;
    return amplitude_plainly(values + k, count - k, size > amax ? size : amax);
}

// Amplitude of bfloat16 values, two per word.
AVX512 float amplitude_of_bfloats(const uint16_t *values, int64_t count) {
    const __m512i unsign = _mm512_set1_epi16(0x7fff);
    __m512i most = _mm512_setzero_si512();
    int64_t k = 0;
    for (; k + 32 <= count; k += 32)
        most = _mm512_max_epi16(most, _mm512_and_si512(unsign, _mm512_loadu_si512(values + k)));
    const __m512i last = _mm512_maskz_loadu_epi16((__mmask32)((1ull << (count - k)) - 1), values + k);
    most = _mm512_max_epi16(most, _mm512_and_si512(unsign, last));
    most = _mm512_max_epi32(_mm512_srli_epi32(most, 16), _mm512_and_si512(most, _mm512_set1_epi32(0xffff)));
    return widened((uint16_t)_mm512_reduce_max_epi32(most));
}

// Multiplies by the scale's reciprocal, which is faster than a division. Below 128, the error is less than
// 2e-5. Values near a half are therefore divided. So are all values if the reciprocal might lose digits, and
// values that no integer represents. Packing clamps codes to int8's range.
AVX512 void round_avx512(const float *values, int64_t count, float scale, int16_t *codes) {
    const __m512 by = _mm512_set1_ps(scale), low = _mm512_set1_ps(-128), high = _mm512_set1_ps(127),
                 sure = _mm512_set1_ps(0.4999f);
    const __m512 inverse = _mm512_set1_ps(scale > 0x1p-100f && scale < 0x1p100f ? 1 / scale : NAN);
    int64_t k = 0;
    for (; k + 16 <= count; k += 16) {
        const __m512 given = _mm512_loadu_ps(values + k);
        __m512 code = _mm512_mul_ps(given, inverse);
        __m512i whole = _mm512_cvtps_epi32(code);
        if (_mm512_cmp_ps_mask(_mm512_abs_ps(_mm512_sub_ps(code, _mm512_cvtepi32_ps(whole))), sure,
                               _CMP_LT_OQ) != 0xffff) {
            code = _mm512_div_ps(given, by);
            code = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(code, code, _CMP_ORD_Q), code);
            whole = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(code, low), high));
        }
        _mm256_storeu_si256((__m256i *)(codes + k), _mm512_cvtsepi32_epi16(whole));
    }
    round_plainly(values + k, count - k, scale, codes + k);
}

AVX512 inline uint64_t bytes_of(int64_t channels) { return channels < STEP ? (1ull << channels) - 1 : ~0ull; }

// Returns one step of a row as bytes; zeros where bits of `here` are 0.
AVX512 inline __m512i step_of(const int16_t *codes, uint64_t here) {
    const bool is_whole = here == ~0ull;
    const __m512i low =
        is_whole ? _mm512_loadu_si512(codes) : _mm512_maskz_loadu_epi16((__mmask32)here, codes);
    const __m512i high = is_whole ? _mm512_loadu_si512(codes + 32)
                                  : _mm512_maskz_loadu_epi16((__mmask32)(here >> 32), codes + 32);
    const __m256i first = _mm512_cvtsepi16_epi8(low), second = _mm512_cvtsepi16_epi8(high);
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

// Packs one step of at most 16 rows to a tile.
AVX512 void pack(const int16_t *codes, int64_t pitch, int64_t rows, int64_t channels, int8_t *tile) {
    __m512i v[16];
    for (int m = 0; m < 16; m++)
        v[m] = step_of(codes + (m < rows ? m : 0) * pitch, m < rows ? bytes_of(channels) : 0);
    amx::transpose(v);
    for (int four = 0; four < 16; four++) _mm512_store_si512(tile + 64 * four, v[four]);
}

// Packs channels of a row to steps of a group, `pitch` bytes apart. Returns the sum of their codes.
VNNI int32_t pack_row(const int16_t *codes, int64_t channels, int8_t *to, int64_t pitch) {
    __m512i sums = _mm512_setzero_si512();
    for (int64_t k = 0; k < channels; k += STEP, to += pitch) {
        const __m512i step = step_of(codes + k, bytes_of(channels - k));
        _mm512_store_si512(to, step);
        sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), step);
    }
    return _mm512_reduce_add_epi32(sums);
}

VNNI inline __m128i sums_of_four(__m512i a, __m512i b, __m512i c, __m512i d) {
    a = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    c = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    a = _mm512_add_epi32(_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

template <int ROWS> using Sums = __m512i[ROWS][FOUR];

// Inline assembly: with the intrinsic, GCC 12 keeps some of many sums in memory.
#define DOT(sums, codes, values) __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(values))

// Multiplies one step of four output features.
template <int ROWS> VNNI inline __attribute__((always_inline)) void add_step(Sums<ROWS> &all, __m512i a,
                                                                             __m512i b, __m512i c, __m512i d,
                                                                             const int8_t *x) {
    const __m512i highest = _mm512_set1_epi8(-128);
    a = _mm512_xor_si512(a, highest), b = _mm512_xor_si512(b, highest), c = _mm512_xor_si512(c, highest),
    d = _mm512_xor_si512(d, highest);
    UNROLLED_GROUP for (int j = 0; j < ROWS; j++) {
        _mm_prefetch((const char *)x + j * STEP + ROWS_AHEAD, _MM_HINT_T0);
        const __m512i values = _mm512_load_si512(x + j * STEP);
        DOT(all[j][0], a, values);
        DOT(all[j][1], b, values);
        DOT(all[j][2], c, values);
        DOT(all[j][3], d, values);
    }
}

// Multiplies a chunk of four output features by a group of ROWS rows. Sums, of 16 features per row, are added
// to `sums`, or overwrite them in the first chunk. Meanwhile, prefetches rows from `ahead`, `pitch` bytes
// apart.
template <int ROWS> VNNI void multiply_dots(const int8_t *const *w, const int8_t *x, int64_t channels,
                                            bool is_first, int32_t *sums, const int8_t *ahead, int64_t pitch,
                                            int64_t lines) {
    Sums<ROWS> all;
    UNROLLED_GROUP for (int j = 0; j < ROWS; j++)
        UNROLLED_GROUP for (int i = 0; i < FOUR; i++) all[j][i] = _mm512_setzero_si512();
    const int8_t *a = w[0], *b = w[1], *c = w[2], *d = w[3];
    int64_t k = 0;
    for (; k + STEP <= channels; k += STEP, x += ROWS * STEP) {
        for (int64_t line = 0; line < lines; line++)
            _mm_prefetch((const char *)ahead + line * pitch + k, _MM_HINT_T1);
        add_step<ROWS>(all, _mm512_loadu_si512(a + k), _mm512_loadu_si512(b + k), _mm512_loadu_si512(c + k),
                       _mm512_loadu_si512(d + k), x);
    }
    if (k < channels) {
        const __mmask64 here = bytes_of(channels - k);
        add_step<ROWS>(all, _mm512_maskz_loadu_epi8(here, a + k), _mm512_maskz_loadu_epi8(here, b + k),
                       _mm512_maskz_loadu_epi8(here, c + k), _mm512_maskz_loadu_epi8(here, d + k), x);
    }
    UNROLLED_GROUP for (int j = 0; j < ROWS; j++) {
        __m128i *to = (__m128i *)(sums + j * SIDE);
        const __m128i four = sums_of_four(all[j][0], all[j][1], all[j][2], all[j][3]);
        _mm_store_si128(to, is_first ? four : _mm_add_epi32(_mm_load_si128(to), four));
    }
}

AVX512 inline __m256i narrowed(__m512 values) {
    __m512i bits = _mm512_castps_si512(values),
            odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)), 16);
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q),
                                 _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(bits);
}

// Scales and writes a row's sums of 16 output features, as `Scaling::put`; `steps` are the features' scales.
AVX512 inline void put_lanes(const MatmulArgs &args, const Scaling &scaling, __m512i sums, int64_t m,
                             int64_t n, __m512 steps, __mmask16 here) {
    const int64_t place = m * args.out_features + n;
    if (!scaling.y) return _mm512_mask_storeu_epi32(args.result + place, here, sums);
    const __m512 values =
        _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(scaling.scales[m])), steps);
    if (scaling.is_bfloat16) _mm256_mask_storeu_epi16((uint16_t *)scaling.y + place, here, narrowed(values));
    else _mm512_mask_storeu_ps((float *)scaling.y + place, here, values);
}

// Scales and writes the sums of 32 output features and 16 rows.
AVX512 void finish(const MatmulArgs &args, const Scaling &scaling, const int32_t (*sums)[SIDE * SIDE],
                   const float *steps, int64_t m, int64_t n) {
    __m512i v[2][16];
    for (int i = 0; i < 2; i++) {
        for (int row = 0; row < 16; row++) v[i][row] = _mm512_load_si512(sums[i] + 16 * row);
        amx::transpose(v[i]);
    }
    const int64_t count = args.out_features - n;
    const __mmask16 first = lanes(count), second = count > 16 ? lanes(count - 16) : (__mmask16)0;
    const __m512 one = _mm512_loadu_ps(steps), other = _mm512_loadu_ps(steps + 16);
    for (int64_t i = 0; i < SIDE && m + i < args.rows; i++) {
        put_lanes(args, scaling, v[0][i], m + i, n, one, first);
        put_lanes(args, scaling, v[1][i], m + i, n + 16, other, second);
    }
}

// The same for rows from `first` to `last` and at most 16 output features, from the sums of dot products.
AVX512 void finish_dots(const MatmulArgs &args, const Scaling &scaling, const int32_t *sums,
                        const float *steps, int64_t first, int64_t last, int64_t n, int64_t count) {
    const __m512 scales = _mm512_loadu_ps(steps);
    for (int64_t m = first; m < last; m++, sums += SIDE) {
        const __m512i row = _mm512_sub_epi32(_mm512_load_si512(sums), _mm512_set1_epi32(args.offsets[m]));
        put_lanes(args, scaling, row, m, n, scales, lanes(count));
    }
}

inline void fetch(const int8_t *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }
#else
#define AVX512

float amplitude_of_bfloats(const uint16_t *values, int64_t count) {
    float amax = 0, value;
    for (int64_t k = 0; k < count && amax == amax; k++)
        widen_plainly(values + k, 1, &value), amax = amplitude_plainly(&value, 1, amax);
    return amax;
}

inline bool has_dots() { return amx::detect(); }  // emulated
inline bool has_tiles() { return amx::detect(); }

void pack(const int16_t *codes, int64_t pitch, int64_t rows, int64_t channels, int8_t *tile) {
    memset(tile, 0, amx::TILE);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t k = 0; k < channels; k++)
            tile[k / 4 * 64 + 4 * m + k % 4] = (int8_t)codes[m * pitch + k];
}

int32_t pack_row(const int16_t *codes, int64_t channels, int8_t *to, int64_t pitch) {
    int32_t sum = 0;
    for (int64_t k = 0; k < steps_of(channels) * STEP; k++) {
        const int16_t code = k < channels ? codes[k] : 0;
        to[k / STEP * pitch + k % STEP] = (int8_t)code;
        sum += code;
    }
    return sum;
}

template <int ROWS> void multiply_dots(const int8_t *const *w, const int8_t *x, int64_t channels,
                                       bool is_first, int32_t *sums, const int8_t *ahead, int64_t pitch,
                                       int64_t lines) {
    for (int j = 0; j < ROWS; j++)
        for (int i = 0; i < FOUR; i++) {
            uint32_t sum = is_first ? 0 : sums[j * SIDE + i];
            for (int64_t k = 0; k < channels; k++)
                sum += (w[i][k] + 128) * x[k / STEP * ROWS * STEP + j * STEP + k % STEP];
            sums[j * SIDE + i] = (int32_t)sum;
        }
}

void finish(const MatmulArgs &args, const Scaling &scaling, const int32_t (*sums)[SIDE * SIDE],
            const float *steps, int64_t m, int64_t n) {
    for (int64_t j = 0; j < SIDE && m + j < args.rows; j++)
        for (int64_t i = 0; i < WIDTH && n + i < args.out_features; i++)
            scaling.put(args, (m + j) * args.out_features + n + i, sums[i / SIDE][i % SIDE * SIDE + j], m + j,
                        steps[i]);
}

void finish_dots(const MatmulArgs &args, const Scaling &scaling, const int32_t *sums, const float *steps,
                 int64_t first, int64_t last, int64_t n, int64_t count) {
    for (int64_t m = first; m < last; m++, sums += SIDE)
        for (int64_t i = 0; i < count; i++) {
            const int32_t sum = (int32_t)((uint32_t)sums[i] - (uint32_t)args.offsets[m]);
            scaling.put(args, m * args.out_features + n + i, sum, m, steps[i]);
        }
}

inline void fetch(const int8_t *) {}
#endif
