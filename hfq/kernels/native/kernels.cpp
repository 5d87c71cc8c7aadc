// Multiplies by packed weights on a CPU, reading the checkpoint's bytes where they lie, at any alignment.
//
// Plain C ABI, no torch and no Python headers; hfq/kernels/native/library.py compiles this file and loads it. The file includes
// itself once for each instruction set (scalar, AVX2, AVX-512); the best that the processor has is chosen when it runs.
//
// With -DHFQ_EMULATE every form is compiled for any processor, without its own instructions, so that its logic can be tested there.
//
// Every output is summed by one thread in an order that depends on the sizes, the number of activation rows and the instruction
// set alone: never on the number of threads, nor on where the bytes rest. Nothing writes to the weights.

#ifndef HFQ_PASS

#include <cstdint>
#include <cstring>
#include <pthread.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace {

enum Kind { E4M3 = 0, E5M2 = 1, NIBBLES = 2, GPTQ = 3, AWQ = 4 };
enum Dtype { F32 = 0, BF16 = 1, F16 = 2, E8M0 = 3 };
enum ZeroReading { STORED = 0, FIELD_PLUS_ONE = 1, MASKED_PLUS_ONE = 2, WORD_PLUS_ONE = 3 };

// One packed layer; hfq/kernels/native/layers.py fills it in.
// Rows of codes (E4M3, E5M2, NIBBLES): W[n, k] = value(codes[n, k]) * scales[n / block_out * scale_stride + k / block_in].
// NIBBLES: two codes a byte, the lower half first; `zeros` are the 16 floats that they stand for.
// GPTQ: W[n, k] = scales[g, n] * (q[k, n] - z[g, n]), g = index[k] or, without an index, k / block_in.
// AWQ: the same; row k of the codes, and row g of the zero points, are words of eight columns each (`zero_words` words).
struct Layer {
    const char *codes, *scales, *zeros, *index;
    int64_t in_features, out_features;
    int64_t block_out, block_in, scale_stride;
    int64_t groups, zero_words, row_nbytes;
    int32_t kind, bits, scale_dtype, divides, zero_reading, index_nbytes;
};

// One multiplication. `x32` holds [rows, stride] floats, zero beyond in_features; `sums` the activations' sums by group.
struct Call {
    const Layer *layer;
    const float *x32, *sums;
    int64_t rows, stride, width;
    char *y;
    int64_t y_stride;
    int32_t y_dtype;
};

#ifdef __clang__
#define HFQ_UNROLL _Pragma("unroll")
#else
#define HFQ_UNROLL _Pragma("GCC unroll 16")
#endif

// Inlined into the code of each instruction set: a call to a function that was compiled for another one, while the wide registers
// are in use, costs more than what it computes.
#define HFQ_INLINE inline __attribute__((always_inline))

const int64_t MOST_ROWS = 64;        // of activations in one call
const int64_t SCRATCH = 96 * 1024;   // floats that each thread keeps
const int64_t STEP = 256;            // input channels of a tile of decoded weights
const int64_t TILE_ROWS = 16;        // output rows of such a tile
const int64_t PASS = 8;              // activation rows that share one decoding of GPTQ's codes
const int64_t PANEL_ROWS = 4;        // output rows of a part of a panel

HFQ_INLINE uint32_t load32(const char *p) { uint32_t v; memcpy(&v, p, 4); return v; }
HFQ_INLINE uint16_t load16(const char *p) { uint16_t v; memcpy(&v, p, 2); return v; }
HFQ_INLINE float as_float(uint32_t bits) { float v; memcpy(&v, &bits, 4); return v; }
HFQ_INLINE uint32_t as_bits(float value) { uint32_t v; memcpy(&v, &value, 4); return v; }
HFQ_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
HFQ_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

HFQ_INLINE float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF;
    if (rest >= 0x7C00) return as_float(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    if (rest >= 0x0400) return as_float(sign | ((rest << 13) + (112u << 23)));
    float value = (float)rest * as_float((127u - 24) << 23);
    return sign ? -value : value;
}

HFQ_INLINE uint16_t float_to_half(float value) {
    uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF;
    if (rest > 0x7F800000) return (uint16_t)(sign | 0x7E00);
    if (rest >= 0x477FF000) return (uint16_t)(sign | 0x7C00);
    if (rest < 0x38800000) {  // the addition rounds to a multiple of 2**-24, ties to even
        float shifted = as_float(rest) + 0.5f;
        return (uint16_t)(sign | (as_bits(shifted) - as_bits(0.5f)));
    }
    rest += 0xFFF + (rest >> 13 & 1);
    return (uint16_t)(sign | (rest - (112u << 23)) >> 13);
}

