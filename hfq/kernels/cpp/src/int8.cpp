// Integer products of int8 activations by an int8 weight that lies as nn.Linear has it; a plain C interface, loaded by ctypes.
//
// AVX2 without VNNI has one exact way: codes are widened to 16 bits and multiplied in pairs into 32 (vpmaddwd). The shorter way by 8 bits
// (vpmaddubsw) saturates at 16. Dot products of bytes (AVX-512 VNNI) and Intel's tiles (AMX) sum in 32 bits; where they are, they take every
// product. Sums are exact for fewer than 2**17 inputs, so that neither order nor threads matter.

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "amx_tiles.h"

namespace {

struct Call {
    const int8_t *weight;
    const int16_t *activations;
    int32_t *result;
    int64_t rows, in_features, out_features;
    int8_t *packed = nullptr;    // where there are dot products or tiles: the activations' codes for them,
    int32_t *sums = nullptr;     // room for each thread's sums,
    int32_t *offsets = nullptr;  // and for dot products what is too much in the sums of each row
};

void multiply_plainly(const Call &call, int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n++)
        for (int64_t m = 0; m < call.rows; m++) {
            const int8_t *w = call.weight + n * call.in_features;
            const int16_t *x = call.activations + m * call.in_features;
            int32_t sum = 0;
            for (int64_t k = 0; k < call.in_features; k++) sum += (int32_t)w[k] * x[k];
            call.result[m * call.out_features + n] = sum;
        }
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
#define UNROLLED _Pragma("GCC unroll 4")

const int64_t AHEAD = 4096;  // bytes of codes that are asked for before they are read: the next page

AVX2 inline int32_t sum_of(__m256i lanes) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1)));
}

// OUT rows of the weight by ROWS rows of activations: each vector of codes is widened once
template <int OUT, int ROWS>
AVX2 inline void tile(const Call &call, int64_t n, int64_t m) {
    const int64_t in = call.in_features;
    const int8_t *w = call.weight + n * in;
    const int16_t *x = call.activations + m * in;
    __m256i sums[OUT][ROWS];
    UNROLLED for (int i = 0; i < OUT; i++)
        UNROLLED for (int j = 0; j < ROWS; j++) sums[i][j] = _mm256_setzero_si256();
    int64_t k = 0;
    for (; k + 16 <= in; k += 16) {
        __m256i wide[OUT];
        UNROLLED for (int i = 0; i < OUT; i++) wide[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + i * in + k)));
        UNROLLED for (int j = 0; j < ROWS; j++) {
            __m256i values = _mm256_loadu_si256((const __m256i *)(x + j * in + k));
            UNROLLED for (int i = 0; i < OUT; i++) sums[i][j] = _mm256_add_epi32(sums[i][j], _mm256_madd_epi16(wide[i], values));
        }
    }
    UNROLLED for (int i = 0; i < OUT; i++)
        UNROLLED for (int j = 0; j < ROWS; j++) {
            int32_t sum = sum_of(sums[i][j]);
            for (int64_t rest = k; rest < in; rest++) sum += (int32_t)w[i * in + rest] * x[j * in + rest];
            call.result[(m + j) * call.out_features + n + i] = sum;
        }
}

// one row: sums in four vectors, so that additions do not wait for each other
AVX2 inline void row(const Call &call, int64_t n, int64_t m) {
    const int64_t in = call.in_features;
    const int8_t *w = call.weight + n * in;
    const int16_t *x = call.activations + m * in;
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    int64_t k = 0;
    for (; k + 64 <= in; k += 64) {
        __builtin_prefetch(w + k + AHEAD);
        UNROLLED for (int i = 0; i < 4; i++) {
            __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + k + 16 * i)));
            __m256i values = _mm256_loadu_si256((const __m256i *)(x + k + 16 * i));
            sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(wide, values));
        }
    }
    int32_t sum = sum_of(_mm256_add_epi32(_mm256_add_epi32(sums[0], sums[1]), _mm256_add_epi32(sums[2], sums[3])));
    for (; k < in; k++) sum += (int32_t)w[k] * x[k];
    call.result[m * call.out_features + n] = sum;
}

AVX2 void multiply_rows(const Call &call, int64_t first, int64_t last, int64_t from, int64_t to) {
    int64_t n = first;
    for (; to - from > 1 && n + 2 <= last; n += 2) {
        int64_t m = from;
        for (; m + 4 <= to; m += 4) tile<2, 4>(call, n, m);
        for (; m + 2 <= to; m += 2) tile<2, 2>(call, n, m);
        for (; m < to; m++) tile<2, 1>(call, n, m);
    }
    for (; n < last; n++)
        for (int64_t m = from; m < to; m++) row(call, n, m);
}

// so many activations at once that they stay in the second cache while the weight passes by
AVX2 void multiply_avx2(const Call &call, int64_t first, int64_t last) {
    int64_t step = (128 << 10) / call.in_features / 4 * 4;
    if (step < 4) step = 4;
    for (int64_t from = 0; from < call.rows; from += step)
        multiply_rows(call, first, last, from, from + step < call.rows ? from + step : call.rows);
}
#endif

inline float widened(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

inline float from_half(uint16_t half) {
    uint32_t bits = (half & 0x7fffu) << 13 | ((half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0);
    float value;
    memcpy(&value, &bits, 4);
    return (half & 0x8000 ? -value : value) * 0x1p112f;  // the exponent's offset
}

inline uint16_t narrowed(float value) {  // to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void widen_plainly(const uint16_t *narrow, int64_t count, float *values) {
    for (int64_t k = 0; k < count; k++) values[k] = widened(narrow[k]);
}

// The amplitude of a row, not a number where one of its values is not.
float amplitude_plainly(const float *values, int64_t count, float amax) {
    for (int64_t k = 0; k < count; k++) {
        float size = fabsf(values[k]);
        if (!(size <= amax)) amax = size;
        if (size != size) return size;
    }
    return amax;
}

void round_plainly(const float *values, int64_t count, float scale, int16_t *codes) {
    for (int64_t k = 0; k < count; k++) {
        float code = nearbyintf(values[k] / scale);
        codes[k] = code != code ? 0 : (int16_t)(code < -128 ? -128 : code > 127 ? 127 : code);
    }
}

#if defined(__x86_64__)
AVX2 float amplitude_avx2(const float *values, int64_t count, float amax) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 most = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + 8 <= count; k += 8) {
        __m256 size = _mm256_andnot_ps(sign, _mm256_loadu_ps(values + k));
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(size, size, _CMP_UNORD_Q));
        most = _mm256_max_ps(most, size);
    }
    if (_mm256_movemask_ps(odd)) return NAN;
    float lanes[8];
    _mm256_storeu_ps(lanes, most);
    for (float lane : lanes) amax = lane > amax ? lane : amax;
    return amplitude_plainly(values + k, count - k, amax);
}

