// Multiplies by packed weights on a CPU, reading the checkpoint's bytes where they lie, at any alignment.
//
// Plain C ABI, no torch and no Python headers; hfq/kernels/cpp/library.py compiles this file and loads it. The file includes
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
#include <stdlib.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "amx_tiles.h"

namespace {

enum Kind { E4M3 = 0, E5M2 = 1, NIBBLES = 2, INT8 = 3, QUADS = 4, GPTQ = 5, AWQ = 6 };
enum Dtype { F32 = 0, BF16 = 1, F16 = 2, E8M0 = 3, E4M3_SCALED = 4, NESTED = 5 };
enum ZeroReading { STORED = 0, FIELD_PLUS_ONE = 1, MASKED_PLUS_ONE = 2, WORD_PLUS_ONE = 3 };
enum RowZeros { NONE = 0, GROUP_WORDS = 1, OUTPUT_WORDS = 2, BYTES = 3, ADDED = 4 };

// One packed layer; hfq/kernels/cpp/layers.py fills it in.
// Rows of codes: W[n, k] = (value(codes[n, k]) - zero) * scale, both at n / block_out * scale_stride + g * scale_step with
// g = index[k] or, without an index, k / block_in.
//   NIBBLES: two codes a byte, the lower half first unless `high_first`; `values` are the 16 floats that they stand for. Where those
//   are integers, times a power of two, `integers` are 16 bytes, value / unit + offset; with zero points the unit is 1, the offset 15.
//   INT8: times `shared`. QUADS (AWQ's gemv_fast): four rows share a word of 16 bits, and W = code * scale + zero.
// Scales that are E4M3 codes are multiplied by `shared`, or divided by it. NESTED ones are codes themselves: nested_values[code] *
// nested_scales[place / nested_size] + shared.
// Zero points of rows: GROUP_WORDS has nibbles along the groups, `zero_words` words a row; OUTPUT_WORDS nibbles less 8 along the
// outputs, [outputs / 8, groups] words; BYTES are signed and lie as the scales do; ADDED are floats that are added.
// GPTQ: W[n, k] = scales[g, n] * (q[k, n] - z[g, n]). Where there is an `index` of no bytes, it is the channels, int32, in the order of their
// groups: the layer is sorted (act_order.h). Rows of words are `row_nbytes` apart.
// AWQ: the same; row k of the codes, and row g of the zero points, are words of eight columns each (`zero_words` words).
struct Layer {
    const char *codes, *scales, *zeros, *index, *values, *integers, *nested_scales, *nested_values;
    int64_t in_features, out_features;
    int64_t block_out, block_in, scale_stride, scale_step, nested_size;
    int64_t groups, zero_words, row_nbytes;
    float shared, unit;
    int32_t kind, bits, scale_dtype, divides, zero_reading, index_nbytes;
    int32_t row_zeros, zero_dtype, high_first, offset;
};

// A layer's outputs in numbered parts of `width`: the first begins at 0, and the last takes what is left.
struct Cut {
    int64_t outputs, begin, width, parts;  // the first would begin at `begin`, which is 0 or less
    int64_t first(int64_t part) const { return part == 0 ? 0 : begin + part * width; }
    int64_t count(int64_t part) const { return (part + 1 == parts ? outputs : begin + (part + 1) * width) - first(part); }
};

// One multiplication. `x32` holds [rows, stride] floats, zero beyond in_features. `digits` are the activations as integers, three
// bytes each, where those are multiplied; `units` what the integers of a span are counted in; `totals` sums of digits.
struct Call {
    const Layer *layer;
    const float *x32;
    int64_t rows, stride;
    Cut cut;
    char *y;
    int64_t y_stride;
    int32_t y_dtype;
    const char *digits;
    const float *units;
    const int32_t *totals;
    const float *ordered;  // where e4m3 codes are read as small floats: the activations for that, and after them two factors for each row
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
const int64_t GROUPED_FLOATS = 2 << 20;  // of activations as the kernels read them, of layers that are taken together
const int64_t STEP = 256;            // input channels of a tile of decoded weights
const int64_t TILE_ROWS = 16;        // output rows of such a tile
const int64_t PASS = 8;              // activation rows that share one decoding of GPTQ's codes
const int64_t PANEL_ROWS = 4;        // output rows of a part of a panel
const int64_t CHUNK = 32;            // input channels of a column whose codes are unpacked together
const int64_t SPAN = 128;            // input channels whose activations are counted in one unit
const int64_t DIGITS = 3;            // bytes of an activation as an integer
const int64_t DIGIT_ROWS = 8;        // the most activation rows for which rows of codes are multiplied as integers
const int64_t MOST_COLUMNS = 2048;   // output columns of a part for one row, of a multiple of 128
const int64_t LONG_COLUMNS = 16384;  // and where they are read along rows of words (vnni.h), of which three floats each are kept
const int64_t AHEAD = 4096;          // bytes of codes that are asked for before they are read: the next page
const int64_t ORDERED_ROWS = 8;      // the most activation rows for which e4m3 codes are read as small floats
const int64_t TILED_SCRATCH = 688 << 10;  // bytes that each thread keeps in place of SCRATCH floats, where there are tiles (bfloat16.h)
const int64_t SORTED_SCRATCH = 3 << 20;  // and after those, once there was a sorted layer: for a strip of up to MOST_STRIP columns, or of more
const int64_t MOST_STRIP = 64;
const int64_t MOST_GROUPS = 1024;

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

HFQ_INLINE float float_at(const char *values, int32_t dtype, int64_t place) {
    switch (dtype) {
        case F32: return as_float(load32(values + 4 * place));
        case BF16: return as_float((uint32_t)load16(values + 2 * place) << 16);
        case F16: return half_to_float(load16(values + 2 * place));
    }
    uint32_t exponent = (uint8_t)values[place];  // E8M0: 2**(exponent - 127)
    if (exponent == 255) return as_float(0x7FC00000);
    return as_float(exponent ? exponent << 23 : 0x00400000);
}

HFQ_INLINE float scale_at(const Layer &layer, int64_t place) {
    if (layer.scale_dtype == E4M3_SCALED) {
        float scale = code_value((uint8_t)layer.scales[place], E4M3);
        return layer.divides ? scale / layer.shared : scale * layer.shared;
    }
    if (layer.scale_dtype != NESTED) return float_at(layer.scales, layer.scale_dtype, place);
    float value = float_at(layer.nested_values, F32, (uint8_t)layer.scales[place]);
    return value * float_at(layer.nested_scales, F32, place / layer.nested_size) + layer.shared;
}

HFQ_INLINE int64_t scale_place(const Layer &layer, int64_t n, int64_t group) {
    return n / layer.block_out * layer.scale_stride + group * layer.scale_step;
}

// What is taken off the codes of a row's group, or ADDED to their products with its scale.
HFQ_INLINE float row_zero(const Layer &layer, int64_t n, int64_t group) {
    switch (layer.row_zeros) {
        case GROUP_WORDS: return (float)(load32(layer.zeros + 4 * (n * layer.zero_words + group / 8)) >> group % 8 * 4 & 15);
        case OUTPUT_WORDS: return (float)(load32(layer.zeros + 4 * (n / 8 * layer.groups + group)) >> n % 8 * 4 & 15) - 8.0f;
        case BYTES: return (float)(int8_t)layer.zeros[scale_place(layer, n, group)];
        case ADDED: return float_at(layer.zeros, layer.zero_dtype, scale_place(layer, n, group));
    }
    return 0;
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

// Whether a layer's channels come in the order of their groups, which is not the one that they lie in.
HFQ_INLINE bool is_sorted(const Layer &layer) { return layer.kind == GPTQ && layer.index && !layer.index_nbytes; }

HFQ_INLINE bool any_sorted(const Layer *layers, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (is_sorted(layers[i])) return true;
    return false;
}

// Rows of activations as floats; 16 more, so that rows of a power of two do not fall onto the same lines of the cache.
HFQ_INLINE int64_t padded_columns(const Layer &layer) { return (layer.in_features + 15) / 16 * 16 + 16; }

// Columns are multiplied by activations in passes of 1, PASS / 2 or PASS rows.
HFQ_INLINE int64_t padded_rows(const Layer &layer, int64_t rows) {
    int64_t rest = rows % PASS;
    if (!has_columns(layer) || rest <= 1) return rows;
    return rows - rest + (rest <= PASS / 2 ? PASS / 2 : PASS);
}

// Whether the codes are integers, and a group's scale can be taken out of the sum.
HFQ_INLINE bool has_integers(const Layer &layer, int64_t rows) {
    if (has_columns(layer)) return !is_scattered(layer);
    if (layer.kind != NIBBLES || !layer.integers || layer.index_nbytes || layer.block_out != 1 || rows > DIGIT_ROWS) return false;
    if (layer.row_zeros > OUTPUT_WORDS || layer.scale_step != 1) return false;
    bool is_single = layer.block_in >= layer.in_features;
    return is_single || layer.block_in % SPAN == 0 || layer.block_in == 64 || layer.block_in == 32 || layer.block_in == 16;
}

HFQ_INLINE int64_t up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Of one activation row as integers: bytes of digits, spans with a unit of their own, and totals.
HFQ_INLINE int64_t group_chunks(const Layer &layer) { return up(least(layer.block_in, layer.in_features), CHUNK) / CHUNK; }
HFQ_INLINE int64_t group_spans(const Layer &layer) { return up(group_chunks(layer) * CHUNK, SPAN) / SPAN; }
HFQ_INLINE int64_t digits_nbytes(const Layer &layer) {  // and some, so that rows do not fall onto the same lines of the cache
    return DIGITS * (has_columns(layer) ? layer.groups * group_chunks(layer) * CHUNK : up(layer.in_features, SPAN)) + 192;
}
HFQ_INLINE int64_t spans(const Layer &layer) {
    return has_columns(layer) ? layer.groups * group_spans(layer) : up(layer.in_features, SPAN) / SPAN;
}
HFQ_INLINE int64_t totals(const Layer &layer) { return 2 * (has_columns(layer) ? spans(layer) : up(layer.in_features, SPAN) / 8); }

// Activations in the order that e4m3 codes are read in, where they are read as small floats.
HFQ_INLINE int64_t ordered_columns(const Layer &layer) { return up(layer.in_features, 64) + 16; }

// Output columns that one part of a multiplication by columns covers.
HFQ_INLINE int64_t tile_columns(const Layer &layer, int64_t rows, int threads, bool integers, bool along) {
    if (!integers) return most(16, least(64, SCRATCH / 4 / layer.groups / 16 * 16));
    const int64_t along_rows = layer.kind == AWQ ? 2 * MOST_COLUMNS : LONG_COLUMNS;  // AWQ's blocks are of one line in 128 rows
    const int64_t widest = rows > 1 ? 256 : along ? along_rows : MOST_COLUMNS, parts = up((layer.out_features + widest - 1) / widest, most(threads, 1));
    return most(128, up((layer.out_features + parts - 1) / parts, 128));  // as many for each thread
}

// Columns from where a line of the cache begins to the word of column n, in each row of words; files align tensors to 8 bytes.
HFQ_INLINE int64_t after_line(const Layer &layer, int64_t n) {
    const int64_t nbytes = (int64_t)((uintptr_t)layer.codes + (uintptr_t)(layer.kind == AWQ ? n / 2 : 4 * n)) & 63;
    return layer.row_nbytes % 64 || nbytes % 4 ? 0 : nbytes / 4 * (layer.kind == AWQ ? 8 : 1);
}

// Parts of `width` outputs. By lines, the first part is shorter and the last as much longer, so that the others begin with a line of the cache; not
// where threads have so few columns each that one would be long at what its part has more.
HFQ_INLINE Cut cut_outputs(const Layer &layer, int64_t width, int threads = 1, bool by_lines = false) {
    const int64_t together = layer.kind == AWQ ? 128 : is_sorted(layer) ? 64 : 32;  // columns
    const bool is_even = threads <= 1 || layer.out_features >= 16 * together * threads;
    return {layer.out_features, by_lines && is_even ? -after_line(layer, 0) : 0, width, (layer.out_features + width - 1) / width};
}

// Columns from where a line begins to the n-th, with which a part or strip begins; they are nobody's.
HFQ_INLINE int64_t skipped_before(const Layer &layer, const Cut &cut, int64_t n) { return cut.begin ? after_line(layer, n) : 0; }

// Output columns of a part of a panel.
HFQ_INLINE int64_t panel_columns(const Layer &layer) { return layer.groups <= 512 ? 64 : 32; }

// The threads: work is cut into numbered parts, and whoever is free takes the next. They are those of torch's OpenMP where that is known
// (GOMP_parallel, of libgomp's ABI): a thread of our own would share a processor with one of torch's that waits awake for its next product.
typedef void (*Work)(const void *context, int64_t part, float *scratch);
typedef void (*Team)(void (*work)(void *), void *data, unsigned threads, unsigned flags);
Team team = nullptr;

bool has_short();

// Memory that grows to the most that a call asks for; null where there is none.
struct Kept {
    float *memory = nullptr;
    int64_t size = 0;
    ~Kept() { free(memory); }
    float *get(int64_t floats) {
        if (floats > size) {
            free(memory);
            memory = (float *)aligned_alloc(64, (size_t)up(floats, 16) * 4);
            size = memory ? floats : 0;
        }
        return memory;
    }
};
thread_local Kept own_scratch;   // of each thread: one without leaves all parts to others, and a caller without computes nothing
thread_local Kept kept_scratch;  // of a caller, for activations as the kernels read them: see hfq_scratch
thread_local Kept kept_orders;   // of a caller, for sorted layers

// Numbered parts of a piece of work, and the floats that each thread takes for it.
struct Parts {
    Work work;
    const void *context;
    int64_t count, floats;
};

HFQ_INLINE int64_t own_floats(bool is_sorted) { return is_sorted ? (TILED_SCRATCH + SORTED_SCRATCH) / 4 : has_short() ? TILED_SCRATCH / 4 : SCRATCH; }

struct Pool {
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER, busy = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t wake = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
    Parts parts = {};
    int64_t next = 0;
    int threads = 0, wanted = 0, active = 0;
};
Pool *pool = nullptr;
pthread_once_t pool_once = PTHREAD_ONCE_INIT;

void take_parts(Pool *p, const Parts &parts) {
    float *scratch = own_scratch.get(parts.floats);
    KeptSubnormals here;
    if (!scratch) return;
    for (int64_t part; (part = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < parts.count;) parts.work(parts.context, part, scratch);
}

void *serve(void *argument) {
    Pool *p = (Pool *)argument;
    pthread_mutex_lock(&p->mutex);
    for (;;) {
        while (p->wanted == 0) pthread_cond_wait(&p->wake, &p->mutex);
        p->wanted--;
        __atomic_add_fetch(&p->active, 1, __ATOMIC_RELAXED);
        const Parts parts = p->parts;
        pthread_mutex_unlock(&p->mutex);
        take_parts(p, parts);
        pthread_mutex_lock(&p->mutex);
        if (__atomic_sub_fetch(&p->active, 1, __ATOMIC_RELAXED) == 0) pthread_cond_signal(&p->done);
    }
    return nullptr;
}

void forget_pool() { pool = new Pool, team = nullptr; }  // in the child of a fork there are no threads, of neither kind

void make_pool() {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, forget_pool);
}

// Threads that have enough to do to be worth waking; a team is as a rule awake.
int worthwhile(int threads, int64_t products) { return (int)least(threads, 1 + products / (team ? 1 << 19 : 1 << 21)); }

// One call for all of a team: it is always called whole, since a runtime ends the threads that a smaller one leaves over.
struct Shared {
    Parts parts;
    int64_t next;
    int wanted;
};

void take_shared(void *argument) {
    Shared *shared = (Shared *)argument;
    if (__atomic_load_n(&shared->wanted, __ATOMIC_RELAXED) <= 0) return;
    float *scratch = own_scratch.get(shared->parts.floats);
    KeptSubnormals here;
    if (!scratch || __atomic_fetch_sub(&shared->wanted, 1, __ATOMIC_RELAXED) <= 0) return;
    for (int64_t part; (part = __atomic_fetch_add(&shared->next, 1, __ATOMIC_RELAXED)) < shared->parts.count;)
        shared->parts.work(shared->parts.context, part, scratch);
}

// Waits for what takes a few microseconds: to sleep and be woken takes longer, where an idle processor is given back to a host.
void spin_while(const int *flag) {
    for (int i = 0; i < 4000 && __atomic_load_n(flag, __ATOMIC_RELAXED); i++) {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }
}

// As run_parts, in our own pool; `busy` is held.
void run_in_pool(Pool *p, const Parts &parts, int threads) {
    pthread_mutex_lock(&p->mutex);
    while (p->threads < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, serve, p) != 0) break;
        pthread_detach(thread);
        p->threads++;
    }
    p->parts = parts;
    __atomic_store_n(&p->next, 0, __ATOMIC_RELAXED);
    p->wanted = (int)least(threads - 1, p->threads);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->mutex);
    take_parts(p, parts);
    spin_while(&p->active);
    pthread_mutex_lock(&p->mutex);
    p->wanted = 0;  // nobody else needs to begin
    while (p->active) pthread_cond_wait(&p->done, &p->mutex);
    pthread_mutex_unlock(&p->mutex);
}

