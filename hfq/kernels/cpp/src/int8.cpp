// Integer products of int8 activations and an int8 weight in nn.Linear's layout. The interface is plain C,
// loaded by ctypes.
//
// AVX2 without VNNI has one exact way: codes are widened to 16 bits, and pairs of products are summed in 32
// bits (vpmaddwd). The shorter way with 8-bit codes (vpmaddubsw) saturates at 16 bits. Dot products of bytes
// (AVX-512 VNNI) and Intel's tiles (AMX) sum in 32 bits, and compute every product if the processor has them.
// Sums are exact for fewer than 2**17 inputs, so results do not depend on the order or the threads.

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

#include "int8_avx2.h"
#include "int8_avx512.h"

// Returns the best engine of the processor, up to `most`.
Engine engine_of(int most) {
    if (most >= (int)Engine::tiles && has_tiles()) return Engine::tiles;
    if (most >= (int)Engine::dots && has_dots()) return Engine::dots;
#if defined(__x86_64__)
    if (most >= (int)Engine::avx2 && cpu_features::found().avx2) return Engine::avx2;
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

#include "int8_plans.h"

// Output features, divided into parts; each free thread takes the next one.
struct Parts {
    const MatmulArgs &args;  // arguments of the product
    const Level &level;      // functions of the engine
    const Scaling &scaling;  // scaling of the sums
    int64_t count;           // number of parts
    int64_t next;            // number of the next part to take
    int64_t threads;         // threads that have started

    int64_t first(int64_t part, int64_t multiple) const {
        const int64_t out = args.out_features;
        return std::min((out + multiple - 1) / multiple * part / count * multiple, out);
    }
};

void take_parts(void *argument) {
    Parts *parts = (Parts *)argument;
    const MatmulArgs &args = parts->args;
    const TilePlan tiles(args.rows, args.in_features);
    const DotPlan dots(args.rows, args.in_features);
    const Engine engine = parts->level.engine;
    const int64_t multiple = engine == Engine::tiles ? WIDTH : engine == Engine::dots ? SIDE : 1;
    const int64_t thread = __atomic_fetch_add(&parts->threads, 1, __ATOMIC_RELAXED);
    KeptSubnormals here;
    for (int64_t part; (part = __atomic_fetch_add(&parts->next, 1, __ATOMIC_RELAXED)) < parts->count;) {
        const int64_t first = parts->first(part, multiple), last = parts->first(part + 1, multiple);
        if (engine == Engine::tiles) {
            multiply_by_tiles(args, parts->scaling, tiles, first, last,
                              (int32_t (*)[SIDE * SIDE])(args.sums + tiles.words() * thread));
        } else if (engine == Engine::dots) {
            multiply_by_dots(args, parts->scaling, dots, first, last, args.sums + dots.words() * thread);
        } else {
            parts->level.multiply(args, first, last);
            parts->scaling.apply(args, first, last);
        }
    }
}

// Packing of activations, which are also rounded unless `rows` is null: in blocks of 16 rows for tiles, in
// groups for dot products.
struct Packing {
    const MatmulArgs &args;  // arguments of the product; `packed` and `offsets` are written
    const Level &level;      // functions of the engine
    const Rows *rows;        // activations to round; null if `args` has codes
    float *scales;           // scale of each row; written if `rows` is not null
    int64_t count;           // number of blocks or groups
    int64_t next;            // number of the next block or group to take

    void scale(int64_t m) const {
        const int64_t in = args.in_features, start = m * rows->stride;
        const bool is_narrow = rows->is_bfloat16;
        scales[m] = rows->scale(is_narrow ? amplitude_of_bfloats((const uint16_t *)rows->x + start, in)
                                          : level.amplitude((const float *)rows->x + start, in, 0));
    }

    // Returns at most CHUNK channels of a row as codes; rounded codes are written to `codes`.
    const int16_t *codes(int64_t m, int64_t k, int64_t width, float *wide, int16_t *codes) const {
        if (!rows) return args.activations + m * args.in_features + k;
        level.round(rows->values(level, m, k, width, wide), width, scales[m], codes);
        return codes;
    }
};

void pack_block(const Packing &packing, int64_t first) {
    const MatmulArgs &args = packing.args;
    const int64_t in = args.in_features, count = std::min(args.rows - first, SIDE),
                  pitch = packing.rows ? CHUNK : in;
    int8_t *tile = args.packed + first / SIDE * steps_of(in) * amx::TILE;
    float wide[CHUNK];
    int16_t room[SIDE][CHUNK];
    for (int64_t m = first; packing.rows && m < first + count; m++) packing.scale(m);
    for (int64_t k = 0; k < in; k += CHUNK) {
        const int64_t width = std::min(in - k, CHUNK);
        const int16_t *codes = packing.codes(first, k, width, wide, room[0]);
        for (int64_t m = 1; m < count; m++) packing.codes(first + m, k, width, wide, room[m]);
        for (int64_t at = 0; at < width; at += STEP, tile += amx::TILE)
            pack(codes + at, pitch, count, std::min(width - at, STEP), tile);
    }
}

void pack_group(const Packing &packing, int64_t group) {
    const MatmulArgs &args = packing.args;
    const DotPlan plan(args.rows, args.in_features);
    const int64_t in = args.in_features, first = plan.first_row(group),
                  rows = plan.first_row(group + 1) - first;
    int8_t *to = args.packed + first * plan.steps * STEP;
    uint32_t sums[GROUP] = {};
    float wide[CHUNK];
    int16_t room[CHUNK];
    for (int64_t m = 0; packing.rows && m < rows; m++) packing.scale(first + m);
    for (int64_t k = 0; k < in; k += CHUNK, to += rows * CHUNK) {
        const int64_t width = std::min(in - k, CHUNK);
        for (int64_t m = 0; m < rows; m++)
            sums[m] += (uint32_t)pack_row(packing.codes(first + m, k, width, wide, room), width,
                                          to + m * STEP, rows * STEP);
    }
    for (int64_t m = 0; m < rows; m++) args.offsets[first + m] = (int32_t)(128 * sums[m]);
}

void take_packing(void *argument) {
    Packing *packing = (Packing *)argument;
    KeptSubnormals here;
    for (int64_t unit; (unit = __atomic_fetch_add(&packing->next, 1, __ATOMIC_RELAXED)) < packing->count;) {
        if (packing->level.engine == Engine::tiles) pack_block(*packing, unit * SIDE);
        else pack_group(*packing, unit);
    }
}

// GOMP_parallel of torch's OpenMP runtime, or null. Its threads stay awake and would compete with others (see
// threads.h).
typedef void (*Team)(void (*work)(void *), void *data, unsigned threads, unsigned flags);
Team team = nullptr;
pthread_once_t team_once = PTHREAD_ONCE_INIT;

// the child of a fork has none of the threads, and its runtime would wait for them
void forget_team() { team = nullptr; }
void watch_forks() { pthread_atfork(nullptr, nullptr, forget_team); }

void spread(void (*work)(void *), void *data, int64_t worth, int threads) {
    if (worth > 1 && team) return team(work, data, (unsigned)threads, 0);
    std::vector<std::thread> others;
    try {
        for (int64_t other = 1; other < worth; other++) others.emplace_back(work, data);
    } catch (const std::exception &) {  // too few threads or no memory: the existing threads do all the work
    }
    work(data);
    for (auto &other : others) other.join();
}

void run(const MatmulArgs &args, const Level &level, const Scaling &scaling, int threads) {
    // number of threads worth waking for this many products
    int64_t worth = 1 + (args.rows * args.in_features * args.out_features >> (team ? 19 : 21));
    if (worth > threads) worth = threads;
    // parts per thread; a thread that is interrupted takes fewer of them
    const int64_t shares = level.engine == Engine::dots ? 8 : 2;
    Parts parts = {args, level, scaling, worth > 1 ? shares * worth : 1, 0, 0};
    spread(take_parts, &parts, worth, threads);
}

void run_packing(const MatmulArgs &args, const Level &level, const Rows *rows, float *scales, int threads) {
    const int64_t count =
        level.engine == Engine::tiles ? blocks_of(args.rows) : DotPlan(args.rows, args.in_features).groups;
    // number of threads worth waking for this many values
    int64_t worth = std::min(1 + (args.rows * args.in_features >> (team ? 16 : 18)), count);
    if (worth > threads) worth = threads;
    Packing packing = {args, level, rows, scales, count, 0};
    spread(take_packing, &packing, worth, threads);
}

// Returns words of the caller's scratch, aligned to a cache line; null if the allocation failed.
int32_t *own_words(int64_t words) {
    words += 16;
    try {
        if ((int64_t)activation_scratch.size() < words) activation_scratch.resize(words);
    } catch (const std::exception &) {
        return nullptr;
    }
    return (int32_t *)(((uintptr_t)activation_scratch.data() + 63) / 64 * 64);
}

// Scratch of dot products and tiles, in 32-bit words; none for the other engines.
struct Room {
    int64_t sums = 0;     // words for the sums of all threads
    int64_t packed = 0;   // words for the packed activations
    int64_t offsets = 0;  // words for the offsets of the rows

    Room(Engine engine, int64_t rows, int64_t in_features, int threads) {
        if (engine < Engine::dots) return;
        const bool by_tiles = engine == Engine::tiles;
        sums = (by_tiles ? TilePlan(rows, in_features).words() : DotPlan(rows, in_features).words()) *
               std::max(threads, 1);
        packed = (by_tiles ? blocks_of(rows) * SIDE : rows) * steps_of(in_features) * (STEP / 4);
        offsets = by_tiles ? 0 : rows;
    }

    int64_t words() const { return sums + packed + offsets; }

    void give(MatmulArgs &args, int32_t *words) const {
        args.sums = words;
        args.packed = (int8_t *)(words + sums);
        args.offsets = words + sums + packed;
    }
};

}  // namespace