HFQ_INLINE uint16_t float_to_bfloat(float value) {
    uint32_t bits = as_bits(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

HFQ_INLINE float code_value(uint8_t code, int kind) {
    if (kind == E5M2) return half_to_float((uint16_t)(code << 8));
    uint32_t rest = code & 0x7F;
    float value = rest == 0x7F ? as_float(0x7FC00000) : half_to_float((uint16_t)(rest << 7)) * 256.0f;
    return code & 0x80 ? -value : value;
}

HFQ_INLINE float scale_at(const Layer &layer, int64_t place) {
    switch (layer.scale_dtype) {
        case F32: return as_float(load32(layer.scales + 4 * place));
        case BF16: return as_float((uint32_t)load16(layer.scales + 2 * place) << 16);
        case F16: return half_to_float(load16(layer.scales + 2 * place));
    }
    uint32_t exponent = (uint8_t)layer.scales[place];  // 2**(exponent - 127)
    if (exponent == 255) return as_float(0x7FC00000);
    return as_float(exponent ? exponent << 23 : 0x00400000);
}

HFQ_INLINE int64_t group_of(const Layer &layer, int64_t k) {
    if (layer.index_nbytes == 8) { int64_t g; memcpy(&g, layer.index + 8 * k, 8); return g; }
    if (layer.index_nbytes == 4) return (int32_t)load32(layer.index + 4 * k);
    return k / layer.block_in;
}

HFQ_INLINE uint32_t word_ones(int bits) { return bits == 2 ? 0x55555555u : bits == 4 ? 0x11111111u : 0x01010101u; }

// The nibble of a column among the eight of its word.
HFQ_INLINE int awq_place(int column) { return column / 2 + column % 2 * 4; }

HFQ_INLINE float zero_at(const Layer &layer, int64_t group, int64_t n) {
    int64_t bit = n * layer.bits, shift = bit % 32;
    if (layer.kind == AWQ) shift = 4 * awq_place((int)(n % 8));
    const char *word = layer.zeros + 4 * (group * layer.zero_words + bit / 32);
    uint32_t mask = (1u << layer.bits) - 1, low = load32(word);
    if (layer.zero_reading == WORD_PLUS_ONE) low += word_ones(layer.bits);
    uint32_t value = low >> shift;
    if (shift + layer.bits > 32) value |= load32(word + 4) << (32 - shift);
    value &= mask;
    if (layer.zero_reading == FIELD_PLUS_ONE) value += 1;
    if (layer.zero_reading == MASKED_PLUS_ONE) value = (value + 1) & mask;
    return (float)value;
}

HFQ_INLINE void put(const Call &call, int64_t m, int64_t n, float value) {
    char *row = call.y + (m * call.y_stride + n) * (call.y_dtype == F32 ? 4 : 2);
    if (call.y_dtype == F32) { memcpy(row, &value, 4); return; }
    uint16_t half = call.y_dtype == BF16 ? float_to_bfloat(value) : float_to_half(value);
    memcpy(row, &half, 2);
}

// Whether neighbouring codes in memory belong to neighbouring outputs.
HFQ_INLINE bool has_columns(const Layer &layer) { return layer.kind >= GPTQ; }

// Whether a group's scale cannot be taken out of the sum: groups are scattered, or end within a word.
HFQ_INLINE bool is_scattered(const Layer &layer) {
    return layer.index_nbytes || (layer.kind == GPTQ && layer.block_in * layer.bits % 32);
}

// Whether every channel's group is one that the layer has: an index can change on disk after it was checked.
bool has_groups(const Layer &layer) {
    if (!layer.index_nbytes) return true;
    uint64_t largest = 0;
    for (int64_t k = 0; k < layer.in_features; k++) {
        uint64_t group = (uint64_t)group_of(layer, k);
        if (group > largest) largest = group;
    }
    return largest < (uint64_t)layer.groups;
}

// Rows of activations as floats; 16 more, so that rows of a power of two do not fall onto the same lines of the cache.
HFQ_INLINE int64_t padded_columns(const Layer &layer) { return (layer.in_features + 15) / 16 * 16 + 16; }

// GPTQ's activations come in passes of 1, PASS / 2 or PASS rows.
HFQ_INLINE int64_t padded_rows(const Layer &layer, int64_t rows) {
    int64_t rest = rows % PASS;
    if (!has_columns(layer) || rest <= 1) return rows;
    return rows - rest + (rest <= PASS / 2 ? PASS / 2 : PASS);
}

// Output columns that one part of a GPTQ multiplication covers.
HFQ_INLINE int64_t tile_columns(const Layer &layer, int64_t rows, int threads) {
    if (is_scattered(layer)) return most(16, least(64, SCRATCH / 4 / layer.groups / 16 * 16));
    int64_t share = (layer.out_features / most(threads, 1) + 63) / 64 * 64;
    return most(64, least(rows == 1 ? 1024 : 256, share));
}

// Output columns of a part of a panel.
HFQ_INLINE int64_t panel_columns(const Layer &layer) { return layer.groups <= 512 ? 64 : 32; }

// The threads: work is cut into numbered parts, and whoever is free takes the next.
typedef void (*Work)(const void *context, int64_t part, float *scratch);

struct Scratch {
    float *memory = nullptr;
    ~Scratch() { delete[] memory; }
    float *get() {
        if (!memory) memory = new float[SCRATCH + 16];
        return memory + (16 - (uintptr_t)memory / 4 % 16) % 16;
    }
};
thread_local Scratch own_scratch;

struct Pool {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER, busy = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t wake = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
    Work work = nullptr;
    const void *context = nullptr;
    int64_t parts = 0, next = 0;
    int threads = 0, wanted = 0, active = 0;
};
Pool *pool = nullptr;
pthread_once_t pool_once = PTHREAD_ONCE_INIT;

void take_parts(Pool *p, Work work, const void *context, int64_t parts) {
    float *scratch = own_scratch.get();
    for (int64_t part; (part = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < parts;) work(context, part, scratch);
}

void *serve(void *argument) {
    Pool *p = (Pool *)argument;
    pthread_mutex_lock(&p->mutex);
    for (;;) {
        while (p->wanted == 0) pthread_cond_wait(&p->wake, &p->mutex);
        p->wanted--;
        p->active++;
        Work work = p->work;
        const void *context = p->context;
        int64_t parts = p->parts;
        pthread_mutex_unlock(&p->mutex);
        take_parts(p, work, context, parts);
        pthread_mutex_lock(&p->mutex);
        if (--p->active == 0) pthread_cond_signal(&p->done);
    }
    return nullptr;
}

void forget_pool() { pool = new Pool; }  // in the child of a fork there are no threads

void make_pool() {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, forget_pool);
}

// Threads that have enough to do to be worth waking.
int worthwhile(int threads, int64_t products) { return (int)least(threads, 1 + products / (1 << 19)); }

// Runs all parts and returns when they are done; a second caller at the same time runs its own alone.
void run_parts(Work work, const void *context, int64_t parts, int threads) {
    pthread_once(&pool_once, make_pool);
    Pool *p = pool;
    threads = (int)least(threads, parts);
    if (threads <= 1 || pthread_mutex_trylock(&p->busy) != 0) {
        for (int64_t part = 0; part < parts; part++) work(context, part, own_scratch.get());
        return;
    }
    pthread_mutex_lock(&p->mutex);
    while (p->threads < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, serve, p) != 0) break;
        pthread_detach(thread);
        p->threads++;
    }
    p->work = work, p->context = context, p->parts = parts;
    __atomic_store_n(&p->next, 0, __ATOMIC_RELAXED);
    p->wanted = (int)least(threads - 1, p->threads);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->mutex);
    take_parts(p, work, context, parts);
    pthread_mutex_lock(&p->mutex);
    p->wanted = 0;  // nobody else needs to begin
    while (p->active) pthread_cond_wait(&p->done, &p->mutex);
    pthread_mutex_unlock(&p->mutex);
    pthread_mutex_unlock(&p->busy);
}