// Runs all parts on up to `wanted` of `threads` and returns when they are done; a second caller at the same time runs its own alone. A caller has
// its scratch already.
void run_parts(const Parts &parts, int threads, int wanted) {
    pthread_once(&pool_once, make_pool);
    Pool *p = pool;
    wanted = (int)least(wanted, parts.count);
    if (wanted <= 1 || pthread_mutex_trylock(&p->busy) != 0) {
        for (int64_t part = 0; part < parts.count; part++) parts.work(parts.context, part, own_scratch.get(parts.floats));
        return;
    }
    if (team) {
        Shared shared = {parts, 0, wanted};
        team(take_shared, &shared, (unsigned)threads, 0);
    } else {
        run_in_pool(p, parts, wanted);
    }
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

#include "bfloat16.h"
#include "vnni.h"
#endif

namespace {

// Whether the processor multiplies bfloat16.
bool has_short() {
#if defined(__x86_64__)
    return tiled::has_bfloats();
#else
    return false;
#endif
}

int detect() {
#if defined(HFQ_EMULATE)
    return 2;
#elif defined(__x86_64__)
    return processor::found().avx512 ? 2 : processor::found().avx2;
#else
    return 0;
#endif
}

int chosen = -1;

int level() { return chosen < 0 ? chosen = detect() : chosen; }

// Whether products with subnormal floats take no longer than others, as on AMD's processors; Intel's need a hundred times as long.
bool detect_subnormals() {
#if defined(__x86_64__)
    return processor::found().is_amd;
#else
    return false;
#endif
}

int subnormals = -1;

int byte_dots = -1;

// Whether activations as integers are multiplied by dot products of bytes.
bool uses_vnni() {
#if defined(__x86_64__)
    if (byte_dots < 0) byte_dots = vnni::detect();
    return byte_dots && level() == 2;
#else
    return false;
#endif
}

// Whether e4m3 codes are read as small floats: blocks must hold whole vectors.
bool has_order(const Layer &layer, int64_t rows) {
    if (subnormals < 0) subnormals = detect_subnormals();
    if (layer.kind != E4M3 || rows > ORDERED_ROWS || !subnormals || level() < 1) return false;
    return layer.block_in % (32 << (level() - 1)) == 0 || layer.block_in >= layer.in_features;
}

const Work linear_works[][2] = {
    {scalar::rows_part, scalar::columns_part},
#if defined(__x86_64__)
    {avx2::rows_part, avx2::columns_part},
    {avx512::rows_part, avx512::columns_part},
    {vnni::rows_part, vnni::columns_part},
#endif
};
bool (*const widens[])(const Layer &, const char *, int32_t, int64_t, int64_t, int64_t, float *) = {
    scalar::widen,
#if defined(__x86_64__)
    avx2::widen,
    avx512::widen,
#endif
};
void (*const counts[])(const Layer &, const float *, int64_t, int64_t, char *, float *, int32_t *) = {
    scalar::count_activations,
#if defined(__x86_64__)
    avx2::count_activations,
    avx512::count_activations,
#endif
};
void (*const orders[])(const Layer &, const float *, int64_t, int64_t, float *) = {
    scalar::order_activations,
#if defined(__x86_64__)
    avx2::order_activations,
    avx512::order_activations,
#endif
};
void (*const activation_sorts[])(const Layer &, int64_t, int64_t, float *, float *) = {
    scalar::sort_activations,
#if defined(__x86_64__)
    avx2::sort_activations,
    avx512::sort_activations,
#endif
};
const Work panel_works[][2] = {
    {scalar::rows_panel, scalar::columns_panel},
#if defined(__x86_64__)
    {avx2::rows_panel, avx2::columns_panel},
    {avx512::rows_panel, avx512::columns_panel},
#endif
};

Work linear_work(const Layer &layer) { return linear_works[uses_vnni() ? 3 : level()][has_columns(layer)]; }

// Output rows of a part, all of which share their scales if any do; the more, the fewer times are these multiplied with the activations.
int64_t ordered_width(const Layer &layer, int threads) {
    int64_t width = 128;
    while (width > TILE_ROWS && (layer.block_out % width || layer.out_features < 8 * width * threads)) width /= 2;
    return width;
}

// The activations as the kernels read them, in `scratch`.
Call prepare(const Layer &layer, const char *x, int32_t x_dtype, int64_t rows, int64_t x_stride, char *y, int32_t y_dtype,
             int64_t y_stride, float *scratch, int threads) {
    int64_t stride = padded_columns(layer);
    bool finite = widens[level()](layer, x, x_dtype, rows, x_stride, stride, scratch);
    if (is_sorted(layer)) activation_sorts[level()](layer, rows, stride, scratch, (float *)layer.index + layer.in_features);
    bool integers = finite && level() > 0 && has_integers(layer, rows);
    float *units = scratch + padded_rows(layer, rows) * stride;
    int32_t *sums = (int32_t *)(units + rows * spans(layer));
    char *digits = (char *)(sums + rows * totals(layer));
    if (integers) counts[level()](layer, scratch, rows, stride, digits, units, sums);
    bool ordered = finite && has_order(layer, rows);
    if (ordered) orders[level()](layer, scratch, rows, stride, units);
    const bool columns = has_columns(layer), along = uses_vnni() && layer.scale_dtype <= F16;
    const int64_t width = columns ? tile_columns(layer, rows, threads, integers, along) : ordered ? ordered_width(layer, threads) : TILE_ROWS;
    const bool by_lines = integers && columns && (layer.kind == AWQ || uses_vnni());  // without VNNI other words take no longer across them
    const Cut cut = cut_outputs(layer, width, threads, by_lines);
    return {&layer, scratch, rows, stride, cut, y, y_stride, y_dtype, integers ? digits : nullptr, units, sums, ordered ? units : nullptr};
}

// Whether a layer's channels can be sorted, if its groups are whole.
bool is_sortable(const Layer &layer) {
    if (level() < 1 || layer.kind != GPTQ || !layer.index_nbytes || layer.bits == 3) return false;
    if (layer.in_features * layer.bits % 32 || layer.block_in * layer.bits % 32) return false;
    return layer.in_features * MOST_STRIP * (8 + layer.bits) / 8 <= SORTED_SCRATCH;
}

// The channels in the order of their groups; false where a group has not as many as a layer's without an index.
bool sort_channels(const Layer &layer, int32_t *order) {
    int64_t next[MOST_GROUPS];
    if (layer.groups > MOST_GROUPS) return false;
    for (int64_t group = 0; group < layer.groups; group++) next[group] = group * layer.block_in;
    for (int64_t k = 0; k < layer.in_features; k++) {
        const int64_t group = group_of(layer, k), place = next[group]++;
        if (place >= least((group + 1) * layer.block_in, layer.in_features)) return false;
        order[place] = (int32_t)k;
    }
    return true;
}

// The layers as they are multiplied: with an index of their own, which is checked and never read again, since that on disk can change; and sorted,
// where they can be and `sorts`. An order is followed by room for a row of activations. -2 for an index that leaves its range, -3 without memory.
int settle(const Layer *&layers, int64_t count, bool sorts = true) {
    int64_t channels = 0;
    for (int64_t i = 0; i < count; i++) channels += layers[i].index_nbytes ? layers[i].in_features : 0;
    if (!channels) return 0;
    Layer *copies = (Layer *)kept_orders.get(3 * channels + count * (int64_t)sizeof(Layer) / 4);
    if (!copies) return -3;
    int32_t *next = (int32_t *)(copies + count);
    for (int64_t i = 0; i < count; i++) {
        Layer &layer = copies[i] = layers[i];
        if (!layer.index_nbytes) continue;
        int32_t *order = next, *index = order + 2 * layer.in_features;
        for (int64_t k = 0; k < layer.in_features; k++) {
            const int64_t group = group_of(layer, k);
            if (group < 0 || group >= layer.groups) return -2;
            index[k] = (int32_t)group;
        }
        layer.index = (const char *)index, layer.index_nbytes = 4;
        if (sorts && is_sortable(layer) && sort_channels(layer, order)) layer.index = (const char *)order, layer.index_nbytes = 0;
        next = index + layer.in_features;
    }
    layers = copies;
    return 0;
}

// Whether integers would be multiplied, were all activations finite. A row's bits are then the same alone and among others, which one that is
// not finite must leave as they are: rows go one by one.
bool has_faulty_rows(const Call &call) { return call.rows > 1 && level() > 0 && !call.digits && has_integers(*call.layer, call.rows); }

struct Group {
    const Call *calls;
    const int64_t *ends;  // of each call's parts
};

void group_part(const void *context, int64_t part, float *scratch) {
    const Group &group = *(const Group *)context;
    int64_t i = 0;
    while (group.ends[i] <= part) i++;
    linear_work(*group.calls[i].layer)(&group.calls[i], part - (i ? group.ends[i - 1] : 0), scratch);
}

int short_forms = 2;  // of products in bfloat16: none, by vectors, by tiles

#if defined(__x86_64__)
bool uses_tiles() {
    static const bool found = tiled::detect();
    return short_forms > 1 && found;
}

// Whether rows are multiplied one by one, by dot products of bfloat16; where there are tiles, only one is.
bool is_dotted(const Layer &layer, int64_t rows) { return dotted::reads(layer) && rows <= (uses_tiles() ? 1 : dotted::MOST); }

// The fewest rows that are multiplied in bfloat16, as measured: without tiles integers take less long for few rows of codes whose unpacking does.
int64_t least_short(const Layer &layer) {
    if (uses_tiles() || !has_integers(layer, 1)) return 2;
    if (!has_columns(layer)) return DIGIT_ROWS + 1;
    return layer.kind == AWQ ? 6 : layer.bits == 3 ? 4 : 2;
}
#endif

// Whether activations are multiplied in bfloat16, by tiles or vectors: those in it, and of float16 so many rows that two of it for each take no
// longer than integers.
bool is_short(const Layer &layer, int64_t rows, int32_t dtype) {
#if defined(__x86_64__)
    if (!short_forms || level() < 2 || !has_short() || dtype == F32) return false;
    if (dtype == F16) return rows > DIGIT_ROWS && tiled::reads(layer);
    if (is_dotted(layer, rows)) return true;
    return rows >= least_short(layer) && tiled::reads(layer);
#else
    return false;
#endif
}

#if defined(__x86_64__)
struct Jobs {
    const tiled::Job *jobs;
    const int64_t *ends;  // of each job's parts
};

void job_part(const void *context, int64_t part, float *scratch) {
    const Jobs &all = *(const Jobs *)context;
    int64_t i = 0;
    while (all.ends[i] <= part) i++;
    const tiled::Job &job = all.jobs[i];
    const int64_t own = part - (i ? all.ends[i - 1] : 0), first = job.cut.first(own), width = job.cut.count(own);
    if (job.apart) dotted::part(job, first, width, scratch);
    else tiled::part(job, first, width, scratch);
}

// Floats that run_short keeps for layers that it takes together.
int64_t short_floats(const Layer *layers, const int64_t *rows, int64_t count, int32_t dtype) {
    int64_t floats = up(count * (int64_t)(sizeof(tiled::Job) + sizeof(int64_t)), 64) / 4;
    for (int64_t i = 0; i < count; i++) floats += up(tiled::packed_floats(layers[i], rows[i] * tiled::rows_of(dtype)), 16);
    return floats;
}

// One layer after the other, whose rows follow each other, at once; -3 without memory.
int run_short(const Layer *layers, const int64_t *rows, int64_t count, int32_t dtype, const char *x, int64_t x_stride, char *y, int64_t y_stride,
              int threads) {
    float *scratch = kept_scratch.get(short_floats(layers, rows, count, dtype));
    int64_t own = own_floats(any_sorted(layers, count));
    for (int64_t i = 0; i < count; i++) own = most(own, tiled::brought_floats(layers[i], dtype));
    if (!scratch || !own_scratch.get(own)) return -3;
    int64_t products = 0, parts = 0;
    for (int64_t i = 0; i < count; i++) products += rows[i] * layers[i].in_features * layers[i].out_features;
    const int wanted = worthwhile(threads, products);
    tiled::Job *jobs = (tiled::Job *)scratch;
    int64_t *ends = (int64_t *)(jobs + count);
    scratch += up(count * (int64_t)(sizeof(tiled::Job) + sizeof(int64_t)), 64) / 4;
    for (int64_t i = 0; i < count; i++) {
        const int64_t packed = rows[i] * tiled::rows_of(dtype), floats = up(tiled::packed_floats(layers[i], packed), 16);
        float *factors = scratch + floats - 2 * packed;
        jobs[i] = tiled::plan(layers[i], packed, dtype, y, y_stride, (const char *)scratch, factors, wanted, uses_tiles());
        if (is_dotted(layers[i], rows[i])) jobs[i].apart = true, jobs[i].cut = cut_outputs(layers[i], dotted::part_width(layers[i], rows[i], wanted));
        tiled::Packing packing = {layers + i, x, packed, x_stride, jobs[i].depth, dtype, jobs[i].apart, jobs[i].halved, (char *)scratch, factors, {}};
        tiled::find_order(layers[i], packing.order);
        run_parts({tiled::pack_block, &packing, jobs[i].apart ? packed : tiled::blocks(packed), own}, threads, rows[i] > MOST_ROWS ? wanted : 1);
        ends[i] = parts += jobs[i].cut.parts;
        scratch += floats;
        x += 2 * rows[i] * x_stride, y += 2 * rows[i] * y_stride;
    }
    const Jobs all = {jobs, ends};
    run_parts({job_part, &all, parts, own}, threads, wanted);
    return 0;
}

int run_all_short(const Layer &layer, int64_t rows, int32_t dtype, const char *x, int64_t x_stride, char *y, int64_t y_stride, int threads) {
    const int64_t together = tiled::MOST / tiled::rows_of(dtype);
    for (int64_t first = 0, count; first < rows; first += count) {
        const int64_t left = rows - first;  // few rows at the end might be multiplied otherwise
        count = left > together && left <= together + tiled::HALF ? together / 2 : least(together, left);
        const int status = run_short(&layer, &count, 1, dtype, x + 2 * first * x_stride, x_stride, y + 2 * first * y_stride, y_stride, threads);
        if (status != 0) return status;
    }
    return 0;
}
#endif

}  // namespace

extern "C" {

int hfq_abi() { return 7; }

// The threads to work on: GOMP_parallel of the OpenMP runtime that the caller's other products run in, or null for our own.
void hfq_use_team(Team wanted) {
    pthread_once(&pool_once, make_pool);  // a child of a fork must give the team up, also where nothing was computed before
    team = wanted;
}

// 0 scalar, 1 AVX2, 2 AVX-512; what the processor has.
int hfq_detected() { return detect(); }

// Chooses a lower level, for tests; returns the level that runs.
int hfq_use(int wanted) { return chosen = wanted < 0 ? detect() : (int)least(wanted, detect()); }

// Whether e4m3 codes may be read as small floats, where the processor is chosen for it (-1), or anywhere, for tests; what then holds.
int hfq_use_subnormals(int wanted) { return subnormals = wanted < 0 ? detect_subnormals() : wanted; }

// Whether activations as integers are multiplied by AVX-512's dot products of bytes, where the processor has them, or not (0), for tests, which
// changes no bit of a result; what then holds.
int hfq_use_vnni(int wanted) {
    byte_dots = wanted == 0 ? 0 : -1;
    return uses_vnni();
}

// How activations in bfloat16 are multiplied: in float32 or as integers (0), in bfloat16 by vectors (1), or by tiles (2), where the
// processor has them; what then holds.
int hfq_use_short(int wanted) {
    short_forms = wanted < 0 ? 2 : wanted;
#if defined(__x86_64__)
    if (level() == 2) return uses_tiles() ? 2 : short_forms && has_short() ? 1 : 0;
#endif
    return 0;
}

int64_t hfq_most_rows() { return MOST_ROWS; }

// Whether so many rows of a layer's are multiplied in bfloat16 by tiles, or vectors in their place, which take any number of them.
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
    if (has_integers(*layer, rows)) floats += rows * (up(digits_nbytes(*layer), 4) / 4 + spans(*layer) + totals(*layer));
    if (layer->kind == E4M3 && rows <= ORDERED_ROWS) floats += rows * (ordered_columns(*layer) + 2);
    return floats;
}

// What is packed into one argument: a caller that converts many takes as long as the product by a small layer.
struct Product {
    int64_t layer, x, dtype;  // addresses; y is of x's dtype, and contiguous
    int64_t rows, x_stride;   // in elements; each row is contiguous
    int64_t y, threads;
};

// y[m, n] = sum over k of x[m, k] W[n, k], for 1 to MOST_ROWS rows, or by tiles for any number.
// Not 0 where nothing was computed: -1 for another number of rows, -2 for an index that leaves its range, -3 without memory.
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
    if (is_short(*layer, rows, dtype)) return run_all_short(*layer, rows, dtype, x, x_stride, y, y_stride, threads);
#endif
    if (rows > MOST_ROWS) return -1;
    float *scratch = kept_scratch.get(hfq_scratch(layer, rows));
    const int64_t own = own_floats(is_sorted(*layer));
    if (!scratch || !own_scratch.get(own)) return -3;
    int wanted = worthwhile(threads, rows * layer->in_features * layer->out_features);
    Call call = prepare(*layer, x, dtype, rows, x_stride, y, dtype, y_stride, scratch, wanted);
    const int64_t each = has_faulty_rows(call) ? 1 : rows, size = dtype == F32 ? 4 : 2;
    for (int64_t m = 0; m < rows; m += each) {
        if (each < rows) call = prepare(*layer, x + m * x_stride * size, dtype, 1, x_stride, y + m * y_stride * size, dtype, y_stride, scratch, wanted);
        run_parts({linear_work(*layer), &call, call.cut.parts, own}, threads, wanted);
    }
    return 0;
}