extern "C" {

// Sets the threads to use: GOMP_parallel of an OpenMP runtime, or null.
void hfq_int8_use_team(Team wanted) {
    pthread_once(&team_once, watch_forks);
    team = wanted;
}

// Returns the number of the best engine. Dot products and tiles support any number of rows.
int hfq_int8_engine() { return (int)engine_of((int)Engine::tiles); }

// Computes result[m, n] = sum of activations[m, k] * weight[n, k], by the best engine up to `most`. All
// arrays are contiguous, at any alignment. Activations are within int8's range. Returns 0, or another value
// if memory ran out and nothing was computed.
int hfq_int8_product(const int8_t *weight, const int16_t *activations, int32_t *result, int64_t rows,
                     int64_t in_features, int64_t out_features, int threads, int most) {
    const Level level = level_of(most);
    MatmulArgs args = {weight, activations, result, rows, in_features, out_features};
    if (level.engine >= Engine::dots) {
        const Room room(level.engine, rows, in_features, threads);
        int32_t *words = own_words(room.words());
        if (!words) return -3;
        room.give(args, words);
        run_packing(args, level, nullptr, nullptr, threads);
    }
    run(args, level, {}, threads);
    return 0;
}

// A weight and the rounding of its activations. The scales of the weight's rows, or of all rows, are `steps`
// times `multiplier`. The scale of a row of activations is min(amplitude, bound) / top, or 1 if the amplitude
// is 0.
struct Weight {
    int64_t codes;         // address of the codes, int8 [out_features, in_features]
    int64_t steps;         // address of the scales, without `multiplier`
    int64_t steps_count;   // number of scales: 1 or out_features
    int64_t steps_dtype;   // 0 float32, 1 bfloat16, 2 float16
    int64_t in_features;   // input channels
    int64_t out_features;  // outputs
    float multiplier;      // factor of `steps`
    float top;             // divisor of a row's amplitude for its scale
    float bound;           // upper bound of amplitudes
};

// Arguments of one product in one struct: ctypes would convert them one by one, which takes as long as the
// product with a small layer.
struct Product {
    int64_t x;            // address of the activations; each row is contiguous
    int64_t x_stride;     // elements from one row of x to the next
    int64_t y;            // address of the results, contiguous
    int64_t is_bfloat16;  // 1: x and y are bfloat16; 0: float32
    int64_t rows;         // rows of activations
    int64_t threads;      // the most threads to use
    int64_t most;         // number of the best engine to use
};

// Rounds x to int8 row by row, and multiplies it by the weight, by the best engine up to `most`. The result
// is bit-identical to torch's in float32 by the same steps. Returns 0, or another value if memory ran out and
// nothing was computed. Scratch of dot products and tiles: one byte per activation, with channels padded to a
// multiple of 64 and, for tiles, rows to a multiple of 16; one or two words per row; and at most 512 KB of
// sums per thread.
int hfq_int8_linear(const Weight *by, const Product *of) {
    const int64_t rows = of->rows, in_features = by->in_features, out_features = by->out_features;
    const int threads = (int)of->threads, is_bfloat16 = (int)of->is_bfloat16;
    const Level level = level_of((int)of->most);
    const Rows given = {
        (const char *)(uintptr_t)of->x, of->x_stride, is_bfloat16, in_features, by->top, by->bound};
    const bool is_packed = level.engine >= Engine::dots;
    const Room room(level.engine, rows, in_features, threads);
    int32_t *words = own_words(is_packed ? room.words() + rows
                                         : rows * (1 + out_features + (in_features + 1) / 2) + in_features);
    if (!words) return -3;
    float *scales = (float *)(words + room.words()), *wide = scales + rows;
    int32_t *sums = (int32_t *)(wide + in_features);
    int16_t *codes = (int16_t *)(sums + rows * out_features);
    MatmulArgs args = {(const int8_t *)(uintptr_t)by->codes, codes, sums, rows, in_features, out_features};
    if (is_packed) {
        room.give(args, words);
        run_packing(args, level, &given, scales, threads);
    } else {
        round_rows(level, given, rows, wide, scales, codes);
    }
    const Scaling scaling = {
        scales,         (const char *)(uintptr_t)by->steps, by->steps_count, (int)by->steps_dtype,
        by->multiplier, (char *)(uintptr_t)of->y,           is_bfloat16};
    run(args, level, scaling, threads);
    return 0;
}

}  // extern "C"