AVX2 void widen_avx2(const uint16_t *narrow, int64_t count, float *values) {
    int64_t k = 0;
    for (; k + 8 <= count; k += 8) {
        __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(narrow + k))), 16);
        _mm256_storeu_ps(values + k, _mm256_castsi256_ps(wide));
    }
    widen_plainly(narrow + k, count - k, values + k);
}

AVX2 void round_avx2(const float *values, int64_t count, float scale, int16_t *codes) {
    const __m256 by = _mm256_set1_ps(scale), low = _mm256_set1_ps(-128), high = _mm256_set1_ps(127);
    int64_t k = 0;
    for (; k + 8 <= count; k += 8) {
        __m256 code = _mm256_div_ps(_mm256_loadu_ps(values + k), by);
        code = _mm256_and_ps(_mm256_round_ps(code, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_cmp_ps(code, code, _CMP_ORD_Q));
        __m256i whole = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(code, low), high));
        __m256i narrow = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole, whole), 0x08);
        _mm_storeu_si128((__m128i *)(codes + k), _mm256_castsi256_si128(narrow));
    }
    round_plainly(values + k, count - k, scale, codes + k);
}
#endif

// What a caller keeps from call to call: codes and scales of its activations, and sums.
thread_local std::vector<int32_t> kept;

enum class Engine { plain, avx2, dots, tiles };

struct Level {
    Engine engine;
    void (*multiply)(const Call &call, int64_t first, int64_t last);
    float (*amplitude)(const float *values, int64_t count, float amax);
    void (*round)(const float *values, int64_t count, float scale, int16_t *codes);
    void (*widen)(const uint16_t *narrow, int64_t count, float *values);
};

// What becomes of the sums: y[m, n] = sum * scales[m] * (steps[n] * multiplier), float32 or bfloat16; nothing where y is null.
struct Scaling {
    const float *scales;
    const char *steps;  // float32, bfloat16 or float16, by `steps_dtype`, of any alignment
    int64_t steps_count;
    int steps_dtype;
    float multiplier;
    char *y;
    int is_bfloat16;

    float step(int64_t n) const {
        const char *at = steps + (steps_count == 1 ? 0 : n) * (steps_dtype ? 2 : 4);
        uint16_t narrow;
        float value;
        if (steps_dtype) memcpy(&narrow, at, 2), value = steps_dtype == 1 ? widened(narrow) : from_half(narrow);
        else memcpy(&value, at, 4);
        return value * multiplier;
    }

    void put(const Call &call, int64_t place, int32_t sum, int64_t m, float step) const {
        if (!y) {
            call.result[place] = sum;
            return;
        }
        const float value = (float)sum * scales[m] * step;
        if (is_bfloat16) ((uint16_t *)y)[place] = narrowed(value);
        else ((float *)y)[place] = value;
    }

    void apply(const Call &call, int64_t first, int64_t last) const {
        if (!y) return;
        for (int64_t m = 0; m < call.rows; m++)
            for (int64_t n = first; n < last; n++) {
                const int64_t place = m * call.out_features + n;
                put(call, place, call.result[place], m, step(n));
            }
    }
};

// Rows of activations: float32 or bfloat16, `stride` apart.
struct Rows {
    const char *x;
    int64_t stride;
    int is_bfloat16;
    int64_t in_features;
    float top, bound;

    // `count` values of a row as float32, in `wide` where they are not.
    const float *values(const Level &level, int64_t m, int64_t k, int64_t count, float *wide) const {
        if (!is_bfloat16) return (const float *)x + m * stride + k;
        level.widen((const uint16_t *)x + m * stride + k, count, wide);
        return wide;
    }

    float scale(float amax) const {
        if (amax > bound) amax = bound;
        return amax == 0 ? 1 : amax / top;
    }
};

// Rows as codes, under a scale for each.
void round_rows(const Level &level, const Rows &given, int64_t rows, float *wide, float *scales, int16_t *codes) {
    KeptSubnormals here;
    for (int64_t m = 0; m < rows; m++) {
        const float *values = given.values(level, m, 0, given.in_features, wide);
        scales[m] = given.scale(level.amplitude(values, given.in_features, 0.0f));
        level.round(values, given.in_features, scales[m], codes + m * given.in_features);
    }
}

// Tiles. Activations are packed once, as the right operand: [block of 16 rows][step of 64 channels][16 fours of channels][16 rows][4], with
// zeros beyond the last row and channel. The weight is the left one, 16 output features by 64 channels, and needs no other order. Pieces of it
// (32 output features by 256 or 512 channels) are copied into the first cache, since a tile is loaded from there in half the time, and in a sixth
// where its rows do not begin with a line; then they pass by pairs of blocks, four tiles of sums at a time.

const int64_t SIDE = 16, WIDTH = 2 * SIDE, STEP = 64;
const int64_t PIECE = 8, SHORT_PIECE = 4, FEW_PAIRS = 4;  // steps of a piece, and of one that few pairs of blocks are multiplied by
const int64_t MOST_PAIRS = 16, MOST_STRIPS = 8;           // of blocks of rows, and of 32 output features, whose sums are kept at once: 512 KB
const int64_t RESIDENT = 768 << 10;                       // bytes of activations that stay in the second cache while the weight passes by
const int64_t CHUNK = 256;                                // channels of a row that are rounded before they are packed

inline int64_t blocks_of(int64_t rows) { return (rows + SIDE - 1) / SIDE; }
inline int64_t steps_of(int64_t in_features) { return (in_features + STEP - 1) / STEP; }

