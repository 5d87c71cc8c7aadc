// Integer products of int8 activations by an int8 weight that lies as nn.Linear has it; a plain C interface, loaded by ctypes.
//
// AVX2 without VNNI has one exact way: codes are widened to 16 bits and multiplied in pairs into 32 (vpmaddwd). The shorter way by 8 bits
// (vpmaddubsw) saturates at 16. Sums are exact for fewer than 2**17 inputs, so that neither order nor threads matter.

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

struct Call {
    const int8_t *weight;
    const int16_t *activations;
    int32_t *result;
    int64_t rows, in_features, out_features;
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

}  // namespace

// result[m, n] = sum of activations[m, k] * weight[n, k]; everything is contiguous, of any alignment; activations are within int8's range
extern "C" void hfq_int8_product(
    const int8_t *weight, const int16_t *activations, int32_t *result, int64_t rows, int64_t in_features, int64_t out_features,
    int threads, int is_plain) {
    const Call call = {weight, activations, result, rows, in_features, out_features};
    auto multiply = multiply_plainly;
#if defined(__x86_64__)
    if (!is_plain && __builtin_cpu_supports("avx2")) multiply = multiply_avx2;
#endif
    const int64_t worth = rows * in_features * out_features >> 21;  // codes that pay for a thread
    int64_t parts = threads < worth ? threads : worth;
    if (parts < 1) parts = 1;
    std::vector<std::thread> others;
    for (int64_t part = 1; part < parts; part++)
        others.emplace_back(multiply, std::cref(call), out_features * part / parts, out_features * (part + 1) / parts);
    multiply(call, 0, out_features / parts);
    for (auto &other : others) other.join();
}