struct Panel {
    const Layer *layer;
    int64_t start, count;
    char *out;
    int32_t dtype;
};

}  // namespace

#define HFQ_PASS 0
#define HFQ_NAME scalar
#include __FILE__
#undef HFQ_PASS
#undef HFQ_NAME

#if defined(__x86_64__)
#define HFQ_PASS 1
#define HFQ_NAME avx2
#include __FILE__
#undef HFQ_PASS
#undef HFQ_NAME

#define HFQ_PASS 2
#define HFQ_NAME avx512
#include __FILE__
#undef HFQ_PASS
#undef HFQ_NAME
#endif

namespace {

int detect() {
#if defined(HFQ_EMULATE)
    return 2;
#elif defined(__x86_64__)
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 29 & 1)) return 0;  // F16C
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    return __builtin_cpu_supports("avx512f") ? 2 : 1;
#else
    return 0;
#endif
}

int chosen = -1;

int level() { return chosen < 0 ? chosen = detect() : chosen; }

const Work linear_works[][2] = {
    {scalar::rows_part, scalar::columns_part},
#if defined(__x86_64__)
    {avx2::rows_part, avx2::columns_part},
    {avx512::rows_part, avx512::columns_part},
#endif
};
void (*const widens[])(const Layer &, const char *, int32_t, int64_t, int64_t, int64_t, float *) = {
    scalar::widen,
#if defined(__x86_64__)
    avx2::widen,
    avx512::widen,
#endif
};
const Work panel_works[][2] = {
    {scalar::rows_panel, scalar::columns_panel},
#if defined(__x86_64__)
    {avx2::rows_panel, avx2::columns_panel},
    {avx512::rows_panel, avx512::columns_panel},
#endif
};

}  // namespace

extern "C" {

int hfq_abi() { return 2; }

// 0 scalar, 1 AVX2, 2 AVX-512; what the processor has.
int hfq_detected() { return detect(); }

// Chooses a lower level, for tests; returns the level that runs.
int hfq_use(int wanted) { return chosen = wanted < 0 ? detect() : (int)least(wanted, detect()); }

int64_t hfq_most_rows() { return MOST_ROWS; }

// Floats that `scratch` of hfq_linear must hold.
int64_t hfq_scratch(const Layer *layer, int64_t rows) {
    return padded_rows(*layer, rows) * (padded_columns(*layer) + layer->groups);
}

// y[m, n] = sum over k of x[m, k] W[n, k], for 1 to MOST_ROWS rows; strides in elements, the last dimension contiguous.
// Not 0 where nothing was computed: -1 for another number of rows, -2 for an index that leaves its range.
int hfq_linear(const Layer *layer, const char *x, int32_t x_dtype, int64_t rows, int64_t x_stride, char *y, int32_t y_dtype,
               int64_t y_stride, float *scratch, int threads) {
    if (rows < 1 || rows > MOST_ROWS) return -1;
    if (!has_groups(*layer)) return -2;
    int64_t stride = padded_columns(*layer);
    widens[level()](*layer, x, x_dtype, rows, x_stride, stride, scratch);
    bool columns = has_columns(*layer);
    threads = worthwhile(threads, rows * layer->in_features * layer->out_features);
    int64_t width = columns ? tile_columns(*layer, rows, threads) : TILE_ROWS;
    Call call = {layer, scratch, scratch + padded_rows(*layer, rows) * stride, rows, stride, width, y, y_stride, y_dtype};
    run_parts(linear_works[level()][columns], &call, (layer->out_features + width - 1) / width, threads);
    return 0;
}

// Weights of output rows [start, start + count): [count, in_features], or for GPTQ and AWQ [in_features, count]; float32 or bfloat16.
// Not 0 where nothing was computed, as hfq_linear.
int hfq_dequantize(const Layer *layer, int64_t start, int64_t count, char *out, int32_t dtype, int threads) {
    if (!has_groups(*layer)) return -2;
    Panel panel = {layer, start, count, out, dtype};
    bool columns = has_columns(*layer);
    threads = worthwhile(threads, count * layer->in_features);
    int64_t width = columns ? panel_columns(*layer) : PANEL_ROWS;
    run_parts(panel_works[level()][columns], &panel, (count + width - 1) / width, threads);
    return 0;
}

}  // extern "C"

#else  // HFQ_PASS: what follows is compiled once for each instruction set, and must use no function of the standard library

#if HFQ_PASS == 1 && !defined(HFQ_EMULATE)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#elif HFQ_PASS == 2 && !defined(HFQ_EMULATE)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f")
#endif
#endif