// Dot products take an unsigned factor and a signed one: the weight's codes are made unsigned by their highest bits, and 128 times the sum of a
// row's codes comes off its sums. Activations are packed once, as [group of rows][step of 64 channels][rows of the group][64], with zeros beyond
// the last channel. The weight is read as it lies, from any address, four output features at a time by each group of a pass, by chunks of channels
// that stay in the first cache meanwhile.

const int64_t FOUR = 4, GROUP = 6;   // output features and, at most, rows: 24 vectors of sums
const int64_t CHUNK_STEPS = 96;      // of a chunk, at most
const int64_t PASS = 384 << 10;      // bytes of a pass's activations in a chunk, which stay in the second cache
const int64_t MOST_ROWS = 1024;      // of a pass, whose sums by 16 output features are kept, or by MOST_STRIPS times as many if there are chunks
const int64_t ROWS_AHEAD = 3 << 10;  // bytes of activations that are fetched to the first cache before they are read

#if defined(HFQ_AMX)  // so a compiler knows what is older as well
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))
#define UNROLLED_GROUP _Pragma("GCC unroll 6")
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

inline bool has_dots() { return processor::found().vnni; }

inline bool has_tiles() {
    static const bool found = processor::found().avx512 && amx::detect();
    return found;
}

AVX512 inline __mmask16 lanes(int64_t count) { return count < 16 ? (__mmask16)((1u << count) - 1) : (__mmask16)0xffff; }

AVX512 void widen_avx512(const uint16_t *narrow, int64_t count, float *values) {
    int64_t k = 0;
    for (; k + 16 <= count; k += 16) {
        __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(narrow + k))), 16);
        _mm512_storeu_si512(values + k, wide);
    }
    widen_plainly(narrow + k, count - k, values + k);
}

// Sizes of floats are in the order of their bits, and what is not a number is above all.
AVX512 float amplitude_avx512(const float *values, int64_t count, float amax) {
    const __m512i unsign = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512();
    int64_t k = 0;
    for (; k + 16 <= count; k += 16) most = _mm512_max_epi32(most, _mm512_and_si512(unsign, _mm512_loadu_si512(values + k)));
    const int32_t bits = _mm512_reduce_max_epi32(most);
    float size;
    memcpy(&size, &bits, 4);
    if (size != size) return size;
    return amplitude_plainly(values + k, count - k, size > amax ? size : amax);
}

// Of bfloat16: two in each word.
AVX512 float amplitude_of_bfloats(const uint16_t *values, int64_t count) {
    const __m512i unsign = _mm512_set1_epi16(0x7fff);
    __m512i most = _mm512_setzero_si512();
    int64_t k = 0;
    for (; k + 32 <= count; k += 32) most = _mm512_max_epi16(most, _mm512_and_si512(unsign, _mm512_loadu_si512(values + k)));
    const __m512i last = _mm512_maskz_loadu_epi16((__mmask32)((1ull << (count - k)) - 1), values + k);
    most = _mm512_max_epi16(most, _mm512_and_si512(unsign, last));
    most = _mm512_max_epi32(_mm512_srli_epi32(most, 16), _mm512_and_si512(most, _mm512_set1_epi32(0xffff)));
    return widened((uint16_t)_mm512_reduce_max_epi32(most));
}

// By the scale's reciprocal, which takes a fraction of the time: within 128 that is less than 2e-5 off. What comes near a half is divided,
// and so is everything where the reciprocal might lose digits, and what no integer holds. Codes beyond int8's range become its ends when they are
// packed.
AVX512 void round_avx512(const float *values, int64_t count, float scale, int16_t *codes) {
    const __m512 by = _mm512_set1_ps(scale), low = _mm512_set1_ps(-128), high = _mm512_set1_ps(127), sure = _mm512_set1_ps(0.4999f);
    const __m512 inverse = _mm512_set1_ps(scale > 0x1p-100f && scale < 0x1p100f ? 1 / scale : NAN);
    int64_t k = 0;
    for (; k + 16 <= count; k += 16) {
        const __m512 given = _mm512_loadu_ps(values + k);
        __m512 code = _mm512_mul_ps(given, inverse);
        __m512i whole = _mm512_cvtps_epi32(code);
        if (_mm512_cmp_ps_mask(_mm512_abs_ps(_mm512_sub_ps(code, _mm512_cvtepi32_ps(whole))), sure, _CMP_LT_OQ) != 0xffff) {
            code = _mm512_div_ps(given, by);
            code = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(code, code, _CMP_ORD_Q), code);
            whole = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(code, low), high));
        }
        _mm256_storeu_si256((__m256i *)(codes + k), _mm512_cvtsepi32_epi16(whole));
    }
    round_plainly(values + k, count - k, scale, codes + k);
}

AVX512 inline uint64_t bytes_of(int64_t channels) { return channels < STEP ? (1ull << channels) - 1 : ~0ull; }

