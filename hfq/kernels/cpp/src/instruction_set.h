// Included by kernels.cpp once for each instruction set, with HFQ_ISA (0 scalar, 1 AVX2, 2 AVX-512) and
// HFQ_ISA_NAME, its namespace.
//
// The headers below must not call functions of the standard library, which might be compiled for another
// instruction set.

#if HFQ_ISA == 1 && !defined(HFQ_EMULATE)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#elif HFQ_ISA == 2 && !defined(HFQ_EMULATE)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw")
#endif
#endif

namespace {
namespace HFQ_ISA_NAME {

#include "simd.h"
#include "limbs.h"
#include "ggml_blocks.h"
#include "row_codes.h"
#include "subnormals.h"
#include "row_major.h"
#include "column_codes.h"
#include "act_order.h"
#include "column_major.h"
#include "expert_sums.h"
#include "dense_rows.h"
#include "ternary_rows.h"

}  // namespace HFQ_ISA_NAME
}  // namespace

#if HFQ_ISA != 0 && !defined(HFQ_EMULATE)
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