// Floats that hfq_grouped keeps for layers that it takes together.
int64_t hfq_grouped_scratch(const Layer *layers, const int64_t *rows, int64_t count) {
    int64_t floats = 0;
    for (int64_t i = 0; i < count; i++) floats += hfq_scratch(layers + i, rows[i]) + (int64_t)(sizeof(Call) + sizeof(int64_t)) / 4;
    return floats;
}

// As hfq_linear for one layer after the other, whose rows follow each other in x and y: bit for bit the same, and all at once, or as many
// at once as GROUPED_FLOATS of activations allow. -4 where rows would go one by one: those are for hfq_linear.
int hfq_grouped(const Layer *layers, const int64_t *rows, int64_t count, const char *x, int32_t x_dtype, int64_t x_stride, char *y,
                int32_t y_dtype, int64_t y_stride, int threads) {
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
            if (run_short(layers + first, rows + first, next - first, x_dtype, x, x_stride, y, y_stride, threads)) return -3;
            x += 2 * taken * x_stride, y += 2 * taken * y_stride;
            continue;
        }
#endif
        int64_t floats = 0, products = 0, parts = 0;
        for (next = first; next < count; next++) {
            int64_t more = hfq_grouped_scratch(layers + next, rows + next, 1);
            if (next > first && (floats + more > GROUPED_FLOATS || is_short(layers[next], rows[next], x_dtype))) break;
            floats += more, products += rows[next] * layers[next].in_features * layers[next].out_features;
        }
        float *scratch = kept_scratch.get(floats);
        const int64_t own = own_floats(any_sorted(layers + first, next - first));
        if (!scratch || !own_scratch.get(own)) return -3;
        int wanted = worthwhile(threads, products);
        Call *calls = (Call *)scratch;
        int64_t *ends = (int64_t *)(calls + (next - first));
        scratch = (float *)(ends + (next - first));
        for (int64_t i = 0; first + i < next; i++) {
            const Layer &layer = layers[first + i];
            const int64_t m = rows[first + i];
            calls[i] = prepare(layer, x, x_dtype, m, x_stride, y, y_dtype, y_stride, scratch, wanted);
            if (has_faulty_rows(calls[i])) return -4;
            ends[i] = parts += calls[i].cut.parts;
            scratch += hfq_scratch(&layer, m);
            x += m * x_stride * (x_dtype == F32 ? 4 : 2), y += m * y_stride * (y_dtype == F32 ? 4 : 2);
        }
        Group group = {calls, ends};
        run_parts({group_part, &group, parts, own}, threads, wanted);
    }
    return 0;
}

// Weights of output rows [start, start + count): [count, in_features], or for GPTQ and AWQ [in_features, count]; float32 or bfloat16.
// Not 0 where nothing was computed, as hfq_linear.
int hfq_dequantize(const Layer *layer, int64_t start, int64_t count, char *out, int32_t dtype, int threads) {
    if (const int status = settle(layer, 1, false)) return status;
    if (!own_scratch.get(own_floats(false))) return -3;
    KeptSubnormals here;
    Panel panel = {layer, start, count, out, dtype};
    bool columns = has_columns(*layer);
    int wanted = worthwhile(threads, count * layer->in_features);
    int64_t width = columns ? panel_columns(*layer) : PANEL_ROWS;
    run_parts({panel_works[level()][columns], &panel, (count + width - 1) / width, own_floats(false)}, threads, wanted);
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
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw")
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
typedef uint8_t vb __attribute__((vector_size(4 * W)));
typedef int8_t vsb __attribute__((vector_size(4 * W)));
typedef int16_t vs __attribute__((vector_size(4 * W)));

template <class V> static HFQ_INLINE V load(const void *p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(V));
    return v;
}
template <class V> static HFQ_INLINE void store(void *p, V v) { __builtin_memcpy(p, &v, sizeof(V)); }
static HFQ_INLINE vf all(float value) { return value - (vf){}; }
static HFQ_INLINE vf to_float(vu v) { return __builtin_convertvector((vi)v, vf); }

// W int8 as floats; W bytes without a sign as integers; fma; W float16; sums of two products of a byte without and one with a sign; of two products of int16; 16 bytes by their place
// in each 128 bits; W floats by their place; the bytes, or pairs of bytes, of two vectors in turns, of the halves of each 128 bits.
#if HFQ_PASS == 1 && !defined(HFQ_EMULATE)
static HFQ_INLINE vf from_int8(const char *p) { return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
static HFQ_INLINE vu from_bytes(const char *p) { return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
static HFQ_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
static HFQ_INLINE vf from_half(vuh v) { return (vf)_mm256_cvtph_ps((__m128i)v); }
static HFQ_INLINE vs dot_bytes(vb a, vsb b) { return (vs)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
static HFQ_INLINE vi dot_shorts(vs a, vs b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
static HFQ_INLINE vb pick_bytes(vb table, vb places) { return (vb)_mm256_shuffle_epi8((__m256i)table, (__m256i)places); }
static HFQ_INLINE vf pick_floats(vf table, vi places) { return (vf)_mm256_permutevar8x32_ps((__m256)table, (__m256i)places); }
static HFQ_INLINE vb low_bytes(vb a, vb b) { return (vb)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b); }
static HFQ_INLINE vb high_bytes(vb a, vb b) { return (vb)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b); }
static HFQ_INLINE vb low_pairs(vb a, vb b) { return (vb)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b); }
static HFQ_INLINE vb high_pairs(vb a, vb b) { return (vb)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b); }
#elif HFQ_PASS == 2 && !defined(HFQ_EMULATE)
static HFQ_INLINE vf from_int8(const char *p) { return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
static HFQ_INLINE vu from_bytes(const char *p) { return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
static HFQ_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
static HFQ_INLINE vf from_half(vuh v) { return (vf)_mm512_cvtph_ps((__m256i)v); }
static HFQ_INLINE vs dot_bytes(vb a, vsb b) { return (vs)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
static HFQ_INLINE vi dot_shorts(vs a, vs b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
static HFQ_INLINE vb pick_bytes(vb table, vb places) { return (vb)_mm512_shuffle_epi8((__m512i)table, (__m512i)places); }
static HFQ_INLINE vf pick_floats(vf table, vi places) { return (vf)_mm512_permutexvar_ps((__m512i)places, (__m512)table); }
static HFQ_INLINE vb low_bytes(vb a, vb b) { return (vb)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b); }
static HFQ_INLINE vb high_bytes(vb a, vb b) { return (vb)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b); }
static HFQ_INLINE vb low_pairs(vb a, vb b) { return (vb)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
static HFQ_INLINE vb high_pairs(vb a, vb b) { return (vb)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }
#else
static inline vf from_int8(const char *p) { return __builtin_convertvector(__builtin_convertvector(load<vc>(p), vi), vf); }
static inline vu from_bytes(const char *p) { return __builtin_convertvector(load<vuc>(p), vu); }
static inline vf fma(vf a, vf b, vf c) { return a * b + c; }
static inline vf from_half(vuh v) {
    vf out;
    for (int i = 0; i < W; i++) out[i] = half_to_float(v[i]);
    return out;
}
static inline vs dot_bytes(vb a, vsb b) {
    vs out;
    for (int i = 0; i < 2 * W; i++) out[i] = (int16_t)(a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1]);
    return out;
}
static inline vi dot_shorts(vs a, vs b) {
    vi out;
    for (int i = 0; i < W; i++) out[i] = a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return out;
}
static inline vb pick_bytes(vb table, vb places) {
    vb out;
    for (int i = 0; i < 4 * W; i++) out[i] = table[i / 16 * 16 + places[i] % 16];
    return out;
}
static inline vf pick_floats(vf table, vi places) {
    vf out;
    for (int i = 0; i < W; i++) out[i] = table[places[i]];
    return out;
}
static inline vb in_turns(vb a, vb b, int size, int first) {  // of 16 bytes, those from `first` on
    vb out;
    for (int i = 0; i < 4 * W; i++) {
        int unit = i % 16 / size, from = i / 16 * 16 + first + unit / 2 * size + i % size;
        out[i] = unit % 2 ? b[from] : a[from];
    }
    return out;
}
static inline vb low_bytes(vb a, vb b) { return in_turns(a, b, 1, 0); }
static inline vb high_bytes(vb a, vb b) { return in_turns(a, b, 1, 8); }
static inline vb low_pairs(vb a, vb b) { return in_turns(a, b, 2, 0); }
static inline vb high_pairs(vb a, vb b) { return in_turns(a, b, 2, 8); }
#endif

// What the compiler must have in a register here: it would make all terms of a sum first, which registers do not hold, or load a word
// again for each use.
template <class V> static HFQ_INLINE void keep_here(V &value) {
#if HFQ_PASS != 0 && defined(__x86_64__) && !defined(HFQ_EMULATE)
    __asm__("" : "+v"(value));
#endif
}

// The same of a place in memory, which is gone to from the last: the compiler would keep one for each step.
static HFQ_INLINE void keep_place(const char *&place) {
#if HFQ_PASS != 0 && defined(__x86_64__) && !defined(HFQ_EMULATE)
    __asm__("" : "+r"(place));
#endif
}

// What the sums of the highest digits, and of the two others, stand for.
static HFQ_INLINE vf of_digits(vi high, vi low) {
    return fma(__builtin_convertvector(high, vf), all(65536.0f), __builtin_convertvector(low, vf));
}

static HFQ_INLINE float sum_of(vf v) {
#if HFQ_PASS == 2 && !defined(HFQ_EMULATE)
    const __m512 halves = _mm512_add_ps((__m512)v, _mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4E));
    const __m512 fourths = _mm512_add_ps(halves, _mm512_shuffle_f32x4(halves, halves, 0xB1));
    const __m512 pairs = _mm512_add_ps(fourths, _mm512_permute_ps(fourths, 0x4E));
    return _mm512_cvtss_f32(_mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xB1)));