// One step of a row as bytes; zeros where `here` has none.
AVX512 inline __m512i step_of(const int16_t *codes, uint64_t here) {
    const bool is_whole = here == ~0ull;
    const __m512i low = is_whole ? _mm512_loadu_si512(codes) : _mm512_maskz_loadu_epi16((__mmask32)here, codes);
    const __m512i high = is_whole ? _mm512_loadu_si512(codes + 32) : _mm512_maskz_loadu_epi16((__mmask32)(here >> 32), codes + 32);
    const __m256i first = _mm512_cvtsepi16_epi8(low), second = _mm512_cvtsepi16_epi8(high);
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

// One step of at most 16 rows, as a tile.
AVX512 void pack(const int16_t *codes, int64_t pitch, int64_t rows, int64_t channels, int8_t *tile) {
    __m512i v[16];
    for (int m = 0; m < 16; m++) v[m] = step_of(codes + (m < rows ? m : 0) * pitch, m < rows ? bytes_of(channels) : 0);
    amx::transpose(v);
    for (int four = 0; four < 16; four++) _mm512_store_si512(tile + 64 * four, v[four]);
}

// Channels of a row as steps of a group's, `pitch` bytes apart. Gives the sum of their codes.
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

// Not the intrinsic: of many sums GCC 12 then keeps some in memory.
#define DOT(sums, codes, values) __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(values))

// One step of four output features.
template <int ROWS>
VNNI inline __attribute__((always_inline)) void add_step(Sums<ROWS> &all, __m512i a, __m512i b, __m512i c, __m512i d, const int8_t *x) {
    const __m512i highest = _mm512_set1_epi8(-128);
    a = _mm512_xor_si512(a, highest), b = _mm512_xor_si512(b, highest), c = _mm512_xor_si512(c, highest), d = _mm512_xor_si512(d, highest);
    UNROLLED_GROUP for (int j = 0; j < ROWS; j++) {
        _mm_prefetch((const char *)x + j * STEP + ROWS_AHEAD, _MM_HINT_T0);
        const __m512i values = _mm512_load_si512(x + j * STEP);
        DOT(all[j][0], a, values);
        DOT(all[j][1], b, values);
        DOT(all[j][2], c, values);
        DOT(all[j][3], d, values);
    }
}

// A chunk of four output features by a group of ROWS rows; sums, of 16 features for each row, are added to `sums` unless these are the first.
// Meanwhile rows `ahead`, `pitch` bytes apart, are fetched.
template <int ROWS>
VNNI void multiply_dots(
    const int8_t *const *w, const int8_t *x, int64_t channels, bool is_first, int32_t *sums, const int8_t *ahead, int64_t pitch, int64_t lines) {
    Sums<ROWS> all;
    UNROLLED_GROUP for (int j = 0; j < ROWS; j++)
        UNROLLED_GROUP for (int i = 0; i < FOUR; i++) all[j][i] = _mm512_setzero_si512();
    const int8_t *a = w[0], *b = w[1], *c = w[2], *d = w[3];
    int64_t k = 0;
    for (; k + STEP <= channels; k += STEP, x += ROWS * STEP) {
        for (int64_t line = 0; line < lines; line++) _mm_prefetch((const char *)ahead + line * pitch + k, _MM_HINT_T1);
        add_step<ROWS>(
            all, _mm512_loadu_si512(a + k), _mm512_loadu_si512(b + k), _mm512_loadu_si512(c + k), _mm512_loadu_si512(d + k), x);
    }
    if (k < channels) {
        const __mmask64 here = bytes_of(channels - k);
        add_step<ROWS>(
            all, _mm512_maskz_loadu_epi8(here, a + k), _mm512_maskz_loadu_epi8(here, b + k), _mm512_maskz_loadu_epi8(here, c + k),
            _mm512_maskz_loadu_epi8(here, d + k), x);
    }
    UNROLLED_GROUP for (int j = 0; j < ROWS; j++) {
        __m128i *to = (__m128i *)(sums + j * SIDE);
        const __m128i four = sums_of_four(all[j][0], all[j][1], all[j][2], all[j][3]);
        _mm_store_si128(to, is_first ? four : _mm_add_epi32(_mm_load_si128(to), four));
    }
}

AVX512 inline __m256i narrowed(__m512 values) {
    __m512i bits = _mm512_castps_si512(values), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff)), 16);
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(bits);
}

// Sums of a row by 16 output features become the result's, as `Scaling::put` makes it; `steps` are those of the features.
AVX512 inline void put_lanes(const Call &call, const Scaling &scaling, __m512i sums, int64_t m, int64_t n, __m512 steps, __mmask16 here) {
    const int64_t place = m * call.out_features + n;
    if (!scaling.y) return _mm512_mask_storeu_epi32(call.result + place, here, sums);
    const __m512 values = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(scaling.scales[m])), steps);
    if (scaling.is_bfloat16) _mm256_mask_storeu_epi16((uint16_t *)scaling.y + place, here, narrowed(values));
    else _mm512_mask_storeu_ps((float *)scaling.y + place, here, values);
}

// Sums of twice 16 output features by 16 rows become the result's.
AVX512 void finish(const Call &call, const Scaling &scaling, const int32_t (*sums)[SIDE * SIDE], const float *steps, int64_t m, int64_t n) {
    __m512i v[2][16];
    for (int i = 0; i < 2; i++) {
        for (int row = 0; row < 16; row++) v[i][row] = _mm512_load_si512(sums[i] + 16 * row);
        amx::transpose(v[i]);
    }
    const int64_t count = call.out_features - n;
    const __mmask16 first = lanes(count), second = count > 16 ? lanes(count - 16) : (__mmask16)0;
    const __m512 one = _mm512_loadu_ps(steps), other = _mm512_loadu_ps(steps + 16);
    for (int64_t i = 0; i < SIDE && m + i < call.rows; i++) {
        put_lanes(call, scaling, v[0][i], m + i, n, one, first);
        put_lanes(call, scaling, v[1][i], m + i, n + 16, other, second);
    }
}

// The same of rows from `first` to `last` by at most 16 output features, from what dot products summed.
AVX512 void finish_dots(
    const Call &call, const Scaling &scaling, const int32_t *sums, const float *steps, int64_t first, int64_t last, int64_t n, int64_t count) {
    const __m512 scales = _mm512_loadu_ps(steps);
    for (int64_t m = first; m < last; m++, sums += SIDE) {
        const __m512i row = _mm512_sub_epi32(_mm512_load_si512(sums), _mm512_set1_epi32(call.offsets[m]));
        put_lanes(call, scaling, row, m, n, scales, lanes(count));
    }
}

inline void fetch(const int8_t *p) { _mm_prefetch((const char *)p, _MM_HINT_T1); }
#else
#define AVX512

float amplitude_of_bfloats(const uint16_t *values, int64_t count) {
    float amax = 0, value;
    for (int64_t k = 0; k < count && amax == amax; k++) widen_plainly(values + k, 1, &value), amax = amplitude_plainly(&value, 1, amax);
    return amax;
}

inline bool has_dots() { return amx::detect(); }  // where they are emulated
inline bool has_tiles() { return amx::detect(); }

void pack(const int16_t *codes, int64_t pitch, int64_t rows, int64_t channels, int8_t *tile) {
    memset(tile, 0, amx::TILE);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t k = 0; k < channels; k++) tile[k / 4 * 64 + 4 * m + k % 4] = (int8_t)codes[m * pitch + k];
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

