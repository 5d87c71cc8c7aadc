// Products of activations that were counted as integers, by AVX-512's dot products of bytes (VNNI). Included
// by kernels.cpp, after its instruction sets, whose order of limbs, scales and sums it takes: results are bit
// for bit those of AVX-512 without.
//
// Four codes without a sign times four limbs with one are added to a lane of int32 at once, so that a limb's
// sums stay in a register.

#if !defined(HFQ_EMULATE)
#define HFQ_VNNI
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vnni"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vnni")
#endif
#endif

namespace {
namespace vnni {

using namespace avx512;

// columns of a part whose scales and zero points are made together, of AWQ's and of 3 bits
const int64_t STRIP = 256;
// rows of words that are taken together, but of AWQ's and of 3 bits: as many as lines of a set of the first
// cache
const int64_t DEPTH = 8;
// rows of words after which those are read that are brought to the second cache, but of AWQ's and of 3 bits
const int64_t BELOW = 8;
const int64_t BELOW_THREE = 16; // the same of 3 bits
// bytes of words, along a row, after which those are read that are brought to the first cache
const int64_t NEAR = 256;
const int64_t FAR = 8192;       // bytes of rows of codes that are asked for before they are read
const int64_t FOUR = 4;         // channels whose codes are multiplied, and added up, at once
const int MOST_ALONE = 2;       // fours of a chunk whose lowest limbs are multiplied by themselves
const int64_t TOGETHER = 2;     // output rows of codes that are read side by side

bool detect() {
#if defined(HFQ_EMULATE)
    return true;
#else
    return cpu_features::found().vnni;
#endif
}

#if defined(HFQ_VNNI)
static HFQ_INLINE vi dot_four(vi sum, vb a, vsb b) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}
#else
static inline vi dot_four(vi sum, vb a, vsb b) {
    for (int i = 0; i < 4 * W; i++) sum[i / 4] += a[i] * b[i];
    return sum;
}
#endif

// From memory to the second cache: the words of some columns lie a power of two apart, of which the first
// holds few.
static HFQ_INLINE void ask_for(const char *p) { __builtin_prefetch(p, 0, 2); }

// Rows are taken by four, two and one.
static HFQ_INLINE int64_t at_once(int64_t rows) { return rows >= 4 ? 4 : rows >= 2 ? 2 : 1; }

#include "vnni_column_major.h"
#include "vnni_row_major.h"

}  // namespace vnni
}  // namespace

#if defined(HFQ_VNNI)
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