#else
    float half[W / 2];
    for (int i = 0; i < W / 2; i++) half[i] = v[i] + v[i + W / 2];
    for (int size = W / 4; size; size /= 2)
        for (int i = 0; i < size; i++) half[i] += half[i + size];
    return half[0];
#endif
}

// The largest magnitude, as bits: 0x7F800000 or more where one is not finite.
static uint32_t largest_bits(const float *x, int64_t count) {
    vu largest = {};
    uint32_t found = 0;
    int64_t k = 0;
    for (; k + W <= count; k += W) {
        vu bits = load<vu>(x + k) & 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    }
    for (; k < count; k++) found = most(found, as_bits(x[k]) & 0x7FFFFFFF);
    for (int i = 0; i < W; i++) found = most(found, largest[i]);
    return found;
}

// The activations as floats, padded with zeros to `stride` channels and `padded` rows; returns whether all are finite.
static bool widen(const Layer &layer, const char *x, int32_t dtype, int64_t rows, int64_t x_stride, int64_t stride, float *out) {
    int64_t size = layer.in_features, padded = padded_rows(layer, rows);
    for (int64_t m = 0; m < rows; m++) {
        const char *from = x + m * x_stride * (dtype == F32 ? 4 : 2);
        float *to = out + m * stride;
        int64_t k = 0;
        if (dtype == F32) __builtin_memcpy(to, from, 4 * size), k = size;
        for (; k + W <= size; k += W) {
            vuh narrow = load<vuh>(from + 2 * k);
            store(to + k, dtype == F16 ? from_half(narrow) : (vf)(__builtin_convertvector(narrow, vu) << 16));
        }
        for (; k < size; k++) to[k] = float_at(from, dtype, k);
        __builtin_memset(to + size, 0, 4 * (stride - size));
    }
    __builtin_memset(out + rows * stride, 0, 4 * (padded - rows) * stride);
    return largest_bits(out, rows * stride) < 0x7F800000;
}

// ---- Activations as integers -------------------------------------------------------------------------------------------
// Up to SPAN activations are counted in a unit of 2**-22 of the largest, or a little more: an integer of three digits of eight bits,
// each with a sign. Products with codes of up to eight bits, their sums and a zero point times the sum of the activations are integers
// then, and exact; what is rounded is each activation, by half a unit, and a span's sum, once. bfloat16 has eight digits of its own: of most
// activations in it the lowest digit is zero, and columns leave out the products of those.

// Up to SPAN floats as integers, zero from `count` on; each value is 65536 * high + what the two lower bytes of `digits` are, with signs.
struct Integers {
    int32_t values[SPAN], highs[SPAN];
    uint32_t digits[SPAN];
    float unit;
};
static void to_integers(const float *x, int64_t count, Integers &out) {
    float padded[SPAN];
    if (count < SPAN) __builtin_memset(padded, 0, sizeof(padded)), __builtin_memcpy(padded, x, 4 * count), x = padded;
    uint32_t bits = largest_bits(x, SPAN);
    int power = 149 - (int)(bits >> 23) - ((bits & 0x7FFFFF) >= 0x7E0000);  // the largest is below 127.5 * 2**16
    if (power > 140) power = 140;  // the unit, times that of the codes, is a float still
    const vf factor = all(as_float((uint32_t)(127 + power / 2) << 23)), other = all(as_float((uint32_t)(127 + power - power / 2) << 23));
    for (int64_t k = 0; k < SPAN; k += W) {
        vf scaled = load<vf>(x + k) * factor * other, half = (vf)((vu)all(0.5f) | ((vu)scaled & 0x80000000u));
        vi value = __builtin_convertvector(scaled + half, vi);
        store(out.values + k, value), store(out.highs + k, (value + 0x8080) >> 16);
        store(out.digits + k, ((vu)value + 0x808080u) ^ 0x808080u);
    }
    out.unit = as_float(power > 126 ? 1u << (149 - power) : (uint32_t)(127 - power) << 23);
}

// The three digits of 32 integers, the highest first: of each four bytes that follow each other, the ones from `order` on, eight apart.
typedef uint32_t Eight __attribute__((vector_size(32)));
static HFQ_INLINE void put_digits(const uint32_t *digits, const uint8_t *order, char *to, int64_t apart) {
    uint32_t found[32];
    for (int i = 0; i < 32; i++) found[i] = digits[order[i]];
    const Eight a = load<Eight>(found), b = load<Eight>(found + 8), c = load<Eight>(found + 16), d = load<Eight>(found + 24);
    HFQ_UNROLL
    for (int i = 0, shift = 16; i < 3; i++, shift -= 8, to += apart)
        store(to, (a >> shift & 255u) | (b >> shift & 255u) << 8 | (c >> shift & 255u) << 16 | d >> shift << 24);
}

// The sums of the highest digits, and of what the lower ones make.
static HFQ_INLINE void add_up(const Integers &of, int64_t first, int64_t count, int32_t &high, int32_t &low) {
    int32_t sum = high = 0;
    if (count % W == 0) {
        vi highs = {}, sums = {};
        for (int64_t i = first; i < first + count; i += W) highs += load<vi>(of.highs + i), sums += load<vi>(of.values + i);
        for (int i = 0; i < W; i++) high += highs[i], sum += sums[i];
    } else {
        for (int64_t i = first; i < first + count; i++) high += of.highs[i], sum += of.values[i];
    }
    low = sum - 65536 * high;
}

// Where the code of a column is among the 32 that are unpacked together: in which of eight vectors, four codes to a lane.
static HFQ_INLINE int vector_of(const Layer &layer, int k) {
    if (layer.kind == AWQ || layer.bits == 8) return k / 4;
    return layer.bits == 4 ? k / 8 * 2 + k % 2 : layer.bits == 2 ? k / 16 * 4 + k % 4 : k % 8;
}
static HFQ_INLINE int byte_of(const Layer &layer, int k) {
    if (layer.kind == AWQ || layer.bits == 8) return k % 4;
    return layer.bits == 4 ? k % 8 / 2 : layer.bits == 2 ? k % 16 / 4 : k / 8;
}

// By chunk: [digit][vector][byte]; totals of a span: of the highest digits, and of the two others.
static void count_columns(const Layer &layer, const float *x, char *digits, float *units, int32_t *sums) {
    int64_t size = layer.in_features;
    uint8_t order[CHUNK];
    for (int k = 0; k < CHUNK; k++) order[8 * byte_of(layer, k) + vector_of(layer, k)] = (uint8_t)k;
    for (int64_t group = 0; group < layer.groups; group++) {
        int64_t start = group * layer.block_in, stop = least(start + layer.block_in, size);
        for (int64_t s = 0; s < group_spans(layer); s++, units++, sums += 2) {
            int64_t k = start + s * SPAN, count = most(0, least(SPAN, stop - k)), left = group_chunks(layer) - s * (SPAN / CHUNK);
            Integers found;
            to_integers(x + least(k, size), count, found);
            *units = found.unit;
            add_up(found, 0, SPAN, sums[0], sums[1]);
            for (int64_t i = 0; i < least(SPAN, left * CHUNK); i += CHUNK) put_digits(found.digits + i, order, digits + i * DIGITS, CHUNK);
            digits += least(SPAN, left * CHUNK) * DIGITS;
        }
    }
}

// By 8 * W codes: [digit][the first or second code of a byte][bytes]; totals of the highest digits, and of the two others, for each
// eight codes, times what takes the codes' offset off a sum.
static void count_rows(const Layer &layer, const float *x, char *digits, float *units, int32_t *sums) {
    uint8_t order[2][32];  // of 64 codes
    for (int i = 0; i < 64; i++) order[i / 32][i % 32] = (uint8_t)(2 * (i % 8 * 4 + i % 32 / 8) + (i / 32 != (layer.high_first != 0)));
    for (int64_t k = 0; k < up(layer.in_features, SPAN); k += SPAN, units++) {
        Integers found;
        to_integers(x + k, least(SPAN, layer.in_features - k), found);
        *units = found.unit * layer.unit;
        for (int64_t i = 0; i < SPAN; i += 8 * W, digits += DIGITS * 8 * W, sums += 2 * W) {
            for (int64_t lane = 0; lane < W; lane++) {
                int32_t high, low;
                add_up(found, i + 8 * lane, 8, high, low);
                sums[lane] = -layer.offset * high, sums[W + lane] = -layer.offset * low;
            }
            for (int64_t j = 0; j < 8 * W; j += 64)
                for (int half = 0; half < 2; half++) put_digits(found.digits + i + j, order[half], digits + j / 2 + half * 4 * W, 8 * W);
        }
    }
}

static void count_activations(const Layer &layer, const float *x32, int64_t rows, int64_t stride, char *digits, float *units, int32_t *sums) {
    for (int64_t m = 0; m < rows; m++)
        (has_columns(layer) ? count_columns : count_rows)(
            layer, x32 + m * stride, digits + m * digits_nbytes(layer), units + m * spans(layer), sums + m * totals(layer));
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

static HFQ_INLINE vf decode_nibbles(const char *p, const float *values, int first) {
    vu words = (vu){} + load32(p), shifts;
    for (int i = 0; i < W; i++) shifts[i] = (uint32_t)(i % 8 * 4);
#if HFQ_PASS == 2 && !defined(HFQ_EMULATE)  // lane by lane, compilers take ten times as long
    const __m512i second = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    words = (vu)_mm512_permutexvar_epi32(second, _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)p)));
#elif HFQ_PASS == 2
    for (int i = 8; i < W; i++) words[i] = load32(p + 4);
#endif
    return look_up(words >> (shifts ^ (uint32_t)first) & 15u, values);
}

// Eight codes that lie in the same place of eight words of 16 bits, and for more lanes those in the next place.
static HFQ_INLINE vf decode_quads(const char *p, int place) {
    vu words;
#if HFQ_PASS == 2 && !defined(HFQ_EMULATE)
    const __m512i places = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
    const __m256i eight = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    words = (vu)_mm512_broadcast_i64x4(eight) >> ((vu)places + (uint32_t)(4 * place));
#elif HFQ_PASS == 2
    uint16_t narrow[8];
    __builtin_memcpy(narrow, p, 16);
    for (int i = 0; i < W; i++) words[i] = (uint32_t)narrow[i % 8] >> 4 * (place + i / 8);
#else
    words = __builtin_convertvector(load<vuh>(p), vu) >> (uint32_t)(4 * place);
#endif
    return to_float(words & 15u);
}

// The codes of an output row, from a channel on: what `decode_two` and `code_at` read.
struct Codes {
    const char *row;
    float values[16];
    int first;  // the shift of a byte's first nibble
};

template <int KIND> static HFQ_INLINE const char *codes_of(const Layer &layer, int64_t n) {
    if (KIND == QUADS) return layer.codes + 2 * (n / 4 * layer.in_features + n % 4 * 16);
    return layer.codes + n * layer.row_nbytes;
}

template <int KIND> static HFQ_INLINE void open_codes(const Layer &layer, Codes &codes) {
    if (KIND == NIBBLES) __builtin_memcpy(codes.values, layer.values, sizeof(codes.values));
    codes.first = layer.high_first ? 4 : 0;
}