template <int ROWS>
void multiply_dots(
    const int8_t *const *w, const int8_t *x, int64_t channels, bool is_first, int32_t *sums, const int8_t *ahead, int64_t pitch, int64_t lines) {
    for (int j = 0; j < ROWS; j++)
        for (int i = 0; i < FOUR; i++) {
            uint32_t sum = is_first ? 0 : sums[j * SIDE + i];
            for (int64_t k = 0; k < channels; k++) sum += (w[i][k] + 128) * x[k / STEP * ROWS * STEP + j * STEP + k % STEP];
            sums[j * SIDE + i] = (int32_t)sum;
        }
}

void finish(const Call &call, const Scaling &scaling, const int32_t (*sums)[SIDE * SIDE], const float *steps, int64_t m, int64_t n) {
    for (int64_t j = 0; j < SIDE && m + j < call.rows; j++)
        for (int64_t i = 0; i < WIDTH && n + i < call.out_features; i++)
            scaling.put(call, (m + j) * call.out_features + n + i, sums[i / SIDE][i % SIDE * SIDE + j], m + j, steps[i]);
}

void finish_dots(
    const Call &call, const Scaling &scaling, const int32_t *sums, const float *steps, int64_t first, int64_t last, int64_t n, int64_t count) {
    for (int64_t m = first; m < last; m++, sums += SIDE)
        for (int64_t i = 0; i < count; i++) {
            const int32_t sum = (int32_t)((uint32_t)sums[i] - (uint32_t)call.offsets[m]);
            scaling.put(call, m * call.out_features + n + i, sum, m, steps[i]);
        }
}

inline void fetch(const int8_t *) {}
#endif

// The best that there is, up to `most`.
Engine engine_of(int most) {
    if (most >= (int)Engine::tiles && has_tiles()) return Engine::tiles;
    if (most >= (int)Engine::dots && has_dots()) return Engine::dots;
#if defined(__x86_64__)
    if (most >= (int)Engine::avx2 && processor::found().avx2) return Engine::avx2;
#endif
    return Engine::plain;
}

Level level_of(int most) {
    const Engine engine = engine_of(most);
#if defined(HFQ_AMX)
    if (engine >= Engine::dots) return {engine, multiply_avx2, amplitude_avx512, round_avx512, widen_avx512};
#endif
#if defined(__x86_64__)
    if (engine >= Engine::avx2) return {engine, multiply_avx2, amplitude_avx2, round_avx2, widen_avx2};
#endif
    return {engine, multiply_plainly, amplitude_plainly, round_plainly, widen_plainly};
}

// What is multiplied at once: pairs of blocks of rows, by strips of 32 output features, by steps of channels whose activations stay in the
// second cache. Where that is not all channels, the sums of several strips are kept, so that activations are read less often.
struct TilePlan {
    int64_t pairs, strips, steps, piece;

    TilePlan(int64_t rows, int64_t in_features) {
        const int64_t all_pairs = (blocks_of(rows) + 1) / 2, passes = (all_pairs + MOST_PAIRS - 1) / MOST_PAIRS;
        pairs = (all_pairs + passes - 1) / passes;
        steps = RESIDENT / (2 * amx::TILE * pairs) / PIECE * PIECE;
        if (steps > steps_of(in_features)) steps = steps_of(in_features);
        strips = steps < steps_of(in_features) ? MOST_STRIPS : 1;
        piece = pairs > FEW_PAIRS ? PIECE : SHORT_PIECE;
    }

    int64_t words() const { return strips * pairs * amx::TILE; }  // of a thread's sums: four tiles for each strip and pair
};

// Some steps of a strip: what the first cache holds of the weight.
struct Piece {
    alignas(64) int8_t tiles[PIECE][2][amx::TILE];
};

// `out` rows from `w` on as a piece; zeros beyond the channels, and what was there beyond the rows.
AVX512 void copy_piece(const int8_t *w, int64_t pitch, int64_t out, int64_t channels, Piece &piece) {
    for (int64_t i = 0; i < out; i++, w += pitch) {
        int8_t *to = piece.tiles[0][i / SIDE] + i % SIDE * STEP;
        int64_t k = 0;
        for (; k + STEP <= channels; k += STEP, to += 2 * amx::TILE) memcpy(to, w + k, STEP);
        if (k < channels) memset(to, 0, STEP), memcpy(to, w + k, channels - k);
    }
}

// A piece by 16 * ROWS rows; sums are added to `sums` unless these are the first. Meanwhile rows `ahead`, `pitch` bytes apart, are fetched.
template <int ROWS>
HFQ_AMX_TARGET void multiply_tiles(
    const Piece &piece, const int8_t *x, int64_t x_pitch, int64_t steps, bool is_first, int32_t (*sums)[SIDE * SIDE], const int8_t *ahead,
    int64_t pitch, int64_t lines) {
    if (is_first) {
        amx::zero<0>(), amx::zero<1>();
        if (ROWS == 2) amx::zero<2>(), amx::zero<3>();
    } else {
        amx::load<0>(sums[0]), amx::load<1>(sums[1]);
        if (ROWS == 2) amx::load<2>(sums[2]), amx::load<3>(sums[3]);
    }
    for (int64_t step = 0; step < steps; step++, x += amx::TILE, ahead += STEP) {
        for (int64_t line = 0; line < lines; line++) fetch(ahead + line * pitch);
        amx::load<4>(piece.tiles[step][0]);
        amx::load<6>(x);
        amx::dot_bytes<0, 4, 6>();
        amx::load<5>(piece.tiles[step][1]);
        amx::dot_bytes<1, 5, 6>();
        if (ROWS == 2) amx::load<7>(x + x_pitch), amx::dot_bytes<2, 4, 7>(), amx::dot_bytes<3, 5, 7>();
    }
    amx::store<0>(sums[0]), amx::store<1>(sums[1]);
    if (ROWS == 2) amx::store<2>(sums[2]), amx::store<3>(sums[3]);
}

