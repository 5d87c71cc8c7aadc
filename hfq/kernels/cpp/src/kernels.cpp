// Products with quantized weights on a CPU, read from the checkpoint's bytes in place, at any alignment.
//
// The interface is plain C, without headers of torch or Python; hfq/kernels/cpp/library.py builds and loads
// it. This file includes instruction_set.h once per instruction set (scalar, AVX2, AVX-512). The best one of
// the processor is chosen at run time.
//
// With -DHFQ_EMULATE, every form is compiled for any processor in plain C++, so that its logic can be tested
// anywhere.
//
// One thread sums each output. The order of the sum depends only on the sizes, the number of activation rows,
// and the instruction set. It does not depend on the number of threads or on the address of the weights.
// Nothing writes to the weights.

#include <cstdint>
#include <cstring>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "amx_tiles.h"
#include "layer.h"
#include "threads.h"
#include "ternary.h"

#define HFQ_ISA 0
#define HFQ_ISA_NAME scalar
#include "instruction_set.h"
#undef HFQ_ISA
#undef HFQ_ISA_NAME

#if defined(__x86_64__)
#define HFQ_ISA 1
#define HFQ_ISA_NAME avx2
#include "instruction_set.h"
#undef HFQ_ISA
#undef HFQ_ISA_NAME

#define HFQ_ISA 2
#define HFQ_ISA_NAME avx512
#include "instruction_set.h"
#undef HFQ_ISA
#undef HFQ_ISA_NAME

#include "bfloat16.h"
#include "vnni.h"
#endif

#include "dispatch.h"
#include "grouped.h"
#include "experts.h"
#include "dense.h"

namespace {

const Work ternary_works[] = {
    scalar::ternary_part,
#if defined(__x86_64__)
    avx2::ternary_part,
    avx512::ternary_part,
#endif
};

}  // namespace