// The bytes that hold the codes from channel k on, and of how many; k is even for NIBBLES and a multiple of 16 for QUADS.
template <int KIND> static HFQ_INLINE const char *codes_at(const char *row, int64_t k) {
    return row + (KIND == NIBBLES ? k / 2 : KIND == QUADS ? k / 64 * 128 + k / 32 % 2 * 16 : k);
}
template <int KIND> constexpr int64_t bytes_of(int64_t codes) { return KIND == NIBBLES ? (codes + 1) / 2 : codes; }

// 2 * W codes from channel k on; e4m3 comes out divided by 256.
template <int KIND> static HFQ_INLINE void decode_two(const char *row, int64_t k, const Codes &codes, vf &low, vf &high) {
    const char *p = codes_at<KIND>(row, k);
    if constexpr (KIND == NIBBLES) {
        low = decode_nibbles(p, codes.values, codes.first), high = decode_nibbles(p + W / 2, codes.values, codes.first);
        return;
    }
    if constexpr (KIND == QUADS) {
        low = decode_quads(p, (int)(k % 32 / 8)), high = decode_quads(p, (int)(k % 32 / 8) + W / 8);
        return;
    }
    if constexpr (KIND == INT8) {
        low = from_int8(p), high = from_int8(p + W);
        return;
    }
#if HFQ_PASS == 1 && !defined(HFQ_EMULATE)
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    __m256i wide = KIND == E4M3
        ? _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), _mm256_set1_epi16((short)0xBFFF))
        : _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
    low = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(wide)), high = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(wide, 1));
#else
    low = decode<KIND>(p), high = decode<KIND>(p + W);
#endif
}

template <int KIND> static float decode_one(const char *row, int64_t k, const Codes &codes) {
    const char *p = codes_at<KIND>(row, k);
    if (KIND == NIBBLES) return codes.values[(uint8_t)*p >> (4 * (k % 2) ^ codes.first) & 15];
    if (KIND == QUADS) return (float)(load16(p + 2 * (k % 8)) >> 4 * (k % 32 / 8) & 15);
    if (KIND == INT8) return (float)(int8_t)*p;
    return code_value((uint8_t)*p, KIND);
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

// A weight, or W of them, as the reference computes it.
template <int KIND, class V> static HFQ_INLINE V weight_of(const Layer &layer, V value, V scale, V zero) {
    if (KIND == QUADS || (KIND == NIBBLES && layer.row_zeros == ADDED)) return value * scale + zero;
    if (KIND == INT8) return (value - zero) * scale * layer.shared;
    if (KIND == NIBBLES) return (value - zero) * scale;
    return layer.divides ? value / scale : value * scale;
}

// Weights whose groups are scattered over the input.
template <int KIND> static void decode_scattered(const Layer &layer, int64_t n, int64_t k, int64_t count, float *out) {
    Codes codes;
    open_codes<KIND>(layer, codes);
    const char *row = codes_of<KIND>(layer, n);
    for (int64_t i = k; i < k + count; i++) {
        int64_t group = group_of(layer, i);
        float scale = scale_at(layer, scale_place(layer, n, group)), zero = row_zero(layer, n, group);
        out[i - k] = weight_of<KIND, float>(layer, decode_one<KIND>(row, i, codes), scale, zero);
    }
}

// Weights [k, k + count) of one output row, as the reference computes them.
template <int KIND> static void decode_row(const Layer &layer, int64_t n, int64_t k, int64_t count, float *out) {
    if (KIND != E4M3 && KIND != E5M2 && layer.index_nbytes) return decode_scattered<KIND>(layer, n, k, count, out);
    Codes codes;
    open_codes<KIND>(layer, codes);
    const char *row = codes_of<KIND>(layer, n);
    for (int64_t at = k, stop; at < k + count; at = stop) {
        int64_t segment = at / layer.block_in;
        stop = least(k + count, (segment + 1) * layer.block_in);
        float scale = scale_at(layer, scale_place(layer, n, segment)), zero = row_zero(layer, n, segment);
        bool slow = KIND == E4M3 && has_nan(row + at, stop - at);
        int64_t i = at;
        vf low, high;
        if (!slow)
            for (; i + 2 * W <= stop; i += 2 * W) {
                decode_two<KIND>(row, i, codes, low, high);
                if (KIND == E4M3) low *= 256.0f, high *= 256.0f;
                store(out + i - k, weight_of<KIND, vf>(layer, low, all(scale), all(zero)));
                store(out + i - k + W, weight_of<KIND, vf>(layer, high, all(scale), all(zero)));
            }
        for (; i < stop; i++) out[i - k] = weight_of<KIND, float>(layer, decode_one<KIND>(row, i, codes), scale, zero);
    }
}

// 4 * W codes, less a zero point, times as many activations; the largest magnitude among e4m3 codes is kept in `worst`.
template <int KIND>
static HFQ_INLINE void dot_codes(const char *row, int64_t k, const Codes &codes, vf zero, const float *x, vf *sum, vub &worst) {
    HFQ_UNROLL
    for (int j = 0; j < 4; j += 2) {
        vf low, high;
        decode_two<KIND>(row, k + j * W, codes, low, high);
        if (KIND == INT8 || KIND == NIBBLES) low -= zero, high -= zero;
        sum[j] = fma(low, load<vf>(x + j * W), sum[j]);
        sum[j + 1] = fma(high, load<vf>(x + (j + 1) * W), sum[j + 1]);
    }
    if (KIND != E4M3) return;
    HFQ_UNROLL
    for (int j = 0; j < 4 * W; j += 32) {
        vub rest = load<vub>(row + k + j) & 0x7F;
        worst = rest > worst ? rest : worst;
    }
}

// The product with one activation row, straight from the codes.
template <int KIND> static float dot_row(const Layer &layer, int64_t n, const float *x) {
    Codes codes;
    open_codes<KIND>(layer, codes);
    const char *row = codes_of<KIND>(layer, n);
    int64_t size = layer.in_features, first = scale_place(layer, n, 0);
    const char *scales = layer.scales + 4 * first;  // of float32, one after the other
    const bool adds = KIND == NIBBLES && layer.row_zeros == ADDED;
    vf total = all(0.0f);
    vub worst = {};
    for (int64_t at = 0, stop, segment = 0; at < size; at = stop, segment++) {
        stop = least(size, at + layer.block_in);
        vf sum[4] = {}, plain = all(0.0f), zero = all(KIND == E4M3 || KIND == E5M2 || adds ? 0.0f : row_zero(layer, n, segment));
        int64_t i = at;
        for (; i + 4 * W <= stop; i += 4 * W) {
            __builtin_prefetch(codes_at<KIND>(row, i) + AHEAD);
            dot_codes<KIND>(row, i, codes, zero, x + i, sum, worst);
            if (adds) plain += (load<vf>(x + i) + load<vf>(x + i + W)) + (load<vf>(x + i + 2 * W) + load<vf>(x + i + 3 * W));
        }
        if (i < stop) {
            char rest[4 * W];
            float part[4 * W];
            __builtin_memset(rest, 0, sizeof(rest)), __builtin_memset(part, 0, sizeof(part));
            __builtin_memcpy(rest, codes_at<KIND>(row, i), bytes_of<KIND>(stop - i)), __builtin_memcpy(part, x + i, 4 * (stop - i));
            dot_codes<KIND>(rest, 0, codes, zero, part, sum, worst);
            for (int64_t j = 0; adds && j < 4 * W; j += W) plain += load<vf>(part + j);
        }
        vf piece = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        float scale = layer.scale_dtype == F32 ? as_float(load32(scales + 4 * segment)) : scale_at(layer, first + segment * layer.scale_step);
        bool divides = KIND <= E5M2 && layer.divides;
        if (adds) total = fma(plain, all(row_zero(layer, n, segment)), total);
        total = divides ? total + piece / scale : fma(piece, all(scale), total);
    }
    uint8_t magnitudes[32], found = 0;
    store(magnitudes, worst);
    for (int i = 0; i < 32; i++) found = found > magnitudes[i] ? found : magnitudes[i];
    if (KIND == E4M3 && found == 0x7F) return as_float(0x7FC00000);
    return sum_of(total) * (KIND == E4M3 ? 256.0f : KIND == INT8 ? layer.shared : 1.0f);
}

// ---- e4m3 codes as small floats ------------------------------------------------------------------------------------------
// A code's bits, moved to where a float has its sign, exponent and mantissa, are the code's value times 2**-120, subnormal or not.
// Nine instructions make 4 * W floats of them, if activations come in the order of the bytes of W words, and so much larger.

// [row][4 * W codes][byte of a word][word]; the largest of a row becomes 2**112. After all rows, what takes that off again, as two factors.
static void order_activations(const Layer &layer, const float *x32, int64_t rows, int64_t stride, float *out) {
    int64_t size = layer.in_features, wide = ordered_columns(layer);
    for (int64_t m = 0; m < rows; m++) {
        const float *x = x32 + m * stride;
        float *to = out + m * wide, *factors = out + rows * wide + 2 * m;
        uint32_t bits = largest_bits(x, size);
        int exponent = bits ? (int)most(bits >> 23, 1) - 127 : 112, power = 112 - exponent, back = 120 - power;
        float first = as_float((uint32_t)(127 + power / 2) << 23), second = as_float((uint32_t)(127 + power - power / 2) << 23);
        for (int64_t k = 0; k < up(size, 4 * W); k += 4 * W)
            for (int64_t i = 0; i < 4 * W; i++) to[k + i % 4 * W + i / 4] = k + i < size ? x[k + i] * first * second : 0;
        factors[0] = as_float((uint32_t)(127 + back / 2) << 23), factors[1] = as_float((uint32_t)(127 + back - back / 2) << 23);
    }
}

const int64_t ORDERED_STEP = 4096;  // activations of several rows that the nearest cache holds
const int64_t ORDERED_ALONE = 6144;  // activations of one row that it holds beside the codes; more are read once for two output rows
const int64_t ORDERED_PIECE = 8192;  // the most channels that are summed by themselves: the longer a sum, the more is lost by rounding it

// 4 * W codes times as many activations of each of ROWS rows; the largest magnitude is kept in `worst`.
template <int ROWS, int OUT> static HFQ_INLINE void dot_ordered(const char *codes, const float *x, int64_t wide, vf (*sum)[ROWS], vb &worst) {
    const vu words = load<vu>(codes), odd = (vu)((vs)words >> 4), even = (vu)((vs)((vs)words << 8) >> 4), kept = (vu){} + 0x87F00000u;
    vf weights[4] = {(vf)(even << 16 & kept), (vf)(odd << 16 & kept), (vf)(even & kept), (vf)(odd & kept)};
    HFQ_UNROLL
    for (int m = 0; m < ROWS; m++)
        HFQ_UNROLL
        for (int j = 0; j < 4; j++) {
            vf &to = sum[ROWS * OUT == 1 ? j : j % 2][m];
            to = fma(weights[j], load<vf>(x + m * wide + j * W), to);
        }
    vb rest = (vb)words & 0x7F;
    worst = rest > worst ? rest : worst;
}

// total[r][m] += the products of channels [k, stop) of OUT output rows, with ROWS activation rows; SCALED ones have their scales in them.
template <int ROWS, int OUT, bool SCALED>
static HFQ_INLINE void ordered_step(const Layer &layer, int64_t n, int64_t k, int64_t stop, int64_t lead, const float *x,
                                    vf (*total)[ROWS], vb *worst) {
    const char *row = layer.codes + n * layer.row_nbytes;
    const int64_t wide = ordered_columns(layer), nbytes = layer.row_nbytes, length = SCALED ? stop : layer.block_in;
    int64_t places[OUT];
    vb found[OUT];
    for (int r = 0; r < OUT; r++) places[r] = scale_place(layer, n + r, 0), found[r] = worst[r];
    for (int64_t segment = k / length, end; k < stop; segment += k == (segment + 1) * length) {
        end = least(least(stop, k + ORDERED_PIECE), (segment + 1) * length);
        vf sum[OUT][4][ROWS] = {};
        for (; k + 64 <= end; k += 64) {
            HFQ_UNROLL
            for (int r = 0; r < OUT; r++) __builtin_prefetch(row + r * nbytes + k + lead);
            HFQ_UNROLL
            for (int64_t i = k; i < k + 64; i += 4 * W)
                HFQ_UNROLL
                for (int r = 0; r < OUT; r++) dot_ordered<ROWS, OUT>(row + r * nbytes + i, x + i, wide, sum[r], found[r]);
        }
        for (; k < end; k += 4 * W)
            for (int r = 0; r < OUT; r++) {
                char rest[4 * W];
                __builtin_memset(rest, 0, sizeof(rest)), __builtin_memcpy(rest, row + r * nbytes + k, least(4 * W, end - k));
                dot_ordered<ROWS, OUT>(rest, x + k, wide, sum[r], found[r]);
            }
        k = end;
        HFQ_UNROLL
        for (int r = 0; r < OUT; r++) {
            float scale = SCALED ? 1.0f : scale_at(layer, places[r] + segment * layer.scale_step);
            HFQ_UNROLL
            for (int m = 0; m < ROWS; m++) {
                vf piece = sum[r][0][m] + sum[r][1][m], &to = total[r][m];
                if (ROWS * OUT == 1) piece += sum[r][2][m] + sum[r][3][m];
                if (SCALED) to += piece;
                else to = layer.divides ? to + piece / scale : fma(piece, all(scale), to);
            }
        }
    }
    for (int r = 0; r < OUT; r++) worst[r] = found[r];
}

// Whether all rows of a tile share their scales, which are then multiplied with the activations.
static bool shares_scales(const Layer &layer, int64_t rows) {
    return layer.block_out % TILE_ROWS == 0 && layer.block_in < layer.in_features && rows * ordered_columns(layer) <= SCRATCH;
}

// Activations times the scales of a tile, which are brought to below 2; returns what is left of them.
static float scale_ordered(const Layer &layer, int64_t n, int64_t rows, const float *x, float *out) {
    const int64_t first = scale_place(layer, n, 0), segments = (layer.in_features + layer.block_in - 1) / layer.block_in;
    uint32_t largest = 0;
    for (int64_t i = 0; i < segments; i++) {
        float scale = scale_at(layer, first + i * layer.scale_step);
        largest = most(largest, as_bits(layer.divides ? 1 / scale : scale) & 0x7FFFFFFF);
    }
    int power = (int)least(most(largest >> 23, 1), 253) - 127;
    float shift = as_float((uint32_t)(127 - power) << 23);
    for (int64_t i = 0; i < segments; i++) {
        float scale = scale_at(layer, first + i * layer.scale_step);
        scale = layer.divides ? shift / scale : scale * shift;
        for (int64_t m = 0; m < rows; m++) {
            const int64_t start = m * ordered_columns(layer), stop = start + least(up(layer.in_features, 4 * W), (i + 1) * layer.block_in);
            for (int64_t k = start + i * layer.block_in; k < stop; k += W) store(out + k, load<vf>(x + k) * scale);
        }
    }
    return as_float((uint32_t)(127 + power) << 23);
}

template <int ROWS, int OUT, bool SCALED>
static void ordered_tile(const Call &call, int64_t row, int64_t n, int64_t count, const float *x, float unit) {
    const Layer &layer = *call.layer;
    const int64_t size = layer.in_features, step = ROWS == 1 ? size : ORDERED_STEP / ROWS / 64 * 64;
    const int64_t lead = up(AHEAD, OUT * layer.row_nbytes);  // the same channels of a later row
    const float *factors = call.ordered + call.rows * ordered_columns(layer) + 2 * row;
    vf total[TILE_ROWS][ROWS] = {};
    vb worst[TILE_ROWS] = {};
    for (int64_t k = 0; k < size; k += step)
        for (int64_t r = 0; r < count; r += OUT) {
            const int64_t stop = least(k + step, size);
            if (r + OUT <= count) ordered_step<ROWS, OUT, SCALED>(layer, n + r, k, stop, lead, x, total + r, worst + r);
            else ordered_step<ROWS, 1, SCALED>(layer, n + r, k, stop, lead, x, total + r, worst + r);
        }
    for (int64_t r = 0; r < count; r++) {
        uint8_t magnitudes[4 * W], found = 0;
        store(magnitudes, worst[r]);
        for (int i = 0; i < 4 * W; i++) found = found > magnitudes[i] ? found : magnitudes[i];
        for (int m = 0; m < ROWS; m++) {
            float sum = sum_of(total[r][m]) * unit * factors[2 * m] * factors[2 * m + 1];
            put(call, row + m, n + r, found == 0x7F ? as_float(0x7FC00000) : sum);
        }
    }
}

// The output rows [n, stop) of a part, which share their scales or have their own.
template <int ROWS, int OUT> static void ordered_pass(const Call &call, int64_t row, int64_t n, int64_t stop, float *scratch) {
    const Layer &layer = *call.layer;
    const float *x = call.ordered + row * ordered_columns(layer);
    const bool shared = shares_scales(layer, ROWS);
    const float unit = shared ? scale_ordered(layer, n, ROWS, x, scratch) : 1.0f;
    for (; n < stop; n += TILE_ROWS) {
        const int64_t count = least(TILE_ROWS, stop - n);
        if (shared) ordered_tile<ROWS, OUT, true>(call, row, n, count, scratch, unit);
        else ordered_tile<ROWS, OUT, false>(call, row, n, count, x, 1.0f);
    }
}

static void ordered_of(const Call &call, int64_t n, int64_t count, float *scratch) {
    const bool alone = call.layer->in_features <= ORDERED_ALONE;
    for (int64_t row = 0; row < call.rows; row += 4) switch (call.rows - row) {
        case 1: (alone ? ordered_pass<1, 1> : ordered_pass<1, 2>)(call, row, n, n + count, scratch); break;
        case 2: ordered_pass<2, 1>(call, row, n, n + count, scratch); break;
        case 3: ordered_pass<3, 1>(call, row, n, n + count, scratch); break;
        default: ordered_pass<4, 1>(call, row, n, n + count, scratch);
    }
}

// W scales that lie one after the other.
template <int DTYPE> static HFQ_INLINE vf scales_at(const Layer &layer, int64_t place) {
    if (DTYPE == F16) return from_half(load<vuh>(layer.scales + 2 * place));
    if (DTYPE == BF16) return (vf)(__builtin_convertvector(load<vuh>(layer.scales + 2 * place), vu) << 16);
    if (DTYPE == E8M0) {
        vu exponents = from_bytes(layer.scales + place), none = (vu)(exponents == 0), nan = (vu)(exponents == 255);
        return (vf)((exponents << 23 | (none & 0x00400000u)) | (nan & 0x7FC00000u));
    }
    vf scales = decode<E4M3>(layer.scales + place) * 256.0f;
    return layer.divides ? scales / layer.shared : scales * layer.shared;
}
template <int DTYPE> static HFQ_INLINE int64_t take_scales(const Layer &layer, int64_t place, int64_t groups, float *out) {
    int64_t i = 0;
    for (; i + W <= groups; i += W) store(out + i, scales_at<DTYPE>(layer, place + i));
    return i;
}

// The scales of an output row's groups.
static void row_scales(const Layer &layer, int64_t n, int64_t groups, float *out) {
    int64_t place = scale_place(layer, n, 0), i = 0;
    switch (layer.scale_dtype) {
        case F32: __builtin_memcpy(out, layer.scales + 4 * place, 4 * groups); return;
        case F16: i = take_scales<F16>(layer, place, groups, out); break;
        case BF16: i = take_scales<BF16>(layer, place, groups, out); break;
        case E8M0: i = take_scales<E8M0>(layer, place, groups, out); break;
        case E4M3_SCALED: i = take_scales<E4M3_SCALED>(layer, place, groups, out); break;
    }
    for (; i < groups; i++) out[i] = scale_at(layer, place + i);
}

// What is added to the codes of an output row's groups, in each of four bytes: 15 less the zero point.
static void row_shifts(const Layer &layer, int64_t n, int64_t groups, uint32_t *out) {
    int64_t i = 0;
    vu shifts = (vu){} + (uint32_t)(n % 8 * 4);
    if (layer.row_zeros == GROUP_WORDS)
        for (int j = 0; j < W; j++) shifts[j] = (uint32_t)(j % 8 * 4);
    for (; i + W <= groups && layer.row_zeros == OUTPUT_WORDS; i += W)
        store(out + i, (15u - (load<vu>(layer.zeros + 4 * (n / 8 * layer.groups + i)) >> shifts & 15u)) * 0x01010101u);
    for (; i + W <= groups && W == 8; i += W)
        store(out + i, (15u - ((vu){} + load32(layer.zeros + 4 * (n * layer.zero_words + i / 8)) >> shifts & 15u)) * 0x01010101u);
    for (; i < groups; i++)
        out[i] = (uint32_t)((layer.row_zeros == OUTPUT_WORDS ? 7 : 15) - (int)row_zero(layer, n, i)) * 0x01010101u;
}

// At least eight floats: no more are read where that could leave a line of the cache.
static HFQ_INLINE vf load_eight(const float *p) {
#if HFQ_PASS == 2 && !defined(HFQ_EMULATE)
    return (vf)_mm512_castps256_ps512(_mm256_loadu_ps(p));
#else
    return load<vf>(p);
#endif
}

// How nibbles become integers without a sign, and where the scales of their groups are: the same for all output rows.
struct IntegerCodes {
    const Layer &layer;
    int64_t padded, group_size, groups, step;  // step: groups of 8 * W codes, or none where they are part of one
    bool has_table, has_shifts;
    vb table;
    vi places;
    explicit HFQ_INLINE IntegerCodes(const Layer &from) : layer(from) {
        padded = up(layer.in_features, SPAN), group_size = least(layer.block_in, padded);
        groups = (layer.in_features + group_size - 1) / group_size, step = 8 * W / group_size;
        has_shifts = layer.row_zeros != NONE, has_table = !has_shifts && layer.unit != 1;
        for (int lane = 0; lane < W / 4; lane++) __builtin_memcpy((char *)&table + 16 * lane, layer.integers, 16);
        for (int i = 0; i < W; i++) places[i] = (int)(8 * i / group_size);
    }
    HFQ_INLINE int64_t floats() const { return 2 * (groups + W); }  // that an output row needs
};

// An output row of such codes, from its first group on.
struct IntegerRow {
    const char *codes;
    const float *scales, *shifts;
    HFQ_INLINE void open(const IntegerCodes &of, int64_t n, float *scratch) {
        float *found = scratch + of.groups + W;
        codes = codes_of<NIBBLES>(of.layer, n), scales = scratch, shifts = found;
        row_scales(of.layer, n, of.groups, scratch);
        __builtin_memset(scratch + of.groups, 0, 4 * W);
        if (of.has_shifts) row_shifts(of.layer, n, of.groups, (uint32_t *)found);
    }
    // 8 * W codes of a group and what follows it, and the scale of each lane; they are of up to eight groups.
    template <bool TABLE, bool SHIFTS>
    HFQ_INLINE vf take(const IntegerCodes &of, const char *at, int64_t group, vb &first, vb &second) const {
        vu words = load<vu>(at);
        keep_here(words);
        first = (vb)(words & 0x0F0F0F0Fu), second = (vb)(words >> 4 & 0x0F0F0F0Fu);
        if (TABLE) first = pick_bytes(of.table, first), second = pick_bytes(of.table, second);
        if (SHIFTS) {
            vb shift = (vb)pick_floats(load_eight(shifts + group), of.places);
            first += shift, second += shift;
        }
        return pick_floats(load_eight(scales + group), of.places);
    }
};

// The group of the next 8 * W codes.
static HFQ_INLINE int64_t next_group(const IntegerCodes &of, int64_t group, int64_t k) {
    return of.step ? group + of.step : group + (k + 8 * W == (group + 1) * of.group_size);
}

// The products of one output row and ROWS activation rows, all as integers.
template <int ROWS> static void dot_integers(const Call &call, int64_t row, int64_t n, float *scratch) {
    const Layer &layer = *call.layer;
    const IntegerCodes of(layer);
    const int64_t each = digits_nbytes(layer), padded = of.padded;
    IntegerRow from;
    from.open(of, n, scratch);
    vs ones = (vs){} + (int16_t)1, heavier = (vs){} + (int16_t)256;
    vf total[ROWS];
    for (int m = 0; m < ROWS; m++) total[m] = all(0.0f);
    for (int64_t k = 0, group = 0; k < layer.in_features; group = next_group(of, group, k), k += 8 * W) {
        char rest[4 * W];
        const char *at = from.codes + k / 2;
        __builtin_prefetch(at + AHEAD);
        if (layer.in_features - k < 8 * W) {
            __builtin_memset(rest, 0, sizeof(rest)), __builtin_memcpy(rest, at, (layer.in_features - k + 1) / 2);
            at = rest;
        }
        vb first, second;
        vf scale;
        if (of.has_table) scale = from.take<true, false>(of, at, group, first, second);
        else if (of.has_shifts) scale = from.take<false, true>(of, at, group, first, second);
        else scale = from.take<false, false>(of, at, group, first, second);
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++) {
            const char *digits = call.digits + (row + m) * each + DIGITS * k;
            const int32_t *totals = call.totals + (row + m) * (padded / 4) + k / 4;
            vs sum[DIGITS];
            HFQ_UNROLL
            for (int d = 0; d < DIGITS; d++)
                sum[d] = dot_bytes(first, load<vsb>(digits + 8 * W * d)) + dot_bytes(second, load<vsb>(digits + 8 * W * d + 4 * W));
            vi high = dot_shorts(sum[0], ones) + load<vi>(totals);
            vi low = dot_shorts(sum[1], heavier) + dot_shorts(sum[2], ones) + load<vi>(totals + W);
            total[m] = fma(of_digits(high, low) * all(call.units[(row + m) * (padded / SPAN) + k / SPAN]), scale, total[m]);
        }
    }
    for (int m = 0; m < ROWS; m++) put(call, row + m, n, sum_of(total[m]));
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
    bool direct = KIND != QUADS && !call.layer->index_nbytes;
    if (call.rows > 1 || !direct) return rows_tile<KIND>(call, n, count, scratch);
    if constexpr (KIND != QUADS)
        for (int64_t r = n; r < n + count; r++) put(call, 0, r, dot_row<KIND>(*call.layer, r, call.x32));
}