// Blocks of rows by a strip's rows from `w` on and some steps of channels, in pieces of `length`; `later` is what is multiplied afterwards.
void multiply_strip(
    const Call &call, int64_t length, int64_t from, int64_t to, const int8_t *w, int64_t out, int64_t first_step, int64_t last_step,
    const int8_t *later, int32_t (*sums)[SIDE * SIDE]) {
    const int64_t in = call.in_features, all_steps = steps_of(in), pairs = (to - from + 1) / 2;
    Piece piece;
    for (int64_t step = first_step; step < last_step; step += length) {
        const int64_t steps = std::min(last_step - step, length);
        const int8_t *next = step + length < last_step ? w + (step + length) * STEP : later;
        copy_piece(w + step * STEP, in, out, std::min(in - step * STEP, steps * STEP), piece);
        for (int64_t pair = 0; pair < pairs; pair++) {
            const int8_t *x = call.packed + ((from + 2 * pair) * all_steps + step) * amx::TILE;
            const int64_t fetched = WIDTH * pair / pairs, lines = WIDTH * (pair + 1) / pairs - fetched;
            (from + 2 * pair + 1 < to ? multiply_tiles<2> : multiply_tiles<1>)(
                piece, x, all_steps * amx::TILE, steps, step == 0, sums + 4 * pair, next + fetched * in, in, lines);
        }
    }
}

// Output features from `first`, a multiple of 32, to `last`, by all rows. `sums` has room for a plan's.
HFQ_AMX_TARGET void multiply_by_tiles(
    const Call &call, const Scaling &scaling, const TilePlan &plan, int64_t first, int64_t last, int32_t (*sums)[SIDE * SIDE]) {
    amx::Tiles tiles;
    const int64_t in = call.in_features, all_steps = steps_of(in), blocks = blocks_of(call.rows), stride = plan.pairs * 4;
    for (int64_t from = 0; from < blocks; from += 2 * plan.pairs)
        for (int64_t n = first; n < last; n += plan.strips * WIDTH) {
            const int64_t to = std::min(from + 2 * plan.pairs, blocks), end = std::min(n + plan.strips * WIDTH, last);
            for (int64_t step = 0; step < all_steps; step += plan.steps) {
                const int64_t next = std::min(step + plan.steps, all_steps);
                for (int64_t i = n; i < end; i += WIDTH) {
                    const int8_t *w = call.weight + i * in;
                    const bool is_last = i + WIDTH >= end && next < all_steps;
                    const int8_t *later = is_last ? call.weight + n * in + next * STEP : w + WIDTH * in + step * STEP;
                    const int64_t out = std::min(end - i, WIDTH);
                    multiply_strip(call, plan.piece, from, to, w, out, step, next, later, sums + (i - n) / WIDTH * stride);
                }
            }
            for (int64_t i = n; i < end; i += WIDTH) {
                float scales[WIDTH] = {};
                for (int64_t j = 0; j < std::min(end - i, WIDTH) && scaling.y; j++) scales[j] = scaling.step(i + j);
                for (int64_t block = from; block < to; block++)
                    finish(call, scaling, sums + (i - n) / WIDTH * stride + (block - from) * 2, scales, block * SIDE, i);
            }
        }
}

// Rows in groups, of which those of a pass are multiplied by the weight at once; channels in chunks.
struct DotPlan {
    int64_t rows, groups, passes, steps, chunks, strips;

    DotPlan(int64_t rows, int64_t in_features) : rows(rows), steps(steps_of(in_features)) {
        groups = (rows + GROUP - 1) / GROUP;
        chunks = (steps + CHUNK_STEPS - 1) / CHUNK_STEPS;
        passes = std::max((rows * (steps / chunks) * STEP + PASS - 1) / PASS, (rows + MOST_ROWS - 1) / MOST_ROWS);
        strips = chunks > 1 ? MOST_STRIPS : 1;
    }

    int64_t first_row(int64_t group) const { return rows * group / groups; }
    int64_t first_group(int64_t pass) const { return groups * pass / passes; }
    int64_t first_step(int64_t chunk) const { return steps * chunk / chunks; }
    int64_t stride() const { return SIDE * (rows / passes + 2 * GROUP); }  // of sums by 16 output features
    int64_t words() const { return strips * stride(); }                   // of a thread's sums
};

typedef void (*MultiplyDots)(const int8_t *const *, const int8_t *, int64_t, bool, int32_t *, const int8_t *, int64_t, int64_t);
const MultiplyDots BY_ROWS[GROUP] = {multiply_dots<1>, multiply_dots<2>, multiply_dots<3>, multiply_dots<4>, multiply_dots<5>, multiply_dots<6>};

// Groups of rows by at most four output features from `n` on and some steps of channels; `later` is what is multiplied afterwards.
void multiply_four(
    const Call &call, const DotPlan &plan, int64_t from, int64_t to, int64_t n, int64_t out, int64_t first_step, int64_t last_step,
    const int8_t *later, int32_t *sums) {
    const int64_t in = call.in_features, channels = std::min(in, last_step * STEP) - first_step * STEP;
    const int8_t *w[FOUR];
    for (int64_t i = 0; i < FOUR; i++) w[i] = call.weight + (n + std::min(i, out - 1)) * in + first_step * STEP;
    for (int64_t group = from; group < to; group++) {
        const int64_t first = plan.first_row(group), rows = plan.first_row(group + 1) - first;
        const int8_t *x = call.packed + (first * plan.steps + rows * first_step) * STEP;
        const int64_t fetched = FOUR * (group - from) / (to - from), lines = FOUR * (group - from + 1) / (to - from) - fetched;
        BY_ROWS[rows - 1](w, x, channels, first_step == 0, sums + (first - plan.first_row(from)) * SIDE, later + fetched * in, in, lines);
    }
}

// Output features from `first` to `last`, by all rows. `sums` has room for a plan's.
void multiply_by_dots(const Call &call, const Scaling &scaling, const DotPlan &plan, int64_t first, int64_t last, int32_t *sums) {
    const int64_t in = call.in_features;
    for (int64_t pass = 0; pass < plan.passes; pass++) {
        const int64_t from = plan.first_group(pass), until = plan.first_group(pass + 1);
        for (int64_t n = first; n < last; n += plan.strips * SIDE) {
            const int64_t end = std::min(n + plan.strips * SIDE, last);
            for (int64_t chunk = 0; chunk < plan.chunks; chunk++) {
                const int64_t step = plan.first_step(chunk), next = plan.first_step(chunk + 1);
                for (int64_t i = n; i < end; i += FOUR) {
                    const bool is_last = i + FOUR >= end && next < plan.steps;
                    const int8_t *later = call.weight + (is_last ? n * in + next * STEP : (i + FOUR) * in + step * STEP);
                    int32_t *to = sums + (i - n) / SIDE * plan.stride() + (i - n) % SIDE;
                    multiply_four(call, plan, from, until, i, std::min(end - i, FOUR), step, next, later, to);
                }
            }
            for (int64_t i = n; i < end; i += SIDE) {
                const int64_t count = std::min(end - i, SIDE);
                float scales[SIDE] = {};
                for (int64_t j = 0; j < count && scaling.y; j++) scales[j] = scaling.step(i + j);
                const int32_t *done = sums + (i - n) / SIDE * plan.stride();
                finish_dots(call, scaling, done, scales, plan.first_row(from), plan.first_row(until), i, count);
            }
        }
    }
}