namespace {
namespace HFQ_NAME {

#if HFQ_PASS == 2
const int W = 16;
#else
const int W = 8;
#endif
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef int16_t vh __attribute__((vector_size(2 * W)));
typedef uint16_t vuh __attribute__((vector_size(2 * W)));
typedef int8_t vc __attribute__((vector_size(W)));
typedef uint8_t vuc __attribute__((vector_size(W)));
typedef uint8_t vub __attribute__((vector_size(32)));

template <class V> static HFQ_INLINE V load(const void *p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(V));
    return v;
}
template <class V> static HFQ_INLINE void store(void *p, V v) { __builtin_memcpy(p, &v, sizeof(V)); }
static HFQ_INLINE vf all(float value) { return value - (vf){}; }
static HFQ_INLINE vf to_float(vu v) { return __builtin_convertvector((vi)v, vf); }

#if HFQ_PASS == 1 && !defined(HFQ_EMULATE)
static HFQ_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
static HFQ_INLINE vf from_half(vuh v) { return (vf)_mm256_cvtph_ps((__m128i)v); }
#elif HFQ_PASS == 2 && !defined(HFQ_EMULATE)
static HFQ_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
static HFQ_INLINE vf from_half(vuh v) { return (vf)_mm512_cvtph_ps((__m256i)v); }
#else
static inline vf fma(vf a, vf b, vf c) { return a * b + c; }
static inline vf from_half(vuh v) {
    vf out;
    for (int i = 0; i < W; i++) out[i] = half_to_float(v[i]);
    return out;
}
#endif

static HFQ_INLINE float sum_of(vf v) {
    float half[W / 2];
    for (int i = 0; i < W / 2; i++) half[i] = v[i] + v[i + W / 2];
    for (int size = W / 4; size; size /= 2)
        for (int i = 0; i < size; i++) half[i] += half[i + size];
    return half[0];
}

// The activations as floats, padded with zeros to `stride` channels and `padded` rows; for GPTQ and AWQ also their sums by group.
static void widen(const Layer &layer, const char *x, int32_t dtype, int64_t rows, int64_t x_stride, int64_t stride, float *out) {
    int64_t size = layer.in_features, padded = padded_rows(layer, rows);
    for (int64_t m = 0; m < rows; m++) {
        const char *from = x + m * x_stride * (dtype == F32 ? 4 : 2);
        float *to = out + m * stride;
        int64_t k = 0;
        if (dtype == F32) { __builtin_memcpy(to, from, 4 * size); continue; }
        for (; k + W <= size; k += W) {
            vuh narrow = load<vuh>(from + 2 * k);
            store(to + k, dtype == F16 ? from_half(narrow) : (vf)(__builtin_convertvector(narrow, vu) << 16));
        }
        for (; k < size; k++) to[k] = dtype == F16 ? half_to_float(load16(from + 2 * k)) : as_float((uint32_t)load16(from + 2 * k) << 16);
    }
    for (int64_t m = 0; m < rows; m++) __builtin_memset(out + m * stride + size, 0, 4 * (stride - size));
    __builtin_memset(out + rows * stride, 0, 4 * (padded - rows) * stride);
    if (!has_columns(layer) || is_scattered(layer)) return;
    for (int64_t m = 0; m < padded; m++)
        for (int64_t g = 0; g < layer.groups; g++) {
            vf sum = all(0.0f);
            float rest = 0;
            int64_t k = g * layer.block_in, stop = least(k + layer.block_in, size);
            for (; k + W <= stop; k += W) sum += load<vf>(out + m * stride + k);
            for (; k < stop; k++) rest += out[m * stride + k];
            out[padded * stride + m * layer.groups + g] = sum_of(sum) + rest;
        }
}

// ---- Rows of codes --------------------------------------------------------------------------------------------------

// W codes as floats; e4m3 comes out divided by 256, and its NaN codes as numbers.
template <int KIND> static HFQ_INLINE vf decode(const char *p) {
    if (KIND == E5M2) return from_half(__builtin_convertvector(load<vuc>(p), vuh) << 8);
    return from_half((vuh)((__builtin_convertvector(load<vc>(p), vh) << 7) & (int16_t)0xBFFF));
}

// The values of W codes of four bits.
static HFQ_INLINE vf look_up(vu codes, const float *values) {
#if HFQ_PASS == 1 && !defined(HFQ_EMULATE)
    __m256 low = _mm256_permutevar8x32_ps((__m256)load<vf>(values), (__m256i)codes);
    __m256 high = _mm256_permutevar8x32_ps((__m256)load<vf>(values + 8), (__m256i)codes);
    return (vf)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32((__m256i)codes, 28)));
#elif HFQ_PASS == 2 && !defined(HFQ_EMULATE)
    return (vf)_mm512_permutexvar_ps((__m512i)codes, (__m512)load<vf>(values));
#else
    vf out;
    for (int i = 0; i < W; i++) out[i] = values[codes[i]];
    return out;
#endif
}

static HFQ_INLINE vf decode_nibbles(const char *p, const float *values) {
    vu words, shifts;
    HFQ_UNROLL
    for (int i = 0; i < W; i++) words[i] = load32(p + i / 8 * 4), shifts[i] = (uint32_t)(i % 8 * 4);
    return look_up(words >> shifts & 15u, values);
}

template <int KIND> constexpr int64_t bytes_of(int64_t codes) { return KIND == NIBBLES ? (codes + 1) / 2 : codes; }

// 2 * W codes.
template <int KIND> static HFQ_INLINE void decode_two(const char *p, const float *values, vf &low, vf &high) {
    if constexpr (KIND == NIBBLES) {
        low = decode_nibbles(p, values), high = decode_nibbles(p + W / 2, values);
        return;
    }
#if HFQ_PASS == 1 && !defined(HFQ_EMULATE)
    __m128i codes = _mm_loadu_si128((const __m128i *)p);
    __m256i wide = KIND == E4M3
        ? _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16((short)0xBFFF))
        : _mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8);
    low = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(wide)), high = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(wide, 1));
#else
    low = decode<KIND>(p), high = decode<KIND>(p + W);
#endif
}

// Whether any of these e4m3 codes is NaN.
static bool has_nan(const char *codes, int64_t count) {
    vub worst = {};
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        vub rest = load<vub>(codes + i) & 0x7F;
        worst = rest > worst ? rest : worst;
    }
    uint64_t found = 0, parts[4];
    store(parts, (vub)(worst == 0x7F));
    for (; i < count; i++) found |= (codes[i] & 0x7F) == 0x7F;
    return found | parts[0] | parts[1] | parts[2] | parts[3];
}

// Weights [k, k + count) of one output row, as the reference computes them.
template <int KIND> static void decode_row(const Layer &layer, int64_t n, int64_t k, int64_t count, float *out) {
    const char *row = layer.codes + n * layer.row_nbytes;
    const float *values = (const float *)layer.zeros;
    int64_t first = n / layer.block_out * layer.scale_stride;
    for (int64_t at = k, stop; at < k + count; at = stop) {
        int64_t segment = at / layer.block_in;
        stop = least(k + count, (segment + 1) * layer.block_in);
        float scale = scale_at(layer, first + segment);
        bool slow = KIND == E4M3 && has_nan(row + at, stop - at);
        int64_t i = at;
        vf unit = all(KIND == E4M3 ? 256.0f : 1.0f), low, high;
        if (!slow)
            for (; i + 2 * W <= stop; i += 2 * W) {
                decode_two<KIND>(row + bytes_of<KIND>(i), values, low, high);
                low *= unit, high *= unit;
                store(out + i - k, layer.divides ? low / scale : low * scale);
                store(out + i - k + W, layer.divides ? high / scale : high * scale);
            }
        for (; i < stop; i++) {
            float value = KIND == NIBBLES ? values[(uint8_t)row[i / 2] >> i % 2 * 4 & 15] : code_value((uint8_t)row[i], KIND);
            out[i - k] = layer.divides ? value / scale : value * scale;
        }
    }
}