static void integers_of(const Call &call, int64_t n, int64_t count, float *scratch) {
    for (int64_t row = 0; row < call.rows; row += 4)
        for (int64_t r = n; r < n + count; r++) switch (call.rows - row) {
            case 1: dot_integers<1>(call, row, r, scratch); break;
            case 2: dot_integers<2>(call, row, r, scratch); break;
            case 3: dot_integers<3>(call, row, r, scratch); break;
            default: dot_integers<4>(call, row, r, scratch);
        }
}

static void rows_part(const void *context, int64_t part, float *scratch) {
    const Call &call = *(const Call *)context;
    const int64_t n = call.cut.first(part), count = call.cut.count(part);
    if (call.digits) return integers_of(call, n, count, scratch);
    if (call.ordered) return ordered_of(call, n, count, scratch);
    switch (call.layer->kind) {
        case E4M3: return rows_of<E4M3>(call, n, count, scratch);
        case E5M2: return rows_of<E5M2>(call, n, count, scratch);
        case INT8: return rows_of<INT8>(call, n, count, scratch);
        case QUADS: return rows_of<QUADS>(call, n, count, scratch);
        default: return rows_of<NIBBLES>(call, n, count, scratch);
    }
}

typedef void (*DecodeRow)(const Layer &layer, int64_t n, int64_t k, int64_t count, float *out);
static DecodeRow row_decoder(const Layer &layer) {
    switch (layer.kind) {
        case E4M3: return decode_row<E4M3>;
        case E5M2: return decode_row<E5M2>;
        case INT8: return decode_row<INT8>;
        case QUADS: return decode_row<QUADS>;
        default: return decode_row<NIBBLES>;
    }
}

// W floats as bfloat16.
static HFQ_INLINE vuh to_short(vf values) {
    vu bits = (vu)values, rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
    vu is_nan = (vu)((bits & 0x7FFFFFFF) > 0x7F800000);
    return __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), vuh);
}