// Output features are cut into parts, and whoever is free takes the next.
struct Parts {
    const Call &call;
    const Level &level;
    const Scaling &scaling;
    int64_t count, next, threads;  // those that have begun

    int64_t first(int64_t part, int64_t multiple) const {
        const int64_t out = call.out_features;
        return std::min((out + multiple - 1) / multiple * part / count * multiple, out);
    }
};

void take_parts(void *argument) {
    Parts *parts = (Parts *)argument;
    const Call &call = parts->call;
    const TilePlan tiles(call.rows, call.in_features);
    const DotPlan dots(call.rows, call.in_features);
    const Engine engine = parts->level.engine;
    const int64_t multiple = engine == Engine::tiles ? WIDTH : engine == Engine::dots ? SIDE : 1;
    const int64_t thread = __atomic_fetch_add(&parts->threads, 1, __ATOMIC_RELAXED);
    KeptSubnormals here;
    for (int64_t part; (part = __atomic_fetch_add(&parts->next, 1, __ATOMIC_RELAXED)) < parts->count;) {
        const int64_t first = parts->first(part, multiple), last = parts->first(part + 1, multiple);
        if (engine == Engine::tiles) {
            multiply_by_tiles(call, parts->scaling, tiles, first, last, (int32_t (*)[SIDE * SIDE])(call.sums + tiles.words() * thread));
        } else if (engine == Engine::dots) {
            multiply_by_dots(call, parts->scaling, dots, first, last, call.sums + dots.words() * thread);
        } else {
            parts->level.multiply(call, first, last);
            parts->scaling.apply(call, first, last);
        }
    }
}

// Activations are packed, and rounded unless `rows` is null, in blocks of 16 rows for tiles and in groups for dot products.
struct Packing {
    const Call &call;
    const Level &level;
    const Rows *rows;
    float *scales;
    int64_t count, next;

    void scale(int64_t m) const {
        const int64_t in = call.in_features, start = m * rows->stride;
        const bool is_narrow = rows->is_bfloat16;
        scales[m] = rows->scale(
            is_narrow ? amplitude_of_bfloats((const uint16_t *)rows->x + start, in) : level.amplitude((const float *)rows->x + start, in, 0));
    }

    // At most CHUNK channels of a row as codes, in `codes` where they have to be rounded.
    const int16_t *codes(int64_t m, int64_t k, int64_t width, float *wide, int16_t *codes) const {
        if (!rows) return call.activations + m * call.in_features + k;
        level.round(rows->values(level, m, k, width, wide), width, scales[m], codes);
        return codes;
    }
};

void pack_block(const Packing &packing, int64_t first) {
    const Call &call = packing.call;
    const int64_t in = call.in_features, count = std::min(call.rows - first, SIDE), pitch = packing.rows ? CHUNK : in;
    int8_t *tile = call.packed + first / SIDE * steps_of(in) * amx::TILE;
    float wide[CHUNK];
    int16_t room[SIDE][CHUNK];
    for (int64_t m = first; packing.rows && m < first + count; m++) packing.scale(m);
    for (int64_t k = 0; k < in; k += CHUNK) {
        const int64_t width = std::min(in - k, CHUNK);
        const int16_t *codes = packing.codes(first, k, width, wide, room[0]);
        for (int64_t m = 1; m < count; m++) packing.codes(first + m, k, width, wide, room[m]);
        for (int64_t at = 0; at < width; at += STEP, tile += amx::TILE) pack(codes + at, pitch, count, std::min(width - at, STEP), tile);
    }
}

void pack_group(const Packing &packing, int64_t group) {
    const Call &call = packing.call;
    const DotPlan plan(call.rows, call.in_features);
    const int64_t in = call.in_features, first = plan.first_row(group), rows = plan.first_row(group + 1) - first;
    int8_t *to = call.packed + first * plan.steps * STEP;
    uint32_t sums[GROUP] = {};
    float wide[CHUNK];
    int16_t room[CHUNK];
    for (int64_t m = 0; packing.rows && m < rows; m++) packing.scale(first + m);
    for (int64_t k = 0; k < in; k += CHUNK, to += rows * CHUNK) {
        const int64_t width = std::min(in - k, CHUNK);
        for (int64_t m = 0; m < rows; m++)
            sums[m] += (uint32_t)pack_row(packing.codes(first + m, k, width, wide, room), width, to + m * STEP, rows * STEP);
    }
    for (int64_t m = 0; m < rows; m++) call.offsets[first + m] = (int32_t)(128 * sums[m]);
}

void take_packing(void *argument) {
    Packing *packing = (Packing *)argument;
    KeptSubnormals here;
    for (int64_t unit; (unit = __atomic_fetch_add(&packing->next, 1, __ATOMIC_RELAXED)) < packing->count;) {
        if (packing->level.engine == Engine::tiles) pack_block(*packing, unit * SIDE);
        else pack_group(*packing, unit);
    }
}

// GOMP_parallel of torch's OpenMP runtime, whose threads are awake and would be in the way of others (see kernels.cpp), or null.
typedef void (*Team)(void (*work)(void *), void *data, unsigned threads, unsigned flags);
Team team = nullptr;
pthread_once_t team_once = PTHREAD_ONCE_INIT;

void forget_team() { team = nullptr; }  // in the child of a fork it has no threads, and waits for them
void watch_forks() { pthread_atfork(nullptr, nullptr, forget_team); }

