// Products by tiles (amx_tiles.h) of activations in bfloat16, or in float16 as the sum of two of it. Included
// by kernels.cpp, after its instruction sets.
//
// Codes become bfloat16 without a loss: floats of 8 and 4 bits as they are, integers less their zero points.
// Products of two bfloat16 are exact in float32, in which a tile sums them; the sum of a group is multiplied
// with its scale, and groups are added up, in float32. A row's result is the same among any other rows.
//
// Where outputs are rows of codes the weight is the left factor, 16 outputs of 32 channels to a tile as they
// lie, and results come out transposed. Where they are columns the weight is the right one: a word of GPTQ's
// holds codes of one output, which are unpacked in pairs just as a right factor needs them. Channels come in
// the order that codes are unpacked in, and activations are brought into it.

#if defined(HFQ_AMX)
#ifdef __clang__
#pragma clang attribute push( \
    __attribute__((target( \
        "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl," \
        "avx512vbmi,avx512bf16,amx-tile,amx-bf16,amx-int8"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")
#endif
#endif

namespace {
namespace bfloat16 {

const int64_t MOST = 512;         // activation rows that are multiplied at once
const int64_t BLOCK = 16;         // of them in a tile
const int64_t HALF = 8;           // of them whose sums take two lanes each
const int64_t CHANNELS = 32;      // of a tile
const int64_t PAIR = 32;          // outputs of two tiles
const int64_t MOST_WIDTH = 256;   // outputs of a part
const int64_t MOST_FEW = 512;     // columns of a part, for few rows: the more, the more of them lie together
const int64_t MOST_DEPTH = 256;   // channels that are unpacked together
const int64_t ROWS_AHEAD = 8;     // rows of codes that are asked for before they are unpacked
const int64_t PIECE = 128;        // channels that are summed by themselves, in a tile
const int64_t MOST_SCALES = 512;  // groups of a row

// What each thread works in.
struct TileScratch {
    alignas(64) float totals[MOST_WIDTH * MOST];           // sums of a part, float32
    alignas(64) char codes[2][PAIR * MOST_DEPTH * 2];      // unpacked codes of two pairs, bfloat16
    alignas(64) float scales[MOST_SCALES * PAIR];          // scales of groups, float32
    alignas(64) float zeros[MOST_SCALES + 4 * PAIR];       // zero points, or room for scales, float32
    alignas(64) float sums[4][256];                        // what four tiles held, float32
    alignas(64) char words[MOST_DEPTH * MOST_FEW / 2];     // AWQ's words, two codes a byte
};
static_assert(sizeof(TileScratch) <= TILED_SCRATCH, "what threads keep is too small");

// Whether the processor multiplies bfloat16, and looks bytes up.
bool has_bfloats() {
#if defined(HFQ_EMULATE)
    return true;
#elif defined(HFQ_AMX)
    return cpu_features::found().bfloats;
#else
    return false;
#endif
}

bool detect() {
#if defined(HFQ_EMULATE)
    return true;
#else
    return has_bfloats() && amx::detect();
#endif
}

// Whether all 32 outputs of a pair have one scale for each group.
inline bool shares_rows(const Layer &layer) {
    return layer.block_out % PAIR == 0 || layer.block_out >= layer.out_features;
}

// Sixteen floats, at any place, of as many bits as bfloat16 has, or of half of them.
inline bool has_bits(const char *values, uint32_t none) {
    for (int i = 0; i < 16; i++)
        if (load32(values + 4 * i) & none) return false;
    return true;
}

// Whether codes become bfloat16 with their scales in them: groups are shorter than a tile is, and scales have
// few bits or none.
bool folds(const Layer &layer) {
    return layer.kind == NIBBLES && (layer.block_in == 16 || layer.block_in == 32) &&
           layer.row_zeros == NONE && layer.block_out == 1 && layer.scale_step == 1 &&
           (layer.scale_dtype == E8M0 || layer.scale_dtype == E4M3_SCALED) && has_bits(layer.values, 0xFFFFF);
}

// Whether zero points of rows are taken off their codes, nibbles that stand for neighbouring integers: -15 to
// 15 are left.
bool takes_zeros(const Layer &layer) {
    if (layer.kind != NIBBLES || layer.block_out != 1 ||
        (layer.row_zeros != GROUP_WORDS && layer.row_zeros != OUTPUT_WORDS))
        return false;
    for (int i = 0; i < 16; i++)
        if (float_at(layer.values, F32, i) != (float)(i - (layer.row_zeros == OUTPUT_WORDS ? 8 : 0)))
            return false;
    return true;
}

inline int64_t row_groups(const Layer &layer) {
    return (layer.in_features + layer.block_in - 1) / layer.block_in;
}

// Whether a layer's codes can be made tiles of: groups are not scattered, and end with a tile.
bool reads(const Layer &layer) {
    const bool is_single = layer.block_in >= layer.in_features;
    if (layer.index_nbytes || layer.kind == QUADS) return false;
    if (folds(layer)) return true;
    // no step would end with a group
    if (!is_single && layer.block_in % PIECE && layer.block_in > MOST_DEPTH) return false;
    if (has_columns(layer)) return is_single || layer.block_in % CHANNELS == 0;
    if (!is_single && layer.block_in % (2 * CHANNELS)) return false;
    if (row_groups(layer) > MOST_SCALES) return false;
    return takes_zeros(layer) ||
           (layer.row_zeros == NONE && (layer.kind != NIBBLES || has_bits(layer.values, 0xFFFF)));
}

// Channels whose sums share a scale.
inline int64_t group_size(const Layer &layer) {
    return folds(layer) ? layer.in_features : least(layer.block_in, layer.in_features);
}

// ---- The order of channels ----

// order[i]: which of 64 channels is the i-th of two tiles.
void find_order(const Layer &layer, int16_t *order) {
    for (int i = 0; i < 64; i++) {
        const int tile = i / 32 * 32, place = i % 32, row = place / 2, second = place % 2, bits = layer.bits;
        if (layer.kind == E4M3 || layer.kind == E5M2)
            order[i] = (int16_t)(place / 8 * 16 + place % 8 + tile / 4);
        else if (layer.kind == NIBBLES)
            order[i] = (int16_t)(2 * place + ((tile != 0) != (layer.high_first != 0)));
        else if (layer.kind == INT8) order[i] = (int16_t)i;
        else if (layer.kind == AWQ) order[i] = (int16_t)i;
        else if (bits == 3) order[i] = (int16_t)(tile + row + 16 * second);
        else
            order[i] =
                (int16_t)(tile + row / (16 / bits) * (32 / bits) + row % (16 / bits) + second * (16 / bits));
    }
}

#include "bfloat16_activations.h"
#include "bfloat16_weights.h"
#include "bfloat16_flow.h"
#include "bfloat16_matmul.h"

}  // namespace bfloat16
}  // namespace

#include "bfloat16_dots.h"

#if defined(HFQ_AMX)
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