static void store_panel(char *out, int32_t dtype, int64_t place, const float *values, int64_t count) {
    if (dtype == F32) { __builtin_memcpy(out + 4 * place, values, 4 * count); return; }
    int64_t i = 0;
    for (; i + W <= count; i += W) store(out + 2 * (place + i), to_short(load<vf>(values + i)));
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
            row_decoder(layer)(layer, panel.start + r, k, count, scratch);
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

// The scales of `count` columns of a group, padded with zeros to `wide` columns.
static void group_scales(const Layer &layer, int64_t group, int64_t n, int64_t count, float *out, int64_t wide) {
    int64_t place = group * layer.out_features + n, i = 0;
    for (; i + W <= count && layer.scale_dtype <= F16; i += W)
        if (layer.scale_dtype == F32) store(out + i, load<vf>(layer.scales + 4 * (place + i)));
        else if (layer.scale_dtype == F16) store(out + i, from_half(load<vuh>(layer.scales + 2 * (place + i))));
        else store(out + i, __builtin_convertvector(load<vuh>(layer.scales + 2 * (place + i)), vu) << 16);
    for (; i < count; i++) out[i] = scale_at(layer, place + i);
    for (; i < wide; i++) out[i] = 0;
}

// Zero points of W columns, which begin with a whole byte, from their packed words.
struct Zeros {
    const int bits;
    vu added, shifts, mask, more, kept;
    HFQ_INLINE Zeros(const Layer &layer) : bits(layer.bits) {
        const uint32_t most_value = (1u << bits) - 1;
        vu places, of_awq;  // known when this is compiled
        for (int j = 0; j < W; j++) places[j] = j % 8, of_awq[j] = (uint32_t)(4 * awq_place(j % 8));
        shifts = layer.kind == AWQ ? of_awq : bits == 8 ? (vu){} : places * (uint32_t)bits;
        added = (vu){} + (layer.zero_reading == WORD_PLUS_ONE ? word_ones(4) : 0);
        more = (vu){} + (layer.zero_reading == FIELD_PLUS_ONE || layer.zero_reading == MASKED_PLUS_ONE ? 1u : 0u);
        mask = (vu){} + most_value, kept = (vu){} + (layer.zero_reading == MASKED_PLUS_ONE ? most_value : ~0u);
    }
    HFQ_INLINE vu fields(vu words) const { return (((words + added) >> shifts & mask) + more) & kept; }
    HFQ_INLINE uint32_t eight(const char *p) const {
        if (bits == 4) return load32(p);
        return bits == 3 ? load16(p) | (uint32_t)(uint8_t)p[2] << 16 : load16(p);
    }
    HFQ_INLINE vu take(const char *bytes) const {
        if (bits == 8) return fields(from_bytes(bytes));
        vu words = (vu){} + eight(bytes), first;
        for (int j = 0; j < W; j++) first[j] = j < 8 ? ~0u : 0;
        if (W > 8) words = (words & first) | (((vu){} + eight(bytes + bits)) & ~first);
        return fields(words);
    }
    // The columns from n on whose zero points can be taken.
    static HFQ_INLINE int64_t whole(const Layer &layer, int64_t n, int64_t count) {
        return n % 8 == 0 && (layer.zero_reading != WORD_PLUS_ONE || layer.bits == 4) ? count / W * W : 0;  // there one is added to 32 bits
    }
};

static void group_zeros(const Layer &layer, int64_t group, int64_t n, int64_t count, float *out, int64_t wide) {
    const char *row = layer.zeros + 4 * group * layer.zero_words + n * layer.bits / 8;
    const int64_t whole = Zeros::whole(layer, n, count);
    const Zeros zeros(layer);
    int64_t i = 0;
    for (; i < whole; i += W) store(out + i, to_float(zeros.take(row + i * zeros.bits / 8)));
    for (; i < count; i++) out[i] = zero_at(layer, group, n + i);
    for (; i < wide; i++) out[i] = 0;
}

// Zero points of a group's columns as integers; of four bits eight vectors' at once.
static void integer_zeros(const Layer &layer, int64_t group, int64_t n, int64_t count, int32_t *out, int64_t wide) {
    const char *row = layer.zeros + 4 * group * layer.zero_words + n * layer.bits / 8;
    const int64_t whole = Zeros::whole(layer, n, count);
    const Zeros zeros(layer);
    int64_t i = 0;
    vi places;
    for (int j = 0; j < W; j++) places[j] = j / 8;
    for (; W == 16 && zeros.bits == 4 && i + 8 * W <= whole; i += 8 * W) {
        const vf table = load<vf>(row + i / 2);
        HFQ_UNROLL
        for (int v = 0; v < 8; v++) store(out + i + v * W, zeros.fields((vu)pick_floats(table, places + 2 * v)));
    }
    for (; i < whole; i += W) store(out + i, zeros.take(row + i * zeros.bits / 8));
    for (; i < count; i++) out[i] = (int32_t)zero_at(layer, group, n + i);
    for (; i < wide; i++) out[i] = 0;
}

// The words of up to CHUNK codes [k, k + codes) of `most` neighbouring columns; what is cut off by the last column, or the end of a
// group, is copied and padded.
struct Words {
    const char *at;
    int64_t pitch;
    char copy[CHUNK * 4 * W];
    HFQ_INLINE void take(const Layer &layer, int64_t k, int64_t codes, int64_t n, int64_t columns, int64_t most_columns, int64_t most_codes) {
        int64_t rows = codes, nbytes = columns / 2, wide = most_columns / 2;
        pitch = layer.row_nbytes;
        if (layer.kind == AWQ) {
            at = layer.codes + k * pitch + n / 2;
        } else {
            rows = codes * layer.bits / 32, nbytes = 4 * columns, wide = 4 * most_columns;
            at = layer.codes + k * layer.bits / 32 * pitch + 4 * n;
        }
        if (columns >= most_columns && codes >= most_codes) return;
        __builtin_memset(copy, 0, sizeof(copy));
        for (int64_t r = 0; r < rows; r++) __builtin_memcpy(copy + wide * r, at + pitch * r, least(nbytes, wide));
        at = copy, pitch = wide;
    }
};

// CHUNK codes of W columns, or of AWQ the next four codes of 8 * W columns: four codes of a column to a lane.
template <int BITS> static HFQ_INLINE void unpack(const char *words, int64_t pitch, vb *out) {
    if constexpr (BITS == 0) {
        vu row[4];
        HFQ_UNROLL
        for (int k = 0; k < 4; k++) row[k] = load<vu>(words + k * pitch);
        HFQ_UNROLL
        for (int part = 0; part < 2; part++) {
            vb codes[4];
            HFQ_UNROLL
            for (int k = 0; k < 4; k++) codes[k] = (vb)(row[k] >> 4 * part & 0x0F0F0F0Fu);
            vb a = low_bytes(codes[0], codes[1]), b = low_bytes(codes[2], codes[3]);
            vb c = high_bytes(codes[0], codes[1]), d = high_bytes(codes[2], codes[3]);
            out[4 * part] = low_pairs(a, b), out[4 * part + 1] = high_pairs(a, b);
            out[4 * part + 2] = low_pairs(c, d), out[4 * part + 3] = high_pairs(c, d);
        }
    } else if constexpr (BITS == 3) {  // 24 bits hold eight codes: first the first, second and third bytes of all four such
        vu w0 = load<vu>(words), w1 = load<vu>(words + pitch), w2 = load<vu>(words + 2 * pitch), low = (vu){} + 0xFFu;
        vu a = (w0 & low) | (w0 >> 16 & 0xFF00u) | (w1 & 0xFF0000u) | (w2 << 16 & 0xFF000000u);
        vu b = (w0 >> 8 & low) | (w1 << 8 & 0xFF00u) | (w1 >> 8 & 0xFF0000u) | (w2 << 8 & 0xFF000000u);
        vu c = (w0 >> 16 & low) | (w1 & 0xFF00u) | (w2 << 16 & 0xFF0000u) | (w2 & 0xFF000000u);
        vu all_ones = (vu){} + 0x07070707u;
        out[0] = (vb)(a & all_ones), out[1] = (vb)(a >> 3 & all_ones);
        out[2] = (vb)((a >> 6 & 0x03030303u) | (b << 2 & 0x04040404u));
        out[3] = (vb)(b >> 1 & all_ones), out[4] = (vb)(b >> 4 & all_ones);
        out[5] = (vb)((b >> 7 & 0x01010101u) | (c << 1 & 0x06060606u));
        out[6] = (vb)(c >> 2 & all_ones), out[7] = (vb)(c >> 5 & all_ones);
    } else {
        const int parts = 8 / BITS;
        HFQ_UNROLL
        for (int v = 0; v < 8; v++) {
            vu word = load<vu>(words + v / parts * pitch);
            out[v] = (vb)(BITS == 8 ? word : word >> BITS * (v % parts) & (BITS == 4 ? 0x0F0F0F0Fu : 0x03030303u));
        }
    }
}

static HFQ_INLINE vsb spread(const char *digits) { return (vsb)((vu){} + load32(digits)); }

// Which halves of a chunk have lowest digits other than zero. Activations of bfloat16 have them where they are below 2**-7 of a span's
// largest, and then often alone.
static HFQ_INLINE int lowest_digits(const char *digits) {
    uint64_t words[4];
    __builtin_memcpy(words, digits + (DIGITS - 1) * CHUNK, sizeof(words));
    return (words[0] | words[1] ? 1 : 0) | (words[2] | words[3] ? 2 : 0);
}

// Four vectors of a chunk's codes times one of their digits; of eight bits, the halves each by itself: int16 holds no more.
template <int BITS> static HFQ_INLINE void add_half(const vb *codes, const char *digits, vs &first, vs &second) {
    HFQ_UNROLL
    for (int v = 0; v < 4; v++) {
        vsb x = spread(digits + 4 * v);
        first += dot_bytes(BITS == 8 ? (vb)((vu)codes[v] & 0x0F0F0F0Fu) : codes[v], x);
        keep_here(first);
        if (BITS == 8) { second += dot_bytes((vb)((vu)codes[v] >> 4 & 0x0F0F0F0Fu), x); keep_here(second); }
    }
}

// A chunk of codes times the digits of its activations, of which the halves in `lowest` have lowest ones.
template <int BITS> static HFQ_INLINE void add_chunk(const vb *codes, const char *digits, int lowest, int32_t *high, int32_t *low) {
    const vs ones = (vs){} + (int16_t)1;
    vi sum[DIGITS] = {};
    HFQ_UNROLL
    for (int d = 0; d < DIGITS; d++) {
        const bool is_last = d == DIGITS - 1;
        if (is_last && !lowest) break;
        vs weight = d == 1 ? ones * (int16_t)256 : ones, first = {}, second = {};
        HFQ_UNROLL
        for (int half = 0; half < 2; half++)
            if (!is_last || lowest >> half & 1) add_half<BITS>(codes + 4 * half, digits + d * CHUNK + 16 * half, first, second);
        sum[d] = dot_shorts(first, weight);
        if (BITS == 8) sum[d] += dot_shorts(second, weight * (int16_t)16);
    }
    store(high, load<vi>(high) + sum[0]);
    store(low, load<vi>(low) + (sum[1] + sum[2]));
}

// As add_chunk, for the codes of two column vectors, straight from their words, and the first COUNT digits.
template <int BITS, int COUNT>
static HFQ_INLINE void add_two(const char *words, int64_t pitch, const char *digits, int32_t *high, int32_t *low) {
    const int parts = 8 / BITS;
    const uint32_t mask = BITS == 4 ? 0x0F0F0F0Fu : 0x03030303u;
    const vs ones = (vs){} + (int16_t)1, heavier = (vs){} + (int16_t)256;
    vs a[DIGITS] = {}, b[DIGITS] = {};
    HFQ_UNROLL
    for (int r = 0; r < BITS; r++) {
        vu first = load<vu>(words + r * pitch), second = load<vu>(words + r * pitch + 4 * W);
        keep_here(first), keep_here(second);
        HFQ_UNROLL
        for (int part = 0; part < parts; part++)
            HFQ_UNROLL
            for (int d = 0; d < COUNT; d++) {
                vsb x = spread(digits + d * CHUNK + 4 * (r * parts + part));
                a[d] += dot_bytes((vb)(first >> BITS * part & mask), x), b[d] += dot_bytes((vb)(second >> BITS * part & mask), x);
                keep_here(a[d]), keep_here(b[d]);
            }
    }
    vi low_a = dot_shorts(a[1], heavier), low_b = dot_shorts(b[1], heavier);
    if (COUNT == DIGITS) low_a += dot_shorts(a[2], ones), low_b += dot_shorts(b[2], ones);
    store(high, load<vi>(high) + dot_shorts(a[0], ones)), store(high + W, load<vi>(high + W) + dot_shorts(b[0], ones));
    store(low, load<vi>(low) + low_a), store(low + W, load<vi>(low + W) + low_b);
}

// add_two along a row of words; returns the columns that were taken.
template <int BITS, int COUNT>
static HFQ_INLINE int64_t add_pairs(const char *words, int64_t pitch, const char *digits, int64_t count, int32_t *high, int32_t *low) {
    int64_t i = 0;
    for (; i + 2 * W <= count; i += 2 * W) {
        HFQ_UNROLL
        for (int r = 0; r < BITS; r++)
            for (int64_t line = 0; line < 8 * W; line += 64) __builtin_prefetch(words + (BITS + r) * pitch + 4 * i + line);
        add_two<BITS, COUNT>(words + 4 * i, pitch, digits, high + i, low + i);
    }
    return i;
}

// As add_chunk, for four codes of 8 * W columns of AWQ: vector by vector.
template <int COUNT> static HFQ_INLINE void add_awq_digits(const vb *codes, const char *digits, int32_t *high, int32_t *low) {
    const vs ones = (vs){} + (int16_t)1, heavier = (vs){} + (int16_t)256;
    vsb x[COUNT];
    HFQ_UNROLL
    for (int d = 0; d < COUNT; d++) x[d] = spread(digits + d * CHUNK);
    HFQ_UNROLL
    for (int v = 0; v < 8; v++) {
        store(high + v * W, load<vi>(high + v * W) + dot_shorts(dot_bytes(codes[v], x[0]), ones));
        vi rest = dot_shorts(dot_bytes(codes[v], x[1]), heavier);
        if (COUNT == DIGITS) rest += dot_shorts(dot_bytes(codes[v], x[COUNT - 1]), ones);
        store(low + v * W, load<vi>(low + v * W) + rest);
    }
}
static HFQ_INLINE void add_awq(const vb *codes, const char *digits, int32_t *high, int32_t *low) {
    if (load32(digits + (DIGITS - 1) * CHUNK)) add_awq_digits<DIGITS>(codes, digits, high, low);
    else add_awq_digits<DIGITS - 1>(codes, digits, high, low);
}

// The column whose sum is the i-th of 8 * W of AWQ's: they come out in the order that they are unpacked in.
struct AwqOrder {
    uint8_t column[8 * W];
    constexpr AwqOrder() : column() {
        const int first[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}};
        for (int i = 0; i < 8 * W; i++) {
            const int lane = i % W, vector = i / W;
            column[i] = (uint8_t)(8 * (lane / 4 * 4 + vector % 4) + first[vector / 4][lane % 4]);
        }
    }
};
static constexpr AwqOrder awq_order;