void spread(void (*work)(void *), void *data, int64_t worth, int threads) {
    if (worth > 1 && team) return team(work, data, (unsigned)threads, 0);
    std::vector<std::thread> others;
    try {
        for (int64_t other = 1; other < worth; other++) others.emplace_back(work, data);
    } catch (const std::exception &) {  // no more threads, or no memory: those that there are do all the work
    }
    work(data);
    for (auto &other : others) other.join();
}

void run(const Call &call, const Level &level, const Scaling &scaling, int threads) {
    int64_t worth = 1 + (call.rows * call.in_features * call.out_features >> (team ? 19 : 21));  // products that pay for a thread
    if (worth > threads) worth = threads;
    const int64_t shares = level.engine == Engine::dots ? 8 : 2;  // parts for each thread: those that others disturb take fewer
    Parts parts = {call, level, scaling, worth > 1 ? shares * worth : 1, 0, 0};
    spread(take_parts, &parts, worth, threads);
}

void run_packing(const Call &call, const Level &level, const Rows *rows, float *scales, int threads) {
    const int64_t count = level.engine == Engine::tiles ? blocks_of(call.rows) : DotPlan(call.rows, call.in_features).groups;
    int64_t worth = std::min(1 + (call.rows * call.in_features >> (team ? 16 : 18)), count);  // values that pay for a thread
    if (worth > threads) worth = threads;
    Packing packing = {call, level, rows, scales, count, 0};
    spread(take_packing, &packing, worth, threads);
}

// So many words, of what the caller keeps, from a line's beginning; null where there is no memory.
int32_t *own_words(int64_t words) {
    words += 16;
    try {
        if ((int64_t)kept.size() < words) kept.resize(words);
    } catch (const std::exception &) {
        return nullptr;
    }
    return (int32_t *)(((uintptr_t)kept.data() + 63) / 64 * 64);
}

// The words of what dot products and tiles keep; none for others.
struct Room {
    int64_t sums = 0, packed = 0, offsets = 0;

    Room(Engine engine, int64_t rows, int64_t in_features, int threads) {
        if (engine < Engine::dots) return;
        const bool by_tiles = engine == Engine::tiles;
        sums = (by_tiles ? TilePlan(rows, in_features).words() : DotPlan(rows, in_features).words()) * std::max(threads, 1);
        packed = (by_tiles ? blocks_of(rows) * SIDE : rows) * steps_of(in_features) * (STEP / 4);
        offsets = by_tiles ? 0 : rows;
    }

    int64_t words() const { return sums + packed + offsets; }

    void give(Call &call, int32_t *words) const {
        call.sums = words;
        call.packed = (int8_t *)(words + sums);
        call.offsets = words + sums + packed;
    }
};

}  // namespace

extern "C" {

// The threads to work on.
void hfq_int8_use_team(Team wanted) {
    pthread_once(&team_once, watch_forks);
    team = wanted;
}

// The best engine that there is, by its number; dot products and tiles take any number of rows.
int hfq_int8_engine() { return (int)engine_of((int)Engine::tiles); }

// result[m, n] = sum of activations[m, k] * weight[n, k]; everything is contiguous, of any alignment; activations are within int8's range.
// By the best engine up to `most`. Not 0 where there was no memory, and nothing was computed.
int hfq_int8_product(
    const int8_t *weight, const int16_t *activations, int32_t *result, int64_t rows, int64_t in_features, int64_t out_features,
    int threads, int most) {
    const Level level = level_of(most);
    Call call = {weight, activations, result, rows, in_features, out_features};
    if (level.engine >= Engine::dots) {
        const Room room(level.engine, rows, in_features, threads);
        int32_t *words = own_words(room.words());
        if (!words) return -3;
        room.give(call, words);
        run_packing(call, level, nullptr, nullptr, threads);
    }
    run(call, level, {}, threads);
    return 0;
}

// `steps`, of `steps_dtype`, times `multiplier` are the scales of the weight's rows, or one for all; that of a row of activations is
// min(amplitude, bound) / top, or 1 where that is 0.
struct Weight {
    int64_t codes, steps, steps_count, steps_dtype, in_features, out_features;  // the first two are addresses
    float multiplier, top, bound;
};

// What is packed into one argument: a caller that converts many takes as long as the product by a small layer.
struct Product {
    int64_t x, x_stride, y, is_bfloat16, rows, threads, most;  // addresses; x and y are float32 or bfloat16, y is contiguous
};

// y = x rounded to int8 row by row, times the weight. Bit for bit what torch computes in float32 by the same steps, by the best engine up to
// `most`. Not 0 where there was no memory, and nothing was computed.
// With dot products and tiles, what is kept is a byte for each activation, of rows (with tiles) and channels filled up to 16 and 64, a word or
// two for each row, and at most 512 KB of sums for each thread.
int hfq_int8_linear(const Weight *by, const Product *of) {
    const int64_t rows = of->rows, in_features = by->in_features, out_features = by->out_features;
    const int threads = (int)of->threads, is_bfloat16 = (int)of->is_bfloat16;
    const Level level = level_of((int)of->most);
    const Rows given = {(const char *)(uintptr_t)of->x, of->x_stride, is_bfloat16, in_features, by->top, by->bound};
    const bool is_packed = level.engine >= Engine::dots;
    const Room room(level.engine, rows, in_features, threads);
    int32_t *words = own_words(is_packed ? room.words() + rows : rows * (1 + out_features + (in_features + 1) / 2) + in_features);
    if (!words) return -3;
    float *scales = (float *)(words + room.words()), *wide = scales + rows;
    int32_t *sums = (int32_t *)(wide + in_features);
    int16_t *codes = (int16_t *)(sums + rows * out_features);
    Call call = {(const int8_t *)(uintptr_t)by->codes, codes, sums, rows, in_features, out_features};
    if (is_packed) {
        room.give(call, words);
        run_packing(call, level, &given, scales, threads);
    } else {
        round_rows(level, given, rows, wide, scales, codes);
    }
    const Scaling scaling = {scales, (const char *)(uintptr_t)by->steps, by->steps_count, (int)by->steps_dtype, by->multiplier,
                             (char *)(uintptr_t)of->y, is_bfloat16};
    run(call, level, scaling, threads);
    return 0;
}

}  // extern "C"
