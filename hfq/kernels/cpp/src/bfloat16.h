// Products in bfloat16, by tiles (amx_tiles.h) or vectors. Activations are bfloat16, or float16 as the sum of
// two bfloat16. Included by kernels.cpp after its instruction sets.
//
// Codes convert to bfloat16 without loss: 8-bit and 4-bit floats unchanged, and integers minus their zero
// points. Products of two bfloat16 are exact in float32, and a tile sums them in float32. The sum of a group
// is multiplied by its scale, and groups are summed, in float32. A row's result does not depend on the other
// rows.
//
// If outputs are rows of codes, the weight is the left factor. A tile has 16 outputs and 32 channels in their
// order in memory, and results are transposed. If outputs are columns, the weight is the right factor: a word
// of GPTQ has codes of one output, which are unpacked in pairs, the layout of a right factor. Channels have
// the order in which codes are unpacked, and activations are permuted to this order.

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

const int64_t MOST = 512;         // the most activation rows that are multiplied together
const int64_t BLOCK = 16;         // activation rows per tile
const int64_t HALF = 8;           // the most activation rows whose sums use two lanes each
const int64_t CHANNELS = 32;      // channels per tile
const int64_t PAIR = 32;          // outputs per pair of tiles
const int64_t MOST_WIDTH = 256;   // the most outputs per part
const int64_t MOST_FEW = 512;     // the most columns per part for few rows, for long runs of memory
const int64_t MOST_DEPTH = 256;   // the most channels that are unpacked together
const int64_t ROWS_AHEAD = 8;     // rows of codes from those being unpacked to those prefetched
const int64_t PIECE = 128;        // the most channels that a tile sums before the sums are scaled
const int64_t MOST_SCALES = 512;  // the most groups per row
const int64_t MOST_PARTS = 16;    // the most scales and minima of a step of a row of ggml's blocks

// Scratch of each thread.
struct TileScratch {
    alignas(64) float totals[MOST_WIDTH * MOST];           // sums of a part, before conversion
    alignas(64) char codes[2][PAIR * MOST_DEPTH * 2];      // unpacked codes of two pairs, bfloat16
    alignas(64) float scales[MOST_SCALES * PAIR];          // scales of groups
    alignas(64) float zeros[MOST_SCALES + 4 * PAIR];       // zero points, or temporary scales
    alignas(64) float sums[4][256];                        // sums stored from four tiles
    alignas(64) char words[MOST_DEPTH * MOST_FEW / 2];     // AWQ's words, two codes per byte
};
static_assert(sizeof(TileScratch) <= TILED_SCRATCH, "what threads keep is too small");

// True if the processor multiplies bfloat16 and has byte permutations.
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

// True if all 32 outputs of a pair share one scale per group.
inline bool shares_rows(const Layer &layer) {
    return layer.block_out % PAIR == 0 || layer.block_out >= layer.out_features;
}

// True if the bits `none` are zero in each of 16 floats at any alignment, so that fewer bits represent them.
inline bool has_bits(const char *values, uint32_t none) {
    for (int i = 0; i < 16; i++)
        if (load32(values + 4 * i) & none) return false;
    return true;
}

// True if codes are multiplied by their scales before they are converted to bfloat16. Groups are then no
// longer than a tile, and scales have few mantissa bits or none.
bool folds(const Layer &layer) {
    return layer.kind == NIBBLES && (layer.block_in == 16 || layer.block_in == 32) &&
           layer.row_zeros == NONE && layer.block_out == 1 && layer.scale_step == 1 &&
           (layer.scale_dtype == E8M0 || layer.scale_dtype == E4M3_SCALED) && has_bits(layer.values, 0xFFFFF);
}

// True if zero points are subtracted from codes that are nibbles of consecutive integers. The differences
// range from -15 to 15.
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

// True if ggml's blocks have codes that are multiplied by one scale per part.
inline bool has_parts(const Layer &layer) {
    return layer.kind == BLOCKS && layer.block_type != Q4_1 && layer.block_type != Q5_1;
}

// True if a minimum is subtracted from each part of 32 channels of ggml's blocks.
inline bool has_least(const Layer &layer) {
    return layer.kind == BLOCKS && (layer.block_type == Q4_K || layer.block_type == Q5_K);
}

// True if a layer's codes can be unpacked to tiles: groups are not scattered, and end with a tile.
bool reads(const Layer &layer) {
    const bool is_single = layer.block_in >= layer.in_features;
    if (layer.index_nbytes || layer.kind == QUADS) return false;
    if (folds(layer) || has_parts(layer)) return true;
    if (layer.kind == BLOCKS) return false;
    // otherwise, no step ends with a group
    if (!is_single && layer.block_in % PIECE && layer.block_in > MOST_DEPTH) return false;
    if (has_columns(layer)) return is_single || layer.block_in % CHANNELS == 0;
    if (!is_single && layer.block_in % (2 * CHANNELS)) return false;
    if (row_groups(layer) > MOST_SCALES) return false;
    return takes_zeros(layer) ||
           (layer.row_zeros == NONE && (layer.kind != NIBBLES || has_bits(layer.values, 0xFFFF)));
}

// Number of channels whose sum has one scale.
inline int64_t group_size(const Layer &layer) {
    return folds(layer) ? layer.in_features : least(layer.block_in, layer.in_features);
}

// ---- Order of channels ----

// Writes the order of 64 channels in two tiles: order[i] is the channel at position i.
void find_order(const Layer &layer, int16_t *order) {
    for (int i = 0; i < 64; i++) {
        const int tile = i / 32 * 32, place = i % 32, row = place / 2, second = place % 2, bits = layer.bits;
        if (layer.kind == E4M3 || layer.kind == E5M2)
            order[i] = (int16_t)(place / 8 * 16 + place % 8 + tile / 4);
        else if (layer.kind == NIBBLES)
            order[i] = (int16_t)(2 * place + ((tile != 0) != (layer.high_first != 0)));
        else if (layer.kind == INT8 || layer.kind == BIASED || layer.kind == BLOCKS || layer.kind == AWQ)
            order[i] = (int16_t)i;
        else if (bits == 3) order[i] = (int16_t)(tile + row + 16 * second);
        else
            order[i] =
                (int16_t)(tile + row / (16 / bits) * (32 / bits) + row % (16 / bits) + second * (16 / bits));
    }
}

#include "bfloat16_activations.h"
#include "bfloat16_weights.h"
#include "block_codes.h"
#include "bfloat16_flow.h"
#include "bfloat16_matmul.h"

}  // namespace bfloat16
}  // namespace

#include "bfloat16_dots.h"
#include "block_dots.h"

#if defined(HFQ_AMX)
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
