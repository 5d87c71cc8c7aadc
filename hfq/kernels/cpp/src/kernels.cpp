// Multiplies by packed weights on a CPU, reading the checkpoint's bytes where they lie, at any alignment.
//
// Plain C ABI, no torch and no Python headers; hfq/kernels/cpp/library.py compiles this file and loads it.
// It includes instruction_set.h once for each instruction set (scalar, AVX2, AVX-512); the best that the
// processor has is chosen when it runs.
//
// With -DHFQ_EMULATE every form is compiled for any processor, without its own instructions, so that its
// logic can be tested there.
//
// Every output is summed by one thread in an order that depends on the sizes, the number of activation rows
// and the instruction set alone: never on the number of threads, nor on where the bytes rest. Nothing writes
// to the weights.

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

extern "C" {

int hfq_abi() { return 7; }

// The threads to work on: GOMP_parallel of the OpenMP runtime that the caller's other products run in, or
// null for our own.
void hfq_use_team(Team wanted) {
    // a child of a fork must give the team up, also where nothing was computed before
    pthread_once(&pool_once, make_pool);
    team = wanted;
}

// 0 scalar, 1 AVX2, 2 AVX-512; what the processor has.
int hfq_detected() { return detect(); }

// Chooses a lower level, for tests; returns the level that runs.
int hfq_use(int wanted) { return chosen = wanted < 0 ? detect() : (int)least(wanted, detect()); }

// Whether e4m3 codes may be read as small floats, where the processor is chosen for it (-1), or anywhere, for
// tests; what then holds.
int hfq_use_subnormals(int wanted) { return subnormals = wanted < 0 ? detect_subnormals() : wanted; }

// Whether activations as integers are multiplied by AVX-512's dot products of bytes, where the processor has
// them, or not (0), for tests, which changes no bit of a result; what then holds.
int hfq_use_vnni(int wanted) {
    byte_dots = wanted == 0 ? 0 : -1;
    return uses_vnni();
}

// How activations in bfloat16 are multiplied: in float32 or as integers (0), in bfloat16 by vectors (1), or
// by tiles (2), where the processor has them; what then holds.
int hfq_use_short(int wanted) {
    short_forms = wanted < 0 ? 2 : wanted;
#if defined(__x86_64__)
    if (level() == 2) return uses_tiles() ? 2 : short_forms && has_short() ? 1 : 0;
#endif
    return 0;
}

int64_t hfq_most_rows() { return MOST_ROWS; }

// Whether so many rows of a layer's are multiplied in bfloat16 by tiles, or vectors in their place, which
// take any number of them.
int hfq_is_tiled(const Layer *layer, int64_t rows, int32_t dtype) {
#if defined(__x86_64__)
    if (settle(layer, 1) != 0) return 0;
    return is_short(*layer, rows, dtype) && !(dtype == BF16 && is_dotted(*layer, rows));
#else
    return 0;
#endif
}

// Floats that hfq_linear keeps for the next call: a function of the activations' size, not of the weight's.
int64_t hfq_scratch(const Layer *layer, int64_t rows) {
    int64_t floats = padded_rows(*layer, rows) * padded_columns(*layer);
    if (has_integers(*layer, rows))
        floats += rows * (up(limbs_nbytes(*layer), 4) / 4 + spans(*layer) + totals(*layer));
    if (layer->kind == E4M3 && rows <= ORDERED_ROWS) floats += rows * (ordered_columns(*layer) + 2);
    return floats;
}

// What is packed into one argument: a caller that converts many takes as long as the product by a small
// layer.
struct Product {
    int64_t layer;     // address of the Layer
    int64_t x;         // address of the activations, of which each row is contiguous
    int64_t dtype;     // Dtype of x and y
    int64_t rows;      // rows of activations
    int64_t x_stride;  // elements from a row of x to the next
    int64_t y;         // address of the results, contiguous
    int64_t threads;   // the most to use
};

// y[m, n] = sum over k of x[m, k] W[n, k], for 1 to MOST_ROWS rows, or by tiles for any number.
// Not 0 where nothing was computed: -1 for another number of rows, -2 for an index that leaves its range, -3
// without memory.
int hfq_linear(const Product *given) {
    const Layer *layer = (const Layer *)(uintptr_t)given->layer;
    const char *x = (const char *)(uintptr_t)given->x;
    char *y = (char *)(uintptr_t)given->y;
    const int64_t rows = given->rows, x_stride = given->x_stride, y_stride = layer->out_features;
    const int32_t dtype = (int32_t)given->dtype, threads = (int32_t)given->threads;
    if (rows < 1) return -1;
    if (const int status = settle(layer, 1)) return status;
    KeptSubnormals here;
#if defined(__x86_64__)
    if (is_short(*layer, rows, dtype))
        return run_all_short(*layer, rows, dtype, x, x_stride, y, y_stride, threads);
#endif
    if (rows > MOST_ROWS) return -1;
    float *scratch = activation_scratch.get(hfq_scratch(layer, rows));
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

// Floats that hfq_grouped keeps for layers that it takes together.
int64_t hfq_grouped_scratch(const Layer *layers, const int64_t *rows, int64_t count) {
    int64_t floats = 0;
    for (int64_t i = 0; i < count; i++)
        floats += hfq_scratch(layers + i, rows[i]) + (int64_t)(sizeof(MatmulArgs) + sizeof(int64_t)) / 4;
    return floats;
}

// As hfq_linear for one layer after the other, whose rows follow each other in x and y: bit for bit the same,
// and all at once, or as many at once as GROUPED_FLOATS of activations allow. -4 where rows would go one by
// one: those are for hfq_linear.
int hfq_grouped(const Layer *layers, const int64_t *rows, int64_t count, const char *x, int32_t x_dtype,
                int64_t x_stride, char *y, int32_t y_dtype, int64_t y_stride, int threads) {
    for (int64_t i = 0; i < count; i++)
        if (rows[i] < 1 || rows[i] > MOST_ROWS) return -1;
    if (const int status = settle(layers, count)) return status;
    KeptSubnormals here;
    for (int64_t first = 0, next; first < count; first = next) {
#if defined(__x86_64__)
        if (is_short(layers[first], rows[first], x_dtype)) {
            int64_t floats = 0, taken = 0;
            for (next = first; next < count && is_short(layers[next], rows[next], x_dtype); next++) {
                floats += short_floats(layers + next, rows + next, 1, x_dtype);
                if (next > first && floats > GROUPED_FLOATS) break;
                taken += rows[next];
            }
            if (run_short(layers + first, rows + first, next - first, x_dtype, x, x_stride, y, y_stride,
                          threads))
                return -3;
            x += 2 * taken * x_stride, y += 2 * taken * y_stride;
            continue;
        }
#endif
        int64_t floats = 0, products = 0, parts = 0;
        for (next = first; next < count; next++) {
            int64_t more = hfq_grouped_scratch(layers + next, rows + next, 1);
            if (next > first &&
                (floats + more > GROUPED_FLOATS || is_short(layers[next], rows[next], x_dtype)))
                break;
            floats += more, products += rows[next] * layers[next].in_features * layers[next].out_features;
        }
        float *scratch = activation_scratch.get(floats);
        const int64_t own = own_floats(any_sorted(layers + first, next - first));
        if (!scratch || !own_scratch.get(own)) return -3;
        int wanted = worthwhile(threads, products);
        MatmulArgs *args = (MatmulArgs *)scratch;
        int64_t *ends = (int64_t *)(args + (next - first));
        scratch = (float *)(ends + (next - first));
        for (int64_t i = 0; first + i < next; i++) {
            const Layer &layer = layers[first + i];
            const int64_t m = rows[first + i];
            args[i] = prepare(layer, x, x_dtype, m, x_stride, y, y_dtype, y_stride, scratch, wanted);
            if (has_faulty_rows(args[i])) return -4;
            ends[i] = parts += args[i].outputs.parts;
            scratch += hfq_scratch(&layer, m);
            x += m * x_stride * (x_dtype == F32 ? 4 : 2), y += m * y_stride * (y_dtype == F32 ? 4 : 2);
        }
        Group group = {args, ends};
        run_parts({group_part, &group, parts, own}, threads, wanted);
    }
    return 0;
}

// Weights of output rows [start, start + count): [count, in_features], or for GPTQ and AWQ [in_features,
// count]; float32 or bfloat16. Not 0 where nothing was computed, as hfq_linear.
int hfq_dequantize(const Layer *layer, int64_t start, int64_t count, char *out, int32_t dtype, int threads) {
    if (const int status = settle(layer, 1, false)) return status;
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

}  // extern "C"
