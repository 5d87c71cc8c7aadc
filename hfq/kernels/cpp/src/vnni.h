// Products of integer activations by AVX-512's dot products of bytes (VNNI). Included by kernels.cpp after
// its instruction sets. The order of limbs, scales, and sums is the same, so that results are bit-identical
// to those of AVX-512 without VNNI.
//
// One instruction adds the products of four unsigned codes and four signed limbs to an int32 element, so that
// a limb's sums stay in a register.

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

// columns whose scales and zero points are unpacked together, for AWQ and 3 bits
const int64_t STRIP = 256;
// rows of words that are read together, except for AWQ and 3 bits: the associativity of the first-level cache
const int64_t DEPTH = 8;
// rows from the words being read to those prefetched to the second-level cache, except for AWQ and 3 bits
const int64_t BELOW = 8;
const int64_t BELOW_THREE = 16; // BELOW for 3 bits
// bytes along a row from the words being read to those prefetched to the first-level cache
const int64_t NEAR = 256;
const int64_t FAR = 8192;       // bytes from the row codes being read to those prefetched
const int64_t FOUR = 4;         // channels that one instruction multiplies and adds
const int MOST_ALONE = 2;       // the most fours of a chunk whose lowest limbs are multiplied separately
const int64_t TOGETHER = 2;     // output rows that are read together

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

// Prefetches to the second-level cache. Words of one column may be a power of two apart, and the first-level
// cache holds few of those.
static HFQ_INLINE void ask_for(const char *p) { __builtin_prefetch(p, 0, 2); }

// Number of activation rows that are multiplied together: four, two, or one.
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