// 4 * W codes times as many activations; the largest magnitude among the codes is kept in `worst`.
template <int KIND> static HFQ_INLINE void dot_codes(const char *codes, const float *values, const float *x, vf *sum, vub &worst) {
    HFQ_UNROLL
    for (int j = 0; j < 4; j += 2) {
        vf low, high;
        decode_two<KIND>(codes + bytes_of<KIND>(j * W), values, low, high);
        sum[j] = fma(low, load<vf>(x + j * W), sum[j]);
        sum[j + 1] = fma(high, load<vf>(x + (j + 1) * W), sum[j + 1]);
    }
    if (KIND != E4M3) return;
    HFQ_UNROLL
    for (int j = 0; j < 4 * W; j += 32) {
        vub rest = load<vub>(codes + j) & 0x7F;
        worst = rest > worst ? rest : worst;
    }
}

// The product with one activation row, straight from the codes.
template <int KIND> static float dot_row(const Layer &layer, int64_t n, const float *x) {
    const char *row = layer.codes + n * layer.row_nbytes;
    const float *values = (const float *)layer.zeros;
    int64_t first = n / layer.block_out * layer.scale_stride, size = layer.in_features;
    vf total = all(0.0f);
    vub worst = {};
    for (int64_t at = 0, stop, segment = 0; at < size; at = stop, segment++) {
        stop = least(size, at + layer.block_in);
        vf sum[4] = {};
        int64_t i = at;
        for (; i + 4 * W <= stop; i += 4 * W) dot_codes<KIND>(row + bytes_of<KIND>(i), values, x + i, sum, worst);
        if (i < stop) {
            char codes[4 * W];
            float part[4 * W];
            __builtin_memset(codes, 0, sizeof(codes)), __builtin_memset(part, 0, sizeof(part));
            __builtin_memcpy(codes, row + bytes_of<KIND>(i), bytes_of<KIND>(stop - i)), __builtin_memcpy(part, x + i, 4 * (stop - i));
            dot_codes<KIND>(codes, values, part, sum, worst);
        }
        vf piece = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        float scale = scale_at(layer, first + segment);
        total = layer.divides ? total + piece / scale : fma(piece, all(scale), total);
    }
    uint8_t magnitudes[32], found = 0;
    store(magnitudes, worst);
    for (int i = 0; i < 32; i++) found = found > magnitudes[i] ? found : magnitudes[i];
    if (KIND == E4M3 && found == 0x7F) return as_float(0x7FC00000);
    return KIND == E4M3 ? 256.0f * sum_of(total) : sum_of(total);
}

// sums[r][m] += w[r] . x[m] over a step of decoded weights, for 4 output rows and ROWS activation rows.
template <int ROWS>
static void multiply_step(const float *w, const float *x, int64_t stride, int64_t length, float *sums, int64_t sum_stride) {
    vf sum[4][ROWS];
    HFQ_UNROLL
    for (int r = 0; r < 4; r++)
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++) sum[r][m] = load<vf>(sums + r * sum_stride + m * W);
    for (int64_t k = 0; k < length; k += W) {
        vf weights[4];
        HFQ_UNROLL
        for (int r = 0; r < 4; r++) weights[r] = load<vf>(w + r * STEP + k);
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++) {
            vf value = load<vf>(x + m * stride + k);
            HFQ_UNROLL
            for (int r = 0; r < 4; r++) sum[r][m] = fma(weights[r], value, sum[r][m]);
        }
    }
    HFQ_UNROLL
    for (int r = 0; r < 4; r++)
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++) store(sums + r * sum_stride + m * W, sum[r][m]);
}

template <int KIND> static void rows_tile(const Call &call, int64_t n, int64_t count, float *scratch) {
    const Layer &layer = *call.layer;
    float *w = scratch, *sums = scratch + TILE_ROWS * STEP;
    int64_t sum_stride = call.rows * W;
    __builtin_memset(scratch, 0, sizeof(float) * (TILE_ROWS * STEP + TILE_ROWS * sum_stride));
    for (int64_t k = 0; k < layer.in_features; k += STEP) {
        int64_t length = least(STEP, layer.in_features - k);
        if (length < STEP) __builtin_memset(w, 0, sizeof(float) * TILE_ROWS * STEP);
        for (int64_t r = 0; r < count; r++) decode_row<KIND>(layer, n + r, k, length, w + r * STEP);
        for (int64_t r = 0; r < count; r += 4)
            for (int64_t m = 0; m < call.rows; m += 3) {
                float *to = sums + r * sum_stride + m * W;
                const float *x = call.x32 + m * call.stride + k;
                if (call.rows - m >= 3) multiply_step<3>(w + r * STEP, x, call.stride, length, to, sum_stride);
                else if (call.rows - m == 2) multiply_step<2>(w + r * STEP, x, call.stride, length, to, sum_stride);
                else multiply_step<1>(w + r * STEP, x, call.stride, length, to, sum_stride);
            }
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t m = 0; m < call.rows; m++) put(call, m, n + r, sum_of(load<vf>(sums + r * sum_stride + m * W)));
}

template <int KIND> static void rows_of(const Call &call, int64_t n, int64_t count, float *scratch) {
    if (call.rows > 1) return rows_tile<KIND>(call, n, count, scratch);
    for (int64_t r = n; r < n + count; r++) put(call, 0, r, dot_row<KIND>(*call.layer, r, call.x32));
}