// sum over the chunks of a span of a group, for all columns of a tile.
template <int BITS>
static void add_span(const Call &call, int64_t row, int64_t rows, int64_t n, int64_t count, int64_t k, int64_t stop,
                     const char *digits, int32_t *high, int32_t *low, int64_t wide) {
    const Layer &layer = *call.layer;
    const int64_t step = BITS == 0 ? 8 * W : W, each = digits_nbytes(layer);
    for (; k < stop; k += CHUNK, digits += DIGITS * CHUNK) {
        int64_t i = 0;
        int lowest[PASS];
        for (int64_t m = 0; m < rows; m++) lowest[m] = lowest_digits(digits + (row + m) * each);
        if constexpr (BITS == 2 || BITS == 4)
            if (rows == 1 && stop - k >= CHUNK) {
                const int64_t pitch = layer.row_nbytes;
                const char *words = layer.codes + k * BITS / 32 * pitch + 4 * n, *x = digits + row * each;
                i = lowest[0] ? add_pairs<BITS, DIGITS>(words, pitch, x, count, high, low)
                              : add_pairs<BITS, DIGITS - 1>(words, pitch, x, count, high, low);
            }
        for (; i < count; i += step) {
            Words words;
            vb codes[8];
            words.take(layer, k, least(CHUNK, stop - k), n + i, count - i, step, CHUNK);
            if constexpr (BITS == 0) {
                for (int set = 0; set < 8; set++) {
                    HFQ_UNROLL
                    for (int r = 0; r < 4; r++) __builtin_prefetch(words.at + (4 * set + CHUNK + r) * words.pitch);
                    unpack<0>(words.at + 4 * set * words.pitch, words.pitch, codes);
                    for (int64_t m = 0; m < rows; m++)
                        add_awq(codes, digits + (row + m) * each + 4 * set, high + m * wide + i, low + m * wide + i);
                }
            } else {
                unpack<BITS>(words.at, words.pitch, codes);
                for (int64_t m = 0; m < rows; m++)
                    add_chunk<BITS>(codes, digits + (row + m) * each, lowest[m], high + m * wide + i, low + m * wide + i);
            }
        }
    }
}

// The results of a tile's columns, of which `skipped` are none; AWQ's have an order of their own.
static void put_columns(const Call &call, int64_t row, int64_t rows, int64_t n, int64_t skipped, int64_t count, const float *y, int64_t wide, bool is_awq) {
    for (int64_t m = 0; m < rows; m++, y += wide)
        for (int64_t i = 0; i < count; i += 8 * W) {
            float ordered[8 * W];
            const float *from = y + i;
            for (int j = 0; is_awq && j < 8 * W; j++) ordered[awq_order.column[j]] = from[j];
            if (is_awq) from = ordered;
            int64_t j = i ? 0 : skipped, there = least(8 * W, count - i);
            char *to = call.y + 2 * ((row + m) * call.y_stride + n + i);
            for (; call.y_dtype == BF16 && j + W <= there; j += W) store(to + 2 * j, to_short(load<vf>(from + j)));
            for (; j < there; j++) put(call, row + m, n + i + j, from[j]);
        }
}

// A pass of activation rows times the columns of a tile, as integers; scales are applied, and zero points taken off, span by span.
template <int BITS> static void integer_tile(const Call &call, int64_t row, int64_t rows, int64_t n, int64_t count, float *scratch) {
    const Layer &layer = *call.layer;
    const int64_t wide = up(count, BITS == 0 ? 8 * W : W), size = layer.in_features;
    float *y = scratch, *scales = y + rows * wide, *loose = scales + wide;
    int32_t *zeros = (int32_t *)(loose + wide), *high = zeros + wide, *low = high + rows * wide;
    const char *digits = call.digits;
    const uint8_t *column = awq_order.column;
    __builtin_memset(y, 0, 4 * rows * wide);
    for (int64_t group = 0, span = 0; group < layer.groups; group++) {
        int64_t start = group * layer.block_in, stop = least(start + layer.block_in, size);
        group_scales(layer, group, n, count, BITS == 0 ? loose : scales, wide);
        if (BITS == 0) {
            for (int64_t i = 0; i < wide; i++) scales[i] = loose[i / (8 * W) * 8 * W + column[i % (8 * W)]];
            group_zeros(layer, group, n, count, loose, wide);
            for (int64_t i = 0; i < wide; i++) zeros[i] = (int32_t)loose[i / (8 * W) * 8 * W + column[i % (8 * W)]];
        } else {
            integer_zeros(layer, group, n, count, zeros, wide);
        }
        for (int64_t s = 0; s < group_spans(layer); s++, span++) {
            int64_t k = start + s * SPAN, chunks = least(SPAN / CHUNK, group_chunks(layer) - s * (SPAN / CHUNK));
            for (int64_t m = 0; m < rows; m++) {  // sums begin at what zero points take off them
                const int32_t *sums = call.totals + (row + m) * totals(layer) + 2 * span;
                vu high_sum = (vu){} - (uint32_t)sums[0], low_sum = (vu){} - (uint32_t)sums[1];
                for (int64_t i = 0; i < wide; i += W) {
                    vu zero = load<vu>(zeros + i);
                    store(high + m * wide + i, zero * high_sum), store(low + m * wide + i, zero * low_sum);
                }
            }
            add_span<BITS>(call, row, rows, n, count, k, least(k + SPAN, stop), digits, high, low, wide);
            digits += chunks * DIGITS * CHUNK;
            for (int64_t m = 0; m < rows; m++) {
                vf unit = all(call.units[(row + m) * spans(layer) + span]);
                for (int64_t i = 0; i < wide; i += W) {
                    vf value = of_digits(load<vi>(high + m * wide + i), load<vi>(low + m * wide + i));
                    store(y + m * wide + i, fma(load<vf>(scales + i), value * unit, load<vf>(y + m * wide + i)));
                }
            }
        }
    }
    put_columns(call, row, rows, n, 0, count, y, wide, BITS == 0);
}

// Scales and zero points of all groups for the columns of a tile, [groups, wide] each.
static void all_groups(const Layer &layer, int64_t n, int64_t count, int64_t wide, float *scales, float *zeros) {
    for (int64_t group = 0; group < layer.groups; group++) {
        group_scales(layer, group, n, count, scales + group * wide, wide);
        group_zeros(layer, group, n, count, zeros + group * wide, wide);
    }
}

// What a tile of scattered groups is multiplied with: scales and zero points, [groups, wide] each, and up to 32 codes of each vector.
struct Scattered {
    int64_t wide, codes, places[32];  // of the groups of the codes
    float *scales, *zeros, *decoded;
};

// sums[v * W] += up to 32 codes of each of VECTORS column vectors, from column i of the tile on, times ROWS activation rows.
template <int ROWS, int VECTORS>
static HFQ_INLINE void add_scattered(const Scattered &of, int64_t i, const float *x, int64_t stride, float *sums) {
    vf sum[ROWS][VECTORS];
    HFQ_UNROLL
    for (int m = 0; m < ROWS; m++)
        HFQ_UNROLL
        for (int v = 0; v < VECTORS; v++) sum[m][v] = load<vf>(sums + m * of.wide + v * W);
    for (int64_t c = 0; c < of.codes; c++) {
        const int64_t place = of.places[c] + i;
        HFQ_UNROLL
        for (int v = 0; v < VECTORS; v++) {
            vf code = load<vf>(of.decoded + (v * 32 + c) * W), zero = load<vf>(of.zeros + place + v * W);
            vf weight = (code - zero) * load<vf>(of.scales + place + v * W);
            HFQ_UNROLL
            for (int m = 0; m < ROWS; m++) sum[m][v] = fma(weight, all(x[m * stride + c]), sum[m][v]);
        }
    }
    HFQ_UNROLL
    for (int m = 0; m < ROWS; m++)
        HFQ_UNROLL
        for (int v = 0; v < VECTORS; v++) store(sums + m * of.wide + v * W, sum[m][v]);
}

// Each code with the scale and zero point of its own group; of one activation row several vectors at a time, since a sum waits for itself.
template <int ROWS> static void scattered_tile(const Call &call, int64_t row, int64_t n, int64_t count, float *scratch) {
    const Layer &layer = *call.layer;
    const Decode decode_block = decoder(layer);
    const int64_t wide = up(count, W), size = layer.in_features;
    const int VECTORS = ROWS == 1 ? 4 : 1;
    Scattered of = {wide, 0, {}, scratch, scratch + layer.groups * wide, scratch + (2 * layer.groups + ROWS) * wide};
    float *y = of.zeros + layer.groups * wide;
    all_groups(layer, n, count, wide, of.scales, of.zeros);
    __builtin_memset(y, 0, sizeof(float) * ROWS * wide);
    for (int64_t k = 0; k < size; k += 32) {
        const float *x = call.x32 + row * call.stride + k;
        of.codes = least(32, size - k);
        for (int64_t c = 0; c < of.codes; c++) of.places[c] = group_of(layer, k + c) * wide;
        for (int64_t i = 0, vectors; i < wide; i += vectors * W) {
            vectors = wide - i >= VECTORS * W ? VECTORS : 1;
            for (int64_t v = 0; v < vectors; v++) {
                Words words;
                words.take(layer, k, of.codes, n + i + v * W, count - i - v * W, W, 0);
                for (int64_t r = 0; r < layer.bits && words.at != words.copy; r++) __builtin_prefetch(words.at + (layer.bits + r) * words.pitch);
                decode_block(words.at, words.pitch, of.codes, of.decoded + v * 32 * W);
            }
            if (vectors > 1) add_scattered<ROWS, VECTORS>(of, i, x, call.stride, y + i);
            else add_scattered<ROWS, 1>(of, i, x, call.stride, y + i);
        }
    }
    for (int64_t m = 0; m < least(ROWS, call.rows - row); m++)
        for (int64_t i = 0; i < count; i++) put(call, row + m, n + i, y[m * wide + i]);
}

#include "act_order.h"

static void multiply_columns(const Call &call, int64_t n, int64_t count, float *scratch) {
    const int bits = call.layer->kind == AWQ ? 0 : call.layer->bits;
    for (int64_t row = 0, rows; row < call.rows; row += PASS) {
        rows = least(PASS, call.rows - row);
        if (!call.digits) {
            if (rows == 1) scattered_tile<1>(call, row, n, count, scratch);
            else if (rows <= PASS / 2) scattered_tile<PASS / 2>(call, row, n, count, scratch);
            else scattered_tile<PASS>(call, row, n, count, scratch);
        } else if (bits == 0) integer_tile<0>(call, row, rows, n, count, scratch);
        else if (bits == 2) integer_tile<2>(call, row, rows, n, count, scratch);
        else if (bits == 3) integer_tile<3>(call, row, rows, n, count, scratch);
        else if (bits == 4) integer_tile<4>(call, row, rows, n, count, scratch);
        else integer_tile<8>(call, row, rows, n, count, scratch);
    }
}

// The columns of a part, of a sorted layer strip by strip.
template <void (*MULTIPLY)(const Call &, int64_t, int64_t, float *)> static void multiply_strips(const Call &call, int64_t part, float *scratch) {
    const Layer &layer = *call.layer;
    const int64_t first = call.cut.first(part), stop = first + call.cut.count(part);
    if (!is_sorted(layer)) return MULTIPLY(call, first, stop - first, scratch);
    Call of = call;
    for (int64_t n = first, count; n < stop; n += count) {
        count = least(STRIP_COLUMNS - skipped_before(layer, call.cut, n), stop - n);
        const Layer strip = sort_strip(layer, n, count, scratch);
        of.layer = &strip;
        MULTIPLY(of, n, count, scratch);
    }
}

static void columns_part(const void *context, int64_t part, float *scratch) {
    multiply_strips<multiply_columns>(*(const Call *)context, part, scratch);
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
            words.take(layer, k, codes, panel.start + first + i, count - i, W, 0);
            decode_block(words.at, words.pitch, codes, decoded);
            if (panel.dtype == F32 && count - i >= W && places[0] == places[codes - 1] && !layer.index_nbytes) {
                vf scale = load<vf>(scales + places[0] + i), zero = load<vf>(zeros + places[0] + i);
                float *to = (float *)panel.out + k * panel.count + first + i;
                for (int64_t c = 0; c < codes; c++, to += panel.count) store(to, (load<vf>(decoded + c * W) - zero) * scale);
                continue;
            }
            if (panel.dtype == BF16 && count - i >= W) {
                char *to = panel.out + 2 * (k * panel.count + first + i);
                for (int64_t c = 0; c < codes; c++, to += 2 * panel.count) {
                    vf zero = load<vf>(zeros + places[c] + i), scale = load<vf>(scales + places[c] + i);
                    store(to, to_short((load<vf>(decoded + c * W) - zero) * scale));
                }
                continue;
            }
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