extern "C" {

int hfq_abi() { return 10; }

// Sets the threads to use: GOMP_parallel of the OpenMP runtime of the caller's other products, or null for
// the threads of this library.
void hfq_use_team(Team wanted) {
    // makes the child of a fork forget the team, even if nothing was computed before
    pthread_once(&pool_once, make_pool);
    team = wanted;
}

// Returns the level of the processor: 0 scalar, 1 AVX2, 2 AVX-512.
int hfq_detected() { return detect(); }

// Chooses a lower level, for tests; -1 for the best. Returns the level in use.
int hfq_use(int wanted) { return chosen = wanted < 0 ? detect() : (int)least(wanted, detect()); }

// Sets whether e4m3 codes are read as small floats: -1 depends on the processor; 0 and 1 are for tests.
// Returns the setting.
int hfq_use_subnormals(int wanted) { return subnormals = wanted < 0 ? detect_subnormals() : wanted; }

// Sets whether AVX-512's dot products of bytes multiply integer activations if the processor has them: -1
// yes; 0 no, for tests. Results are bit-identical. Returns 1 if they are in use.
int hfq_use_vnni(int wanted) {
    byte_dots = wanted == 0 ? 0 : -1;
    return uses_vnni();
}

// Sets the products of bfloat16 activations: 0 in float32 or as integers, 1 in bfloat16 by vectors, 2 by
// tiles, if the processor has them; -1 for the best. Returns the form in use.
int hfq_use_short(int wanted) {
    short_forms = wanted < 0 ? 2 : wanted;
#if defined(__x86_64__)
    if (level() == 2) return uses_tiles() ? 2 : short_forms && has_short() ? 1 : 0;
#endif
    return 0;
}

int64_t hfq_most_rows() { return MOST_ROWS; }

// Returns 1 if this many rows are multiplied in bfloat16 by tiles or vectors, which support any number of
// rows.
int hfq_is_tiled(const Layer *layer, int64_t rows, int32_t dtype) { return is_tiled(layer, rows, dtype); }

int64_t hfq_scratch(const Layer *layer, int64_t rows) { return linear_floats(*layer, rows); }

// The arguments of hfq_linear in one struct: ctypes would convert them one by one, which takes as long as the
// product with a small layer.
struct Product {
    int64_t layer;     // address of the Layer
    int64_t x;         // address of the activations; each row is contiguous
    int64_t dtype;     // Dtype of x and y
    int64_t rows;      // rows of activations
    int64_t x_stride;  // elements from one row of x to the next
    int64_t y;         // address of the results, contiguous
    int64_t threads;   // the most threads to use
};

// Computes y[m, n] = sum over k of x[m, k] W[n, k], for 1 to MOST_ROWS rows, or any number by tiles. Returns
// 0, or without computing anything: -1 for an unsupported number of rows, -2 for an index out of range, -3 if
// memory ran out.
int hfq_linear(const Product *given) {
    const Layer *layer = (const Layer *)(uintptr_t)given->layer;
    const char *x = (const char *)(uintptr_t)given->x;
    char *y = (char *)(uintptr_t)given->y;
    const int64_t rows = given->rows, x_stride = given->x_stride, y_stride = layer->out_features;
    const int32_t dtype = (int32_t)given->dtype, threads = (int32_t)given->threads;
    if (rows < 1) return -1;
    if (const int status = settle(layer)) return status;
    KeptSubnormals here;
#if defined(__x86_64__)
    if (is_short(*layer, rows, dtype))
        return run_all_short(*layer, rows, dtype, x, x_stride, y, y_stride, threads);
#endif
    if (rows > MOST_ROWS) return -1;
    float *scratch = activation_scratch.get(linear_floats(*layer, rows));
    const int64_t own = own_floats(is_sorted(*layer));
    if (!scratch || !own_scratch.get(own)) return -3;
    int wanted = worthwhile(threads, rows * layer->in_features * layer->out_features);
    MatmulArgs args = prepare(*layer, x, dtype, rows, x_stride, y, dtype, y_stride, scratch, wanted);
    const int64_t each = has_faulty_rows(args) ? 1 : rows, size = dtype == F32 ? 4 : 2;
    for (int64_t m = 0; m < rows; m += each) {
        if (each < rows)
            args = prepare(*layer, x + m * x_stride * size, dtype, 1, x_stride, y + m * y_stride * size,
                           dtype, y_stride, scratch, wanted);
        run_parts({linear_work(*layer), &args, args.outputs.parts, own}, threads, wanted);
    }
    return 0;
}

// Sorts the pairs of tokens and experts by expert, and multiplies the rows of each expert by its first
// layers, see `ExpertsIn`. Returns the number of pairs, or less than 0 as run_items. -4 also means that
// hfq_linear has no form for an expert's number of rows.
int64_t hfq_experts_in(const ExpertsIn *given) { return experts_in(*given); }

// Multiplies the rows of each expert by its last layer, and adds up the results of each token, see
// `ExpertsOut`. Returns as hfq_experts_in.
int64_t hfq_experts_out(const ExpertsOut *given) { return experts_out(*given); }

// Multiplies few rows by a weight of 16-bit floats. Returns 0, -1 for other rows or dtypes, or -3 if memory
// ran out.
int hfq_dense(const DenseArguments *given) { return multiply_dense(*given); }

// Dequantizes output rows [start, start + count) to float32 or bfloat16 [count, in_features], or, for GPTQ
// and AWQ, [in_features, count]. Returns as hfq_linear.
int hfq_dequantize(const Layer *layer, int64_t start, int64_t count, char *out, int32_t dtype, int threads) {
    if (const int status = settle(layer, false)) return status;
    if (!own_scratch.get(own_floats(false))) return -3;
    KeptSubnormals here;
    Panel panel = {layer, start, count, out, dtype};
    bool columns = has_columns(*layer);
    int wanted = worthwhile(threads, count * layer->in_features);
    int64_t width = columns ? panel_columns(*layer) : PANEL_ROWS;
    run_parts({panel_works[level()][columns], &panel, (count + width - 1) / width, own_floats(false)},
              threads, wanted);
    return 0;
}

// Decodes rows of QMoE to float32. Returns 0, -2 for a row whose codes have other columns, or -3 if memory
// ran out.
int hfq_ternary(const TernaryRows *given) {
    if (!own_scratch.get(own_floats(false))) return -3;
    int is_wrong = 0;
    const TernaryWork work = {given, &is_wrong};
    const int wanted = worthwhile((int)given->threads, given->rows * given->columns);
    run_parts({ternary_works[level()], &work, (given->rows + TERNARY_ROWS - 1) / TERNARY_ROWS,
               own_floats(false)},
              (int)given->threads, wanted);
    return is_wrong ? -2 : 0;
}

}  // extern "C"