static void rows_part(const void *context, int64_t part, float *scratch) {
    const Call &call = *(const Call *)context;
    int64_t n = part * call.width, count = least(call.width, call.layer->out_features - n);
    switch (call.layer->kind) {
        case E4M3: return rows_of<E4M3>(call, n, count, scratch);
        case E5M2: return rows_of<E5M2>(call, n, count, scratch);
        default: return rows_of<NIBBLES>(call, n, count, scratch);
    }
}

static void store_panel(char *out, int32_t dtype, int64_t place, const float *values, int64_t count) {
    if (dtype == F32) { __builtin_memcpy(out + 4 * place, values, 4 * count); return; }
    int64_t i = 0;
    for (; i + W <= count; i += W) {
        vu bits = load<vu>(values + i);
        vu rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
        vu is_nan = (vu)((bits & 0x7FFFFFFF) > 0x7F800000);
        store(out + 2 * (place + i), __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), vuh));
    }
    for (; i < count; i++) {
        uint16_t value = float_to_bfloat(values[i]);
        __builtin_memcpy(out + 2 * (place + i), &value, 2);
    }
}

static void rows_panel(const void *context, int64_t part, float *scratch) {
    const Panel &panel = *(const Panel *)context;
    const Layer &layer = *panel.layer;
    int64_t first = part * PANEL_ROWS, stop = least(first + PANEL_ROWS, panel.count);
    for (int64_t r = first; r < stop; r++)
        for (int64_t k = 0; k < layer.in_features; k += 1024) {
            int64_t count = least(1024, layer.in_features - k);
            if (layer.kind == E4M3) decode_row<E4M3>(layer, panel.start + r, k, count, scratch);
            else if (layer.kind == E5M2) decode_row<E5M2>(layer, panel.start + r, k, count, scratch);
            else decode_row<NIBBLES>(layer, panel.start + r, k, count, scratch);
            store_panel(panel.out, panel.dtype, r * layer.in_features + k, scratch, count);
        }
}

// ---- Columns: GPTQ's bit streams, AWQ's words ----------------------------------------------------------------------------------
// 32 codes of a column take BITS words, one below the other; W neighbouring columns are decoded at once.

template <int BITS, int CODE> struct Place {  // of a code among its 32
    static const int word = CODE * BITS / 32, shift = CODE * BITS % 32;
    static const bool straddles = shift + BITS > 32, is_high = shift + BITS > 31;
    static const int exponent = straddles || is_high ? 0 : shift;  // a code that is not shifted down is 2**exponent too large
};

template <int BITS, int CODE, bool SHIFTED>
static HFQ_INLINE vf code_at(const char *words, int64_t pitch) {
    typedef Place<BITS, CODE> P;
    const uint32_t mask = (1u << BITS) - 1;
    vu word = load<vu>(words + P::word * pitch);
    if (P::straddles) return to_float((word >> P::shift | load<vu>(words + (P::word + 1) * pitch) << ((32 - P::shift) % 32)) & mask);
    if (P::is_high) return to_float(word >> P::shift);
    if (SHIFTED) return to_float(word >> P::shift & mask);
    return to_float(word & (mask << P::shift));
}

template <int BITS, int CODE> static void exponents(float *powers) {  // what undoes the codes' exponents
    powers[CODE] = as_float((uint32_t)(127 - Place<BITS, CODE>::exponent) << 23);
    if constexpr (CODE > 0) exponents<BITS, CODE - 1>(powers);
}

// sum[m] += code * spread[code][m], for the codes [CODE, STOP) of one column vector.
template <int BITS, int ROWS, int PARTS, int CODE, int STOP>
static HFQ_INLINE void add_codes(const char *words, int64_t pitch, const float *spread, vf (*sum)[PARTS]) {
    if constexpr (CODE < STOP) {
        vf code = code_at<BITS, CODE, false>(words, pitch);
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++)
            sum[m][CODE % PARTS] = fma(code, load<vf>(spread + (CODE * ROWS + m) * W), sum[m][CODE % PARTS]);
        add_codes<BITS, ROWS, PARTS, CODE + 1, STOP>(words, pitch, spread, sum);
    }
}

// The least number of codes that take whole words: those of one word, or all 32 where some lie in two words.
template <int BITS> constexpr int unit() { return 32 % BITS == 0 ? 32 / BITS : 32; }

// [codes][W] floats of one column vector.
template <int BITS, int CODE> static HFQ_INLINE void spread_codes(const char *words, int64_t pitch, float *out) {
    if constexpr (CODE < unit<BITS>()) {
        store(out + CODE * W, code_at<BITS, CODE, true>(words, pitch));
        spread_codes<BITS, CODE + 1>(words, pitch, out);
    }
}
template <int BITS> static void decode_words(const char *words, int64_t pitch, int64_t codes, float *out) {
    for (int64_t c = 0; c < codes; c += unit<BITS>()) spread_codes<BITS, 0>(words + c * BITS / 32 * pitch, pitch, out + c * W);
}
// AWQ: a word, or two, for each code.
static void decode_awq(const char *words, int64_t pitch, int64_t codes, float *out) {
    vu shifts;
    for (int j = 0; j < W; j++) shifts[j] = (uint32_t)(4 * awq_place(j % 8));
    for (int64_t c = 0; c < codes; c++) {
        vu word = (vu){} + load32(words + c * pitch);
#if HFQ_PASS == 2
        uint32_t high = load32(words + c * pitch + 4);
        HFQ_UNROLL
        for (int j = 8; j < W; j++) word[j] = high;
#endif
        store(out + c * W, to_float(word >> shifts & 15u));
    }
}
typedef void (*Decode)(const char *words, int64_t pitch, int64_t codes, float *out);
static Decode decoder(const Layer &layer) {
    const int bits = layer.kind == AWQ ? 0 : layer.bits;
    if (bits == 0) return decode_awq;
    return bits == 2 ? decode_words<2> : bits == 3 ? decode_words<3> : bits == 4 ? decode_words<4> : decode_words<8>;
}

// sum[m] += code * spread[code][m] for up to 32 codes of one column vector: decoded in registers if BITS is not 0.
template <int BITS, int ROWS, int PARTS>
static HFQ_INLINE void add_block(
    const char *words, int64_t pitch, int64_t codes, const float *spread, vf (*sum)[PARTS], Decode decode_block) {
    if constexpr (BITS != 0) {
        for (int64_t c = 0; c < codes; c += unit<BITS>())
            add_codes<BITS, ROWS, PARTS, 0, unit<BITS>()>(words + c * BITS / 32 * pitch, pitch, spread + c * ROWS * W, sum);
    } else {
        float decoded[32 * W];
        decode_block(words, pitch, codes, decoded);
        int64_t c = 0;
        for (; c + PARTS <= codes; c += PARTS)
            HFQ_UNROLL
            for (int p = 0; p < PARTS; p++) {
                vf code = load<vf>(decoded + (c + p) * W);
                HFQ_UNROLL
                for (int m = 0; m < ROWS; m++) sum[m][p] = fma(code, load<vf>(spread + ((c + p) * ROWS + m) * W), sum[m][p]);
            }
        for (; c < codes; c++)
            for (int m = 0; m < ROWS; m++)
                sum[m][0] = fma(load<vf>(decoded + c * W), load<vf>(spread + (c * ROWS + m) * W), sum[m][0]);
    }
}

// The scales of `count` columns of a group, padded with zeros to whole vectors.
static void group_scales(const Layer &layer, int64_t group, int64_t n, int64_t count, float *out) {
    int64_t place = group * layer.out_features + n, i = 0;
    if (layer.scale_dtype == F16)
        for (; i + W <= count; i += W) store(out + i, from_half(load<vuh>(layer.scales + 2 * (place + i))));
    for (; i < count; i++) out[i] = scale_at(layer, place + i);
    for (; i % W; i++) out[i] = 0;
}

static void group_zeros(const Layer &layer, int64_t group, int64_t n, int64_t count, float *out) {
    int64_t i = 0;
    if (layer.bits == 4) {
        vu shifts, mask = (vu){} + 15u;
        for (int j = 0; j < W; j++) shifts[j] = (uint32_t)(layer.kind == AWQ ? awq_place(j % 8) : j % 8) * 4;
        const char *row = layer.zeros + 4 * group * layer.zero_words;
        for (; i + W <= count; i += W) {
            uint32_t low = load32(row + (n + i) / 2), high = W == 16 ? load32(row + (n + i) / 2 + 4) : 0;
            if (layer.zero_reading == WORD_PLUS_ONE) low += word_ones(4), high += word_ones(4);
            vu words;
            for (int j = 0; j < W; j++) words[j] = j < 8 ? low : high;
            words = words >> shifts & mask;
            if (layer.zero_reading == FIELD_PLUS_ONE) words += 1;
            if (layer.zero_reading == MASKED_PLUS_ONE) words = (words + 1) & mask;
            store(out + i, to_float(words));
        }
    }
    for (; i < count; i++) out[i] = zero_at(layer, group, n + i);
    for (; i % W; i++) out[i] = 0;
}

// The words of a column vector's codes [k, k + codes); one that is cut off by the last column is copied and padded.
struct Words {
    const char *at;
    int64_t pitch;
    char copy[32 * 4 * W];
    HFQ_INLINE void take(const Layer &layer, int64_t k, int64_t codes, int64_t n, int64_t columns) {
        int64_t rows = codes, nbytes = columns / 2;
        if (layer.kind == AWQ) {
            pitch = 4 * layer.zero_words, at = layer.codes + k * pitch + n / 2;
        } else {
            rows = codes * layer.bits / 32, nbytes = 4 * columns;
            pitch = 4 * layer.out_features, at = layer.codes + k * layer.bits / 32 * pitch + 4 * n;
        }
        if (columns >= W) return;
        __builtin_memset(copy, 0, sizeof(copy));
        for (int64_t r = 0; r < rows; r++) __builtin_memcpy(copy + 4 * W * r, at + pitch * r, nbytes);
        at = copy, pitch = 4 * W;
    }
};

// Rows that were added to fill a pass are left out.
static void put_tile(const Call &call, int64_t row, int64_t rows, int64_t n, int64_t count, const float *y, int64_t wide) {
    for (int64_t m = 0; m < least(rows, call.rows - row); m++)
        for (int64_t i = 0; i < count; i++) put(call, row + m, n + i, y[m * wide + i]);
}

// Groups one after the other: sums of codes first, the group's scale and zero point once at its end.
template <int BITS, int ROWS> static void columns_tile(const Call &call, int64_t row, int64_t n, int64_t count, float *scratch) {
    const int PARTS = ROWS == 1 ? 4 : 1;
    const Layer &layer = *call.layer;
    int64_t wide = (count + W - 1) / W * W, size = layer.in_features;
    float *y = scratch, *sums = y + ROWS * wide, *scales = sums + ROWS * wide, *zeros = scales + wide, *spread = zeros + wide;
    float powers[32];
    for (int c = 0; c < 32; c++) powers[c] = 1;
    if constexpr (BITS != 0)
        for (int c = 0; c < 32; c += unit<BITS>()) exponents<BITS, unit<BITS>() - 1>(powers + c);
    __builtin_memset(y, 0, sizeof(float) * ROWS * wide);
    for (int64_t group = 0; group < layer.groups; group++) {
        int64_t start = group * layer.block_in, stop = least(start + layer.block_in, size);
        __builtin_memset(sums, 0, sizeof(float) * ROWS * wide);
        for (int64_t k = start; k < stop; k += 32) {
            int64_t codes = least(32, stop - k);
            for (int64_t c = 0; c < codes; c++)
                HFQ_UNROLL
                for (int m = 0; m < ROWS; m++)
                    store(spread + (c * ROWS + m) * W, all(call.x32[(row + m) * call.stride + k + c] * powers[c]));
            for (int64_t i = 0; i < wide; i += W) {
                Words words;
                words.take(layer, k, codes, n + i, count - i);
                vf sum[ROWS][PARTS];
                HFQ_UNROLL
                for (int m = 0; m < ROWS; m++) {
                    sum[m][0] = load<vf>(sums + m * wide + i);
                    HFQ_UNROLL
                    for (int p = 1; p < PARTS; p++) sum[m][p] = all(0.0f);
                }
                add_block<BITS, ROWS, PARTS>(words.at, words.pitch, codes, spread, sum, decoder(layer));
                HFQ_UNROLL
                for (int m = 0; m < ROWS; m++) {
                    vf whole = sum[m][0];
                    if (PARTS == 4) whole = (sum[m][0] + sum[m][PARTS / 4]) + (sum[m][PARTS / 2] + sum[m][PARTS - 1]);
                    store(sums + m * wide + i, whole);
                }
            }
        }
        group_scales(layer, group, n, count, scales);
        group_zeros(layer, group, n, count, zeros);
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++) {
            vf shift = all(-call.sums[(row + m) * layer.groups + group]);
            for (int64_t i = 0; i < wide; i += W) {
                vf centred = fma(load<vf>(zeros + i), shift, load<vf>(sums + m * wide + i));
                store(y + m * wide + i, fma(load<vf>(scales + i), centred, load<vf>(y + m * wide + i)));
            }
        }
    }
    put_tile(call, row, ROWS, n, count, y, wide);
}

// Scales and zero points of all groups for the columns of a tile, [groups, wide] each.
static void all_groups(const Layer &layer, int64_t n, int64_t count, int64_t wide, float *scales, float *zeros) {
    for (int64_t group = 0; group < layer.groups; group++) {
        group_scales(layer, group, n, count, scales + group * wide);
        group_zeros(layer, group, n, count, zeros + group * wide);
    }
}

// Each code with the scale and zero point of its own group.
template <int ROWS> static void scattered_tile(const Call &call, int64_t row, int64_t n, int64_t count, float *scratch) {
    const Layer &layer = *call.layer;
    const Decode decode_block = decoder(layer);
    int64_t wide = (count + W - 1) / W * W, size = layer.in_features;
    float *scales = scratch, *zeros = scales + layer.groups * wide, *y = zeros + layer.groups * wide, *decoded = y + ROWS * wide;
    all_groups(layer, n, count, wide, scales, zeros);
    __builtin_memset(y, 0, sizeof(float) * ROWS * wide);
    for (int64_t k = 0; k < size; k += 32) {
        int64_t codes = least(32, size - k), places[32];
        for (int64_t c = 0; c < codes; c++) places[c] = group_of(layer, k + c) * wide;
        for (int64_t i = 0; i < wide; i += W) {
            Words words;
            words.take(layer, k, codes, n + i, count - i);
            decode_block(words.at, words.pitch, codes, decoded);
            vf sum[ROWS];
            HFQ_UNROLL
            for (int m = 0; m < ROWS; m++) sum[m] = load<vf>(y + m * wide + i);
            for (int64_t c = 0; c < codes; c++) {
                vf weight = (load<vf>(decoded + c * W) - load<vf>(zeros + places[c] + i)) * load<vf>(scales + places[c] + i);
                HFQ_UNROLL
                for (int m = 0; m < ROWS; m++) sum[m] = fma(weight, all(call.x32[(row + m) * call.stride + k + c]), sum[m]);
            }
            HFQ_UNROLL
            for (int m = 0; m < ROWS; m++) store(y + m * wide + i, sum[m]);
        }
    }
    put_tile(call, row, ROWS, n, count, y, wide);
}

template <int ROWS> static void several_rows(const Call &call, int64_t row, int64_t n, int64_t count, float *scratch) {
    if (is_scattered(*call.layer)) scattered_tile<ROWS>(call, row, n, count, scratch);
    else columns_tile<0, ROWS>(call, row, n, count, scratch);
}

static void one_row(const Call &call, int64_t row, int64_t n, int64_t count, float *scratch) {
    if (is_scattered(*call.layer)) return scattered_tile<1>(call, row, n, count, scratch);
    if (call.layer->kind == AWQ) return columns_tile<0, 1>(call, row, n, count, scratch);
    switch (call.layer->bits) {
        case 2: return columns_tile<2, 1>(call, row, n, count, scratch);
        case 3: return columns_tile<3, 1>(call, row, n, count, scratch);
        case 4: return columns_tile<4, 1>(call, row, n, count, scratch);
        default: return columns_tile<8, 1>(call, row, n, count, scratch);
    }
}

static void columns_part(const void *context, int64_t part, float *scratch) {
    const Call &call = *(const Call *)context;
    int64_t n = part * call.width, count = least(call.width, call.layer->out_features - n);
    for (int64_t row = 0, rest; row < call.rows; row += PASS) {
        rest = call.rows - row;
        if (rest == 1) one_row(call, row, n, count, scratch);
        else if (rest <= PASS / 2) several_rows<PASS / 2>(call, row, n, count, scratch);
        else several_rows<PASS>(call, row, n, count, scratch);
    }
}

static void columns_panel(const void *context, int64_t part, float *scratch) {
    const Panel &panel = *(const Panel *)context;
    const Layer &layer = *panel.layer;
    const Decode decode_block = decoder(layer);
    int64_t first = part * panel_columns(layer), count = least(panel_columns(layer), panel.count - first), size = layer.in_features, wide = (count + W - 1) / W * W;
    float *scales = scratch, *zeros = scales + layer.groups * wide, *decoded = zeros + layer.groups * wide;
    all_groups(layer, panel.start + first, count, wide, scales, zeros);
    for (int64_t k = 0; k < size; k += 32) {
        int64_t codes = least(32, size - k), places[32];
        for (int64_t c = 0; c < codes; c++) places[c] = group_of(layer, k + c) * wide;
        for (int64_t i = 0; i < count; i += W) {
            Words words;
            words.take(layer, k, codes, panel.start + first + i, count - i);
            decode_block(words.at, words.pitch, codes, decoded);
            for (int64_t c = 0; c < codes; c++) {
                float *code = decoded + c * W;
                store(code, (load<vf>(code) - load<vf>(zeros + places[c] + i)) * load<vf>(scales + places[c] + i));
                store_panel(panel.out, panel.dtype, (k + c) * panel.count + first + i, code, least(W, count - i));
            }
        }
    }
}

}  // namespace HFQ_NAME
}  // namespace

#if HFQ_PASS != 0 && !defined(HFQ_EMULATE)
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#endif  // HFQ_PASS
