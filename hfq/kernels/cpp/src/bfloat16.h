// Products by tiles (amx_tiles.h) of activations in bfloat16, or in float16 as the sum of two of it. Included by kernels.cpp, after its instruction sets.
//
// Codes become bfloat16 without a loss: floats of 8 and 4 bits as they are, integers less their zero points. Products of two bfloat16
// are exact in float32, in which a tile sums them; the sum of a group is multiplied with its scale, and groups are added up, in float32.
// A row's result is the same among any other rows.
//
// Where outputs are rows of codes the weight is the left factor, 16 outputs of 32 channels to a tile as they lie, and results come out
// transposed. Where they are columns the weight is the right one: a word of GPTQ's holds codes of one output, which are unpacked in pairs
// just as a right factor needs them. Channels come in the order that codes are unpacked in, and activations are brought into it.

#if defined(HFQ_AMX)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,amx-tile,amx-bf16,amx-int8"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")
#endif
#endif

namespace {
namespace tiled {

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

// What each thread works in: sums of a part, the unpacked codes of two pairs, scales and zero points, what the tiles held, and AWQ's words.
struct Kept {
    alignas(64) float totals[MOST_WIDTH * MOST];
    alignas(64) char codes[2][PAIR * MOST_DEPTH * 2];
    alignas(64) float scales[MOST_SCALES * PAIR], zeros[MOST_SCALES + 4 * PAIR];
    alignas(64) float sums[4][256];
    alignas(64) char words[MOST_DEPTH * MOST_FEW / 2];
};
static_assert(sizeof(Kept) <= TILED_SCRATCH, "what threads keep is too small");

// Whether the processor multiplies bfloat16, and looks bytes up.
bool has_bfloats() {
#if defined(HFQ_EMULATE)
    return true;
#elif defined(HFQ_AMX)
    return processor::found().bfloats;
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
inline bool shares_rows(const Layer &layer) { return layer.block_out % PAIR == 0 || layer.block_out >= layer.out_features; }

// Sixteen floats, at any place, of as many bits as bfloat16 has, or of half of them.
inline bool has_bits(const char *values, uint32_t none) {
    for (int i = 0; i < 16; i++)
        if (load32(values + 4 * i) & none) return false;
    return true;
}

// Whether codes become bfloat16 with their scales in them: groups are shorter than a tile is, and scales have few bits or none.
bool folds(const Layer &layer) {
    return layer.kind == NIBBLES && (layer.block_in == 16 || layer.block_in == 32) && layer.row_zeros == NONE && layer.block_out == 1 &&
           layer.scale_step == 1 && (layer.scale_dtype == E8M0 || layer.scale_dtype == E4M3_SCALED) && has_bits(layer.values, 0xFFFFF);
}

// Whether zero points of rows are taken off their codes, nibbles that stand for neighbouring integers: -15 to 15 are left.
bool takes_zeros(const Layer &layer) {
    if (layer.kind != NIBBLES || layer.block_out != 1 || (layer.row_zeros != GROUP_WORDS && layer.row_zeros != OUTPUT_WORDS)) return false;
    for (int i = 0; i < 16; i++)
        if (float_at(layer.values, F32, i) != (float)(i - (layer.row_zeros == OUTPUT_WORDS ? 8 : 0))) return false;
    return true;
}

inline int64_t row_groups(const Layer &layer) { return (layer.in_features + layer.block_in - 1) / layer.block_in; }

// Whether a layer's codes can be made tiles of: groups are not scattered, and end with a tile.
bool reads(const Layer &layer) {
    const bool is_single = layer.block_in >= layer.in_features;
    if (layer.index_nbytes || layer.kind == QUADS) return false;
    if (folds(layer)) return true;
    if (!is_single && layer.block_in % PIECE && layer.block_in > MOST_DEPTH) return false;  // no step would end with a group
    if (has_columns(layer)) return is_single || layer.block_in % CHANNELS == 0;
    if (!is_single && layer.block_in % (2 * CHANNELS)) return false;
    if (row_groups(layer) > MOST_SCALES) return false;
    return takes_zeros(layer) || (layer.row_zeros == NONE && (layer.kind != NIBBLES || has_bits(layer.values, 0xFFFF)));
}

// Channels whose sums share a scale.
inline int64_t group_size(const Layer &layer) { return folds(layer) ? layer.in_features : least(layer.block_in, layer.in_features); }

// ---- The order of channels ---------------------------------------------------------------------------------------------------

// order[i]: which of 64 channels is the i-th of two tiles.
void find_order(const Layer &layer, int16_t *order) {
    for (int i = 0; i < 64; i++) {
        const int tile = i / 32 * 32, place = i % 32, row = place / 2, second = place % 2, bits = layer.bits;
        if (layer.kind == E4M3 || layer.kind == E5M2) order[i] = (int16_t)(place / 8 * 16 + place % 8 + tile / 4);
        else if (layer.kind == NIBBLES) order[i] = (int16_t)(2 * place + ((tile != 0) != (layer.high_first != 0)));
        else if (layer.kind == INT8) order[i] = (int16_t)i;
        else if (layer.kind == AWQ) order[i] = (int16_t)i;
        else if (bits == 3) order[i] = (int16_t)(tile + row + 16 * second);
        else order[i] = (int16_t)(tile + row / (16 / bits) * (32 / bits) + row % (16 / bits) + second * (16 / bits));
    }
}

// ---- Activations -------------------------------------------------------------------------------------------------------------
// [`depth` channels][block of 16 rows][32 channels], each a tile: a left factor [row][channel], or a right one [pair of channels][row][2].
// A last block of fewer rows has tiles of fewer bytes; what is loaded beyond them makes sums that nobody reads. Up to HALF rows of a right
// factor that vectors are multiplied with are halved: [four channels][row][4], so that a row's sums take two lanes.

struct Packing {
    const Layer *layer;
    const char *x;
    int64_t rows, x_stride, depth;
    int32_t dtype;
    bool apart;  // each row by itself, for bfloat16_dots.h: [64 channels][row][64]
    bool halved;
    char *out;
    float *factors;  // two for each row, which take off again what it was multiplied with
    alignas(64) int16_t order[64];
};

inline int64_t steps(const Layer &layer) { return up(layer.in_features, 2 * CHANNELS) / CHANNELS; }

// Where the tiles of a block begin whose channels begin at k, of the channels' share of `depth`.
inline int64_t place_of(const Layer &layer, int64_t rows, int64_t depth, int64_t block, int64_t k) {
    const int64_t start = k / depth * depth, count = least(depth, steps(layer) * CHANNELS - start);
    return 2 * (start * rows + block * BLOCK * count + (k - start) * least(BLOCK, rows - block * BLOCK));
}

inline int64_t packed_floats(const Layer &layer, int64_t rows) { return rows * steps(layer) * CHANNELS / 2 + 2 * rows + 512; }

// Rows of very small or large numbers are multiplied by a power of two, as two factors: subnormal numbers would count as zeros.
void normalize(const char *x, int64_t count, float *by, float *back) {
    uint16_t largest = 0;
    int64_t k = 0;
#if defined(HFQ_AMX)
    __m512i found = _mm512_setzero_si512();
    for (; k + 32 <= count; k += 32) found = _mm512_max_epu16(found, _mm512_and_si512(_mm512_loadu_si512(x + 2 * k), _mm512_set1_epi16(0x7FFF)));
    uint16_t lanes[32];
    _mm512_storeu_si512(lanes, found);
    for (uint16_t lane : lanes) largest = (uint16_t)most(largest, lane);
#endif
    for (; k < count; k++) largest = (uint16_t)most(largest, load16(x + 2 * k) & 0x7FFF);
    const int exponent = largest >> 7, power = !largest || exponent == 255 || (exponent > 100 && exponent < 180) ? 0 : 127 - exponent;
    const int halves[2] = {power / 2, power - power / 2};
    for (int i = 0; i < 2; i++) {
        by[i] = as_float((uint32_t)(127 + halves[i]) << 23);
        back[i] = as_float((uint32_t)(127 - halves[i]) << 23);
    }
}

#if defined(HFQ_AMX)
// 32 bfloat16 times two powers of two.
static inline __m512i scaled(__m512i x, const float *by) {
    const __m512 first = _mm512_set1_ps(by[0]), second = _mm512_set1_ps(by[1]);
    __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xFFFF0000)));
    even = _mm512_mul_ps(_mm512_mul_ps(even, first), second), odd = _mm512_mul_ps(_mm512_mul_ps(odd, first), second);
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32((int)0xFFFF0000)));
}
#endif

// 64 channels of a block of `count` rows, of which `left` are there, to two tiles.
static void pack_two(const Packing &to, const char *x, int64_t stride, int64_t count, int64_t left, const float (*by)[2], char *const *outs) {
    const bool is_left = has_columns(*to.layer);
#if defined(HFQ_AMX)
    const __m512i first = _mm512_load_si512(to.order), second = _mm512_load_si512(to.order + 32);
    const __mmask32 low = left >= 32 ? ~0u : (1u << left) - 1, high = left >= 64 ? ~0u : left > 32 ? (1u << (left - 32)) - 1 : 0;
    __m512i tiles[2][16] = {};
    for (int64_t m = 0; m < count; m++, x += 2 * stride) {
        __m512i a = _mm512_maskz_loadu_epi16(low, x), b = _mm512_maskz_loadu_epi16(high, x + 64);
        if (by[m][0] != 1 || by[m][1] != 1) a = scaled(a, by[m]), b = scaled(b, by[m]);
        tiles[0][m] = _mm512_permutex2var_epi16(a, first, b), tiles[1][m] = _mm512_permutex2var_epi16(a, second, b);
    }
    for (int t = 0; t < 2; t++) {
        char *out = outs[t];
        if (is_left)
            for (int64_t m = 0; m < count; m++) _mm512_storeu_si512(out + 64 * m, tiles[t][m]);
        else if (to.halved) {
            alignas(64) char row[64];
            for (int64_t m = 0; m < count; m++) {
                _mm512_store_si512(row, tiles[t][m]);
                for (int i = 0; i < 8; i++) memcpy(out + 8 * (count * i + m), row + 8 * i, 8);
            }
        } else {
            if (count > 1) amx::transpose(tiles[t]);
            if (count == 1) _mm512_storeu_si512(out, tiles[t][0]);
            else
                for (int i = 0; i < 16; i++) _mm512_mask_storeu_epi32(out + 4 * count * i, (__mmask16)((1u << count) - 1), tiles[t][i]);
        }
    }
#else
    for (int t = 0; t < 2; t++)
        for (int64_t m = 0; m < count; m++)
            for (int i = 0; i < 32; i++) {
                const int64_t k = to.order[32 * t + i], lanes = to.halved ? 4 : 2;
                const int64_t place = is_left ? 32 * m + i : lanes * count * (i / lanes) + lanes * m + i % lanes;
                const float value = k < left ? float_at(x + 2 * m * stride, BF16, k) * by[m][0] * by[m][1] : 0;
                const uint16_t half = (uint16_t)(as_bits(value) >> 16);
                memcpy(outs[t] + 2 * place, &half, 2);
            }
#endif
}

// Rows of bfloat16 that a row of activations is packed as.
inline int64_t rows_of(int32_t dtype) { return dtype == F16 ? 2 : 1; }

// Float16 as two bfloat16, whose sum it is: of its 11 bits the first 8, rounded, and the rest.
void split_halves(const char *x, int64_t count, uint16_t *first, uint16_t *rest) {
    int64_t k = 0;
#if defined(HFQ_AMX)
    for (; k + 16 <= count; k += 16) {
        const __m512 value = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + 2 * k)));
        const __m256i high = (__m256i)_mm512_cvtneps_pbh(value);
        const __m512 taken = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
        const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(value), _mm512_set1_ps(65504), _CMP_LE_OQ);
        _mm256_storeu_si256((__m256i *)(first + k), high);
        _mm256_storeu_si256((__m256i *)(rest + k), (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_sub_ps(finite, value, taken)));
    }
#endif
    for (; k < count; k++) {
        const float value = float_at(x, F16, k);
        first[k] = float_to_bfloat(value);
        rest[k] = float_to_bfloat(value - value == 0 ? value - as_float((uint32_t)first[k] << 16) : 0);
    }
}

// Whether a block's activations are brought together before they are packed, and the floats that takes.
inline bool is_brought(const Layer &layer, int32_t dtype) { return is_sorted(layer) || dtype == F16; }
inline int64_t brought_floats(const Layer &layer, int32_t dtype) { return is_brought(layer, dtype) ? up((BLOCK + 1) * layer.in_features, 2) / 2 : 0; }

// Packed rows from `first` on, in the order of the layer's channels and in bfloat16.
void bring_rows(const Packing &of, int64_t first, int64_t count, uint16_t *out) {
    const Layer &layer = *of.layer;
    const int64_t size = layer.in_features, each = rows_of(of.dtype);
    const int32_t *order = is_sorted(layer) ? (const int32_t *)layer.index : nullptr;
    uint16_t *row = out + BLOCK * size;
    for (int64_t m = 0; m < count; m += each, out += each * size) {
        const char *x = of.x + 2 * ((first + m) / each) * of.x_stride;
        if (order) {
            uint16_t *to = each == 1 ? out : row;
            for (int64_t k = 0; k < size; k++) to[k] = load16(x + 2 * order[k]);
            x = (const char *)to;
        }
        if (each == 2) split_halves(x, size, out, out + size);
    }
}

// One block of rows.
void pack_block(const void *context, int64_t block, float *scratch) {
    const Packing &to = *(const Packing *)context;
    const int64_t each = to.apart ? 1 : BLOCK, first = block * each, count = least(each, to.rows - first), size = to.layer->in_features;
    const bool is_there = !is_brought(*to.layer, to.dtype);
    const char *x = is_there ? to.x + 2 * first * to.x_stride : (const char *)scratch;
    const int64_t stride = is_there ? to.x_stride : size;
    if (!is_there) bring_rows(to, first, count, (uint16_t *)scratch);
    float by[BLOCK][2];
    for (int64_t m = 0; m < count; m++) normalize(x + 2 * m * stride, size, by[m], to.factors + 2 * (first + m));
    for (int64_t k = 0; k < size; k += 64) {
        char *outs[2];
        for (int t = 0; t < 2; t++)
            outs[t] = to.out + (to.apart ? 2 * (k * to.rows + block * 2 * CHANNELS + t * CHANNELS) : place_of(*to.layer, to.rows, to.depth, block, k + t * CHANNELS));
        pack_two(to, x + 2 * k, stride, count, size - k, by, outs);
    }
}

// ---- Weights -----------------------------------------------------------------------------------------------------------------
// [32 channels][two tiles]: the codes of a pair's outputs, a left factor where they are rows and a right one where they are columns.

inline uint16_t short_of(float value) { return (uint16_t)(as_bits(value) >> 16); }

// The bfloat16 of the 128 codes without a sign of a float of 8 bits: the higher bytes, and the lower ones.
struct Bytes {
    alignas(64) uint8_t high[128], low[128];
    explicit Bytes(int kind) {
        for (int code = 0; code < 128; code++) {
            const uint16_t value = short_of(code_value((uint8_t)code, kind));
            high[code] = (uint8_t)(value >> 8), low[code] = (uint8_t)value;
        }
    }
};

#if defined(HFQ_AMX)
typedef __m512i Integers;
static HFQ_INLINE Integers all_integers() {  // -16 to 15 as bfloat16
    alignas(64) int16_t integers[32];
    for (int i = 0; i < 32; i++) integers[i] = (int16_t)short_of((float)(i - 16));
    return _mm512_load_si512(integers);
}
#else
typedef int Integers;
static int all_integers() { return 0; }
#endif

// NIBBLES less zero points.
const int ZEROED = 16;

// What codes are looked up in: it stays in registers.
#if defined(HFQ_AMX)
template <int KIND> struct Table {
    __m512i high[2], low[2];
    explicit Table(const Layer &layer) {
        if (KIND == ZEROED) high[0] = all_integers();
        if (KIND == NIBBLES) high[0] = _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_loadu_si512(layer.values), 16)));
        if (KIND != E4M3 && KIND != E5M2) return;
        static const Bytes bytes(KIND);
        for (int i = 0; i < 2; i++) high[i] = _mm512_load_si512(bytes.high + 64 * i), low[i] = _mm512_load_si512(bytes.low + 64 * i);
    }
};
#else
template <int KIND> struct Table {
    const Layer &layer;
    int16_t order[64];
    explicit Table(const Layer &of) : layer(of) { find_order(of, order); }
};
#endif

// 64 codes of a row, from `p`, as rows of two tiles; `shift` is added to codes that have a zero point.
template <int KIND> static HFQ_INLINE void unpack_row(const Table<KIND> &table, const char *p, int shift, char *first, char *second) {
#if defined(HFQ_AMX)
    if constexpr (KIND == NIBBLES || KIND == ZEROED) {
        const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
        __m512i low = _mm512_and_si512(codes, _mm512_set1_epi16(15)), high = _mm512_srli_epi16(codes, 4);
        if (KIND == ZEROED) low = _mm512_add_epi16(low, _mm512_set1_epi16((short)shift)), high = _mm512_add_epi16(high, _mm512_set1_epi16((short)shift));
        _mm512_store_si512(first, _mm512_permutexvar_epi16(low, table.high[0])), _mm512_store_si512(second, _mm512_permutexvar_epi16(high, table.high[0]));
    } else if constexpr (KIND == INT8) {
        for (int i = 0; i < 64; i += 32) {
            const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + i))));
            const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + i + 16))));
            _mm512_store_si512(i ? second : first, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    } else {
        const __m512i codes = _mm512_loadu_si512(p), low = _mm512_permutex2var_epi8(table.low[0], codes, table.low[1]);
        __m512i high = _mm512_permutex2var_epi8(table.high[0], codes, table.high[1]);
        high = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8((char)0x80), 0xF8);  // or the codes' signs
        _mm512_store_si512(first, _mm512_unpacklo_epi8(low, high)), _mm512_store_si512(second, _mm512_unpackhi_epi8(low, high));
    }
#else
    const bool high_first = table.layer.high_first != 0;
    for (int i = 0; i < 64; i++) {
        const int k = table.order[i];
        const bool is_nibble = KIND == NIBBLES || KIND == ZEROED;
        const uint8_t byte = (uint8_t)p[is_nibble ? k / 2 : k], nibble = byte >> ((k % 2 != 0) != high_first ? 4 : 0) & 15;
        float value = KIND == INT8 ? (float)(int8_t)byte : code_value(byte, KIND);
        if (is_nibble) value = KIND == ZEROED ? (float)(nibble + shift - 16) : float_at(table.layer.values, F32, nibble);
        const uint16_t half = short_of(value);
        memcpy((i < 32 ? first : second) + 2 * (i % 32), &half, 2);
    }
#endif
}

// What is added to a row's codes, from channel k on, to find them among all_integers.
template <int KIND> static HFQ_INLINE int shift_of(const Layer &layer, int64_t n, int64_t k) {
    return KIND == ZEROED ? 16 - (int)row_zero(layer, n, k / layer.block_in) - (layer.row_zeros == OUTPUT_WORDS ? 8 : 0) : 0;
}

// Channels [k, k + length) of the rows [n, n + count); `lead` is how far away codes lie that are asked for, by where they end: the line that they
// begin in was asked for with those before them.
template <int KIND>
static void unpack_rows(const Layer &layer, int64_t n, int64_t count, int64_t k, int64_t length, int64_t lead, char *out) {
    const int64_t line = KIND == NIBBLES || KIND == ZEROED ? 32 : 64, whole = length / 128 * 128;
    const Table<KIND> table(layer);
    const char *row = layer.codes + n * layer.row_nbytes + k / 64 * line;
    for (int64_t r = 0; r < PAIR; r++, row += r < count ? layer.row_nbytes : 0) {  // beyond the last, the last again
        char *to = out + r / BLOCK * amx::TILE + r % BLOCK * 64;
        const char *codes = row;
        int64_t i = 0;
        __builtin_prefetch(row + ROWS_AHEAD * layer.row_nbytes);  // a line that codes before these lie in, too, may have left the second cache
        for (; i < whole; i += 128, codes += 2 * line, to += 8 * amx::TILE) {
            HFQ_UNROLL
            for (int j = 0; j < 2; j++) {
                if (j == 0 || line == 64) __builtin_prefetch(codes + j * line + lead + 63, 0, 2);
                unpack_row<KIND>(table, codes + j * line, shift_of<KIND>(layer, n + least(r, count - 1), k + i + 64 * j), to + j * 4 * amx::TILE, to + (4 * j + 2) * amx::TILE);
            }
        }
        for (; i < length; i += 64, codes += line, to += 4 * amx::TILE) {
            char rest[64];
            const char *at = codes;
            if (length - i < 64) {
                memset(rest, 0, sizeof(rest)), memcpy(rest, codes, ((length - i) * line + 63) / 64);
                at = rest;
            }
            unpack_row<KIND>(table, at, shift_of<KIND>(layer, n + least(r, count - 1), k + i), to, to + 2 * amx::TILE);
        }
    }
}

// The largest exponent among up to 16 groups of a row, a step's, of scales that are powers of two. They are folded as parts of it, and it is
// the scale of the sums: a weight of any size is a normal number in its tile.
inline int largest_exponent(const char *scales, int64_t count) {
#if defined(HFQ_AMX)
    __m128i largest = _mm_maskz_loadu_epi8((__mmask16)((1u << count) - 1), scales);
    largest = _mm_max_epu8(largest, _mm_srli_si128(largest, 8)), largest = _mm_max_epu8(largest, _mm_srli_si128(largest, 4));
    largest = _mm_max_epu8(largest, _mm_srli_si128(largest, 2)), largest = _mm_max_epu8(largest, _mm_srli_si128(largest, 1));
    return _mm_cvtsi128_si32(largest) & 255;
#else
    int largest = 0;
    for (int64_t i = 0; i < count; i++) largest = (int)most(largest, (uint8_t)scales[i]);
    return largest;
#endif
}

// The scale of a group that is folded into its codes, but for what all of them share.
inline float folded_scale(const Layer &layer, int64_t place, int largest) {
    if (layer.scale_dtype != E8M0) return code_value((uint8_t)layer.scales[place], E4M3);
    return as_float((uint32_t)most(127 + (uint8_t)layer.scales[place] - largest, 0) << 23);
}

// What the sums of a pair's rows are multiplied with.
inline void find_unfolded(const Layer &layer, int64_t n, int64_t count, int64_t k, int64_t length, float *scales) {
    const int64_t first = k / layer.block_in, groups = (length + layer.block_in - 1) / layer.block_in;
    const float shared = layer.divides ? 1 / layer.shared : layer.shared;
    for (int64_t r = 0; r < PAIR; r++) {
        const char exponent = (char)(layer.scale_dtype == E8M0 ? largest_exponent(layer.scales + (n + least(r, count - 1)) * layer.scale_stride + first, groups) : 0);
        scales[r] = layer.scale_dtype == E8M0 ? float_at(&exponent, E8M0, 0) : shared;
    }
}

#if defined(HFQ_AMX)
// Up to 16 of them.
static HFQ_INLINE __m512 folded_scales(const Layer &layer, int64_t place, int64_t count, int largest) {
    const __m128i bytes = _mm_maskz_loadu_epi8((__mmask16)((1u << least(count, 16)) - 1), layer.scales + place);
    if (layer.scale_dtype == E8M0) {
        const __m512i exponents = _mm512_add_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(127 - largest));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_max_epi32(exponents, _mm512_setzero_si512()), 23));
    }
    const __m256i wide = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), _mm256_set1_epi16((short)0xBFFF));
    const __mmask16 nan = _mm_cmpeq_epi8_mask(_mm_and_si128(bytes, _mm_set1_epi8(0x7F)), _mm_set1_epi8(0x7F));
    return _mm512_mask_mov_ps(_mm512_mul_ps(_mm512_cvtph_ps(wide), _mm512_set1_ps(256)), nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)));
}
#endif

#if defined(HFQ_AMX)
// The 16 values times each of two scales.
static HFQ_INLINE __m512i scaled_values(__m512 values, const float *scales) {
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(values, _mm512_set1_ps(scales[1])), _mm512_mul_ps(values, _mm512_set1_ps(scales[0])));
}
#endif

// As unpack_rows, of nibbles with their scales.
static void unpack_folded(const Layer &layer, int64_t n, int64_t count, int64_t k, int64_t length, int64_t lead, char *out) {
    const char *row = layer.codes + n * layer.row_nbytes + k / 2;
    const int64_t start = k / layer.block_in, groups = (length + layer.block_in - 1) / layer.block_in;
#if defined(HFQ_AMX)
    const __m512 values = _mm512_loadu_ps(layer.values);
    const bool is_short = layer.block_in == 16;
    const int shift = is_short ? 4 : 5;  // of channels to their groups
    alignas(64) int16_t tables[32];  // which of the groups' values a byte's codes stand for, times 16
    for (int i = 0; i < 32; i++) tables[i] = (int16_t)(i >> (shift - 1) << 4);
    const __m512i fifteen = _mm512_set1_epi16(15), groups_of = _mm512_load_si512(tables);
#else
    int16_t order[64];
    find_order(layer, order);
#endif
    for (int64_t r = 0; r < PAIR; r++, row += r < count ? layer.row_nbytes : 0) {
        char *to = out + r / BLOCK * amx::TILE + r % BLOCK * 64;
        const int64_t place = (n + least(r, count - 1)) * layer.scale_stride + start;
        const int largest = layer.scale_dtype == E8M0 ? largest_exponent(layer.scales + place, groups) : 0;
#if defined(HFQ_AMX)
        alignas(64) float factors[MOST_DEPTH / 16 + 3];  // and what the last codes may read beyond them
        _mm512_store_ps(factors, folded_scales(layer, place, groups, largest));
        factors[16] = factors[17] = factors[18] = 0;
#endif
        for (int64_t i = 0; i < length; i += 64, to += 4 * amx::TILE) {
            char rest[32];
            const char *codes = row + i / 2;
            if (i % 128 == 0) __builtin_prefetch(codes + lead + 63, 0, 2);
            if (length - i < 64) memset(rest, 0, sizeof(rest)), memcpy(rest, codes, (length - i + 1) / 2), codes = rest;
#if defined(HFQ_AMX)
            const float *of = factors + (i >> shift);
            const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes));
            const __m512i low = _mm512_or_si512(_mm512_and_si512(bytes, fifteen), groups_of), high = _mm512_or_si512(_mm512_srli_epi16(bytes, 4), groups_of);
            const __m512i table = scaled_values(values, of);
            if (is_short) {
                const __m512i other = scaled_values(values, of + 2);
                _mm512_store_si512(to, _mm512_permutex2var_epi16(table, low, other));
                _mm512_store_si512(to + 2 * amx::TILE, _mm512_permutex2var_epi16(table, high, other));
            } else {
                _mm512_store_si512(to, _mm512_permutexvar_epi16(low, table)), _mm512_store_si512(to + 2 * amx::TILE, _mm512_permutexvar_epi16(high, table));
            }
#else
            for (int j = 0; j < 64; j++) {
                const int at = order[j];
                const uint8_t code = (uint8_t)codes[at / 2] >> ((at % 2 != 0) != (layer.high_first != 0) ? 4 : 0) & 15;
                const float scale = i + at < length ? folded_scale(layer, place + (i + at) / layer.block_in, largest) : 0;
                const uint16_t half = short_of(float_at(layer.values, F32, code) * scale);
                memcpy(to + j / 32 * 2 * amx::TILE + 2 * (j % 32), &half, 2);
            }
#endif
        }
    }
}

// A tile's 32 channels of 16 columns, of which `count` are there; `zeros` are taken off. `rows` of words are there.
#if defined(HFQ_AMX)
struct Columns {
    const char *words;
    int64_t pitch, rows;
    __mmask16 mask;
    HFQ_INLINE __m512i word(int64_t row) const {
        return row < rows ? _mm512_maskz_loadu_epi32(mask, words + row * pitch) : _mm512_setzero_si512();
    }
};

// Pairs of integers less than 256 as pairs of bfloat16, less their zero points.
static HFQ_INLINE __m512i whole(__m512i pairs, __m512i zeros) {
    const __m512 low = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF)), zeros));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(pairs, 16), zeros));
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high));
}

// What a word's codes are made bfloat16 with: for each column 16 less its zero point in every byte, or the zero point.
template <int BITS> static HFQ_INLINE __m512i shifts_of(const float *zeros) {
    const __m512i zero = _mm512_cvtps_epi32(_mm512_loadu_ps(zeros));
    return BITS == 8 ? zero : _mm512_mullo_epi32(_mm512_sub_epi32(_mm512_set1_epi32(16), zero), _mm512_set1_epi32(0x01010101));
}

// Words of a column that hold whole codes, and pairs of channels in them.
template <int BITS> constexpr int UNIT = BITS == 3 ? 3 : 1;
template <int BITS> constexpr int PAIRS = BITS == 3 ? 16 : 16 / BITS;

// The pairs of channels of 16 columns' words: codes of the first half of the channels, and of the second. Bytes hold a code each; where pairs
// are looked up that is done by the lower byte of each half of a word, and then by the upper one.
template <int BITS> static HFQ_INLINE void unpack_pairs(const __m512i *words, __m512i shifts, __m512i table, __m512i *pairs) {
    if constexpr (BITS == 8) {
        const __m512i mask = _mm512_set1_epi32(0xFF00FF);
        pairs[0] = whole(_mm512_and_si512(words[0], mask), shifts), pairs[1] = whole(_mm512_and_si512(_mm512_srli_epi32(words[0], 8), mask), shifts);
    } else if constexpr (BITS == 3) {
        const __m512i seven = _mm512_set1_epi32(7), both = _mm512_and_si512(shifts, _mm512_set1_epi32(0xFF00FF));
        HFQ_UNROLL
        for (int i = 0; i < 16; i++) {
            __m512i codes[2];
            HFQ_UNROLL
            for (int half = 0; half < 2; half++) {
                const int bit = 3 * (i + 16 * half), word = bit / 32, shift = bit % 32;
                codes[half] = _mm512_srli_epi32(words[word], shift);
                if (shift > 29) codes[half] = _mm512_or_si512(codes[half], _mm512_slli_epi32(words[(word + 1) % 3], 32 - shift));
                codes[half] = _mm512_and_si512(codes[half], seven);
            }
            const __m512i both_codes = _mm512_or_si512(codes[0], _mm512_slli_epi32(codes[1], 16));
            pairs[i] = _mm512_permutexvar_epi16(_mm512_add_epi16(both_codes, both), table);
        }
    } else {
        const int each = 8 / BITS;  // codes of a byte
        const __m512i mask = _mm512_set1_epi8((1 << BITS) - 1);
        HFQ_UNROLL
        for (int i = 0; i < each; i++) {
            const __m512i bytes = _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(words[0], BITS * i), mask), shifts);
            pairs[i] = _mm512_permutexvar_epi16(bytes, table), pairs[i + each] = _mm512_permutexvar_epi16(_mm512_srli_epi32(bytes, 8), table);
        }
    }
}

template <int BITS> static HFQ_INLINE void unpack_words(const Columns &from, const float *zeros, __m512i table, char *out) {
    const __m512i shifts = shifts_of<BITS>(zeros);
    HFQ_UNROLL
    for (int row = 0; row < BITS; row += UNIT<BITS>) {
        __m512i words[UNIT<BITS>], pairs[PAIRS<BITS>];
        for (int i = 0; i < UNIT<BITS>; i++) words[i] = from.word(row + i);
        unpack_pairs<BITS>(words, shifts, table, pairs);
        HFQ_UNROLL
        for (int i = 0; i < PAIRS<BITS>; i++, out += 64) _mm512_store_si512(out, pairs[i]);
    }
}

// What is added to AWQ's codes of 16 columns, less their zero points, to find them among all_integers.
static HFQ_INLINE __m512i awq_shifts(const float *zeros) {
    return _mm512_mullo_epi32(_mm512_sub_epi32(_mm512_set1_epi32(16), _mm512_cvtps_epi32(_mm512_loadu_ps(zeros))), _mm512_set1_epi32(0x10001));
}

// AWQ's: two channels of a pair's columns, whose words hold eight of them. The channels' words, in turns by their halves, are those of the even
// columns and of the odd ones; each shifted by its own nibbles gives pairs of channels.
static HFQ_INLINE void unpack_awq_pairs(const char *words, int64_t pitch, bool are_two, __mmask8 there, const __m512i *added, __m512i table, __m512i *pairs) {
    const __m512i shifts = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12), fifteen = _mm512_set1_epi32(0xF000F);
    const __m512i places = _mm512_setr_epi32(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3);
    const __m128i first = _mm_maskz_loadu_epi32(there, words), second = are_two ? _mm_maskz_loadu_epi32(there, words + pitch) : _mm_setzero_si128();
    const __m128i turns[2] = {_mm_unpacklo_epi16(first, second), _mm_unpackhi_epi16(first, second)};
    HFQ_UNROLL
    for (int t = 0; t < 2; t++) {
        const __m512i spread = _mm512_permutexvar_epi32(places, _mm512_castsi128_si512(turns[t]));
        const __m512i codes = _mm512_and_si512(_mm512_srlv_epi32(spread, shifts), fifteen);
        pairs[t] = _mm512_permutexvar_epi16(_mm512_add_epi16(codes, added[t]), table);
    }
}

// 32 channels of a pair's columns.
static HFQ_INLINE void unpack_awq(const char *words, int64_t pitch, int64_t rows, int64_t columns, const float *zeros, __m512i table, char *out) {
    const __mmask8 there = (__mmask8)((1u << (columns + 7) / 8) - 1);
    const __m512i added[2] = {awq_shifts(zeros), awq_shifts(zeros + BLOCK)};
    for (int64_t i = 0; i < CHANNELS; i += 2, words += 2 * pitch, out += 64) {
        __m512i pairs[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        unpack_awq_pairs(words, pitch, i + 1 < rows, i < rows ? there : 0, added, table, pairs);
        for (int t = 0; t < 2; t++) _mm512_store_si512(out + t * amx::TILE, pairs[t]);
    }
}
#endif

// The scales and zero points of a pair's columns of a group.
inline void find_group(const Layer &layer, int64_t group, int64_t n, int64_t count, float *scales, float *zeros) {
    avx512::group_scales(layer, group, n, count, scales, PAIR);
    avx512::group_zeros(layer, group, n, count, zeros, PAIR);
}

// 32 channels, of which `codes` are there, of 16 columns, of which `count` are.
template <int BITS> static HFQ_INLINE void unpack_tile(const Layer &layer, int64_t n, int64_t count, int64_t k, int64_t codes, int64_t lead,
                                                       const float *zeros, const Integers &table, char *out) {
    const int64_t pitch = layer.row_nbytes, columns = least(BLOCK, count);
    if (columns <= 0) { memset(out, 0, amx::TILE); return; }
#if defined(HFQ_AMX)
    const Columns from = {layer.codes + k * BITS / 32 * pitch + 4 * n, pitch, codes * BITS / 32, (__mmask16)((1u << columns) - 1)};
    for (int64_t row = 0; row < from.rows; row++) __builtin_prefetch(from.words + row * pitch + lead, 0, 2);
    unpack_words<BITS == 0 ? 4 : BITS>(from, zeros, table, out);
#else
    int16_t order[64];
    find_order(layer, order);
    for (int64_t place = 0; place < CHANNELS; place++)
        for (int64_t j = 0; j < BLOCK; j++) {
            const int64_t channel = k + order[place], column = n + j, bit = channel * layer.bits % 32;
            float value = 0;
            if (order[place] < codes && j < columns) {
                uint64_t found = 0;
                if (BITS == 0) found = load32(layer.codes + channel * pitch + column / 8 * 4) >> 4 * awq_place((int)(column % 8));
                else found = load32(layer.codes + channel * layer.bits / 32 * pitch + 4 * column);
                if (BITS == 3 && bit > 29) found |= (uint64_t)load32(layer.codes + (channel * layer.bits / 32 + 1) * pitch + 4 * column) << 32;
                value = (float)(found >> (BITS == 0 ? 0 : bit) & ((1u << layer.bits) - 1)) - zeros[j];
            }
            const uint16_t half = short_of(value);
            memcpy(out + 64 * (place / 2) + 4 * j + 2 * (place % 2), &half, 2);
        }
#endif
}

// AWQ's words of a part's columns, for `length` channels, one row after the other: where they lie they share few places of the first cache.
static void copy_words(const Layer &layer, int64_t n, int64_t width, int64_t k, int64_t length, int64_t lead, char *out) {
    const int64_t pitch = layer.row_nbytes, nbytes = up(width, 8) / 2;
    const char *words = layer.codes + k * pitch + n / 2;
    for (int64_t row = 0; row < length; row++, words += pitch, out += MOST_FEW / 2) {
        memcpy(out, words, nbytes);
        for (int64_t i = 0; i < nbytes; i += 64) __builtin_prefetch(words + lead + i, 0, 2);
        __builtin_prefetch(words + lead + nbytes - 1, 0, 2);
    }
}

// As unpack_rows: of columns, the channels of one group. AWQ's are at `words`, of a row of MOST_FEW.
template <int BITS>
static void unpack_columns(const Layer &layer, int64_t n, int64_t count, int64_t k, int64_t length, int64_t lead, const float *zeros,
                           const char *words, char *out) {
    const Integers table = all_integers();
    for (int64_t i = 0; i < length; i += CHANNELS, out += 2 * amx::TILE) {
        const int64_t codes = least(CHANNELS, length - i);
#if defined(HFQ_AMX)
        if constexpr (BITS == 0) {
            unpack_awq(words + i * (MOST_FEW / 2), MOST_FEW / 2, codes, count, zeros, table, out);
            continue;
        }
#endif
        for (int64_t t = 0; t < 2; t++) unpack_tile<BITS>(layer, n + BLOCK * t, count - BLOCK * t, k + i, codes, lead, zeros + BLOCK * t, table, out + t * amx::TILE);
    }
}

// ---- Products ----------------------------------------------------------------------------------------------------------------

struct Job {
    const Layer *layer;
    const char *x;
    const float *factors;
    int64_t rows, depth, lead;
    Cut cut;
    char *y;
    int64_t y_stride;
    int32_t dtype;  // of x, as it was, and of y
    bool divides;   // sums by their scales
    bool by_tiles;  // or else by vectors
    bool halved;    // the rows are few, and their sums take two lanes each
    bool apart;     // multiplied row by row (bfloat16_dots.h)
};

inline int64_t blocks(int64_t rows) { return (rows + BLOCK - 1) / BLOCK; }

// total += sums * scales, of 16 rows of a tile; a scale for each of them, or for each column.
template <bool LEFT> static HFQ_INLINE void add_up(const float *sums, const float *scales, bool divides, float *total) {
#if defined(HFQ_AMX)
    const __m512 columns = _mm512_loadu_ps(scales);
    if (LEFT && divides) {
        for (int i = 0; i < 16; i++) {
            const __m512 value = _mm512_div_ps(_mm512_load_ps(sums + 16 * i), _mm512_set1_ps(scales[i]));
            _mm512_store_ps(total + 16 * i, _mm512_add_ps(_mm512_load_ps(total + 16 * i), value));
        }
        return;
    }
    HFQ_UNROLL
    for (int i = 0; i < 16; i++) {
        const __m512 scale = LEFT ? _mm512_set1_ps(scales[i]) : columns;
        _mm512_store_ps(total + 16 * i, _mm512_fmadd_ps(_mm512_load_ps(sums + 16 * i), scale, _mm512_load_ps(total + 16 * i)));
    }
#else
    for (int i = 0; i < 256; i++) {
        const float scale = scales[LEFT ? i / 16 : i % 16];
        total[i] += divides ? sums[i] / scale : sums[i] * scale;
    }
#endif
}

// What a pair of tiles of weights is multiplied with: a block of activations, [32 channels] tiles, or null.
struct Factor {
    const char *at;
    int64_t pitch, step, rows;
};

// Sums on their way: those in the tiles leave them when the next are begun, and are added up when the next leave. So tiles multiply
// while codes are unpacked and sums added up.
template <bool LEFT> struct TileFlow {
    const bool divides;
    float (*sums)[256];
    amx::Tiles tiles;
    struct Sums {
        int count = 0;  // of tiles
        const float *scales = nullptr;
        float *totals = nullptr;
    } inside, outside;
    TileFlow(const Job &job, Kept &kept) : divides(job.divides), sums(kept.sums) {}

    HFQ_INLINE void move() {
        for (int i = 0; i < outside.count; i++) add_up<LEFT>(sums[i], outside.scales + i % 2 * BLOCK, divides, outside.totals + 256 * i);
        outside = inside, inside.count = 0;
        if (outside.count > 0) amx::store<0>(sums[0]), amx::store<1>(sums[1]);
        if (outside.count > 2) amx::store<2>(sums[2]), amx::store<3>(sums[3]);
    }

    // totals, [block][two tiles] += the products of a pair of weights, [32 channels][two tiles] of `count`, and one or two blocks.
    HFQ_INLINE void multiply(const char *codes, Factor x, Factor other, int64_t count, const float *scales, float *totals) {
        move();
        amx::zero<0>(), amx::zero<1>();
        if (other.at) amx::zero<2>(), amx::zero<3>();
        for (int64_t s = 0; s < count; s++, codes += 2 * amx::TILE) {
            amx::load<4>(codes), amx::load<6>(x.at + s * x.step, x.pitch);
            if (LEFT) amx::dot_bfloats<0, 4, 6>(); else amx::dot_bfloats<0, 6, 4>();
            amx::load<5>(codes + amx::TILE);
            if (LEFT) amx::dot_bfloats<1, 5, 6>(); else amx::dot_bfloats<1, 6, 5>();
            if (!other.at) continue;
            amx::load<7>(other.at + s * other.step, other.pitch);
            if (LEFT) amx::dot_bfloats<2, 4, 7>(), amx::dot_bfloats<3, 5, 7>();
            else amx::dot_bfloats<2, 7, 4>(), amx::dot_bfloats<3, 7, 5>();
        }
        inside.count = other.at ? 4 : 2, inside.scales = scales, inside.totals = totals;
    }

    void finish() { move(), move(); }
};

#if defined(HFQ_AMX)
// sums += columns' pairs times one pair, in one instruction, for which compilers take two.
static HFQ_INLINE void dot_pairs(__m512 &sums, __m512bh columns, const char *pair) {
    struct __attribute__((packed, may_alias)) Pair { uint32_t bits; };
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(columns), "m"(*(const Pair *)pair));
}
#endif

// The same without tiles: a vector of sums for each row of the left factor, whose pairs of channels are multiplied with those of the
// 16 columns of the right one. What is computed of a sum, and when, is the same for any rows beside it.
template <bool LEFT> struct VectorFlow {
    const bool divides, halved;
    VectorFlow(const Job &job, Kept &) : divides(job.divides), halved(job.halved) {}

    // As below, of one tile and up to HALF rows.
    static HFQ_INLINE void dot_halves(const char *left, const Factor &x, int64_t count, const float *scales, bool divides, float *totals) {
#if defined(HFQ_AMX)
        const char *right = x.at;
        __m512 sums[16][1] = {};
        for (int64_t s = 0; s < count; s++, left += 2 * amx::TILE, right += x.step) {
            HFQ_UNROLL
            for (int four = 0; four < 8; four++) {
                const __m512bh columns = (__m512bh)_mm512_loadu_si512(right + four * x.pitch);
                HFQ_UNROLL
                for (int i = 0; i < 16; i++) {
                    int64_t row;
                    memcpy(&row, left + 64 * i + 8 * four, 8);
                    sums[i][0] = _mm512_dpbf16_ps(sums[i][0], columns, (__m512bh)_mm512_set1_epi64(row));
                }
            }
        }
        add_up<16, 1>(sums, scales, divides, totals);
#else
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 16; j++) {
                float sum = 0;
                for (int64_t k = 0; k < 32 * count; k++) {
                    if (k / 2 % 2 != j % 2) continue;
                    const char *a = left + k / 32 * 2 * amx::TILE + 64 * i + 2 * (k % 32), *b = x.at + k / 32 * x.step + k % 32 / 4 * x.pitch + 8 * (j / 2) + 2 * (k % 4);
                    sum += float_at(a, BF16, 0) * float_at(b, BF16, 0);
                }
                totals[16 * i + j] += divides ? sum / scales[i] : sum * scales[i];
            }
#endif
    }

#if defined(HFQ_AMX)
    template <int COUNT, int TILES> static HFQ_INLINE void add_up(const __m512 (*sums)[TILES], const float *scales, bool divides, float *totals) {
        HFQ_UNROLL
        for (int t = 0; t < TILES; t++) {
            const __m512 all = LEFT ? _mm512_setzero_ps() : _mm512_loadu_ps(scales + BLOCK * t);
            HFQ_UNROLL
            for (int i = 0; i < COUNT; i++) {
                float *total = totals + 256 * t + 16 * i;
                const __m512 scale = LEFT ? _mm512_set1_ps(scales[i]) : all, before = _mm512_load_ps(total);
                const __m512 after = LEFT && divides ? _mm512_add_ps(before, _mm512_div_ps(sums[i][t], scale)) : _mm512_fmadd_ps(sums[i][t], scale, before);
                _mm512_store_ps(total, after);
            }
        }
    }
#endif

    // totals += COUNT rows of the left factor times 16 columns of TILES right ones.
    template <int COUNT, int TILES>
    static HFQ_INLINE void dot(const char *left, int64_t left_pitch, int64_t left_step, const char *right, int64_t right_pitch, int64_t right_step,
                               int64_t count, const float *scales, bool divides, float *totals) {
#if defined(HFQ_AMX)
        __m512 sums[COUNT][TILES] = {};
        for (int64_t s = 0; s < count; s++, left += left_step, right += right_step) {
            HFQ_UNROLL
            for (int pair = 0; pair < 16; pair++) {
                __m512bh columns[TILES];
                HFQ_UNROLL
                for (int t = 0; t < TILES; t++) columns[t] = (__m512bh)_mm512_loadu_si512(right + pair * right_pitch + t * amx::TILE);
                if (TILES == 1) {
                    HFQ_UNROLL
                    for (int i = 0; i < COUNT; i++) dot_pairs(sums[i][0], columns[0], left + i * left_pitch + 4 * pair);
                    continue;
                }
                HFQ_UNROLL
                for (int i = 0; i < COUNT; i++) {
                    const __m512bh row = (__m512bh)_mm512_set1_epi32((int)load32(left + i * left_pitch + 4 * pair));
                    HFQ_UNROLL
                    for (int t = 0; t < TILES; t++) sums[i][t] = _mm512_dpbf16_ps(sums[i][t], columns[t], row);
                }
            }
        }
        add_up<COUNT, TILES>(sums, scales, divides, totals);
#else
        for (int t = 0; t < TILES; t++)
            for (int i = 0; i < COUNT; i++)
                for (int j = 0; j < 16; j++) {
                    float sum = 0, scale = scales[LEFT ? i : BLOCK * t + j], &total = totals[256 * t + 16 * i + j];
                    for (int64_t k = 0; k < 32 * count; k++) {
                        const char *a = left + k / 32 * left_step + i * left_pitch + 2 * (k % 32);
                        const char *b = right + k / 32 * right_step + k % 32 / 2 * right_pitch + t * amx::TILE + 4 * j + 2 * (k % 2);
                        sum += float_at(a, BF16, 0) * float_at(b, BF16, 0);
                    }
                    total += divides ? sum / scale : sum * scale;
                }
#endif
    }

    void multiply(const char *codes, Factor x, int64_t count, const float *scales, float *totals) {
        if (LEFT) {
            for (int64_t t = 0; t < 2; t++)
                if (halved) dot_halves(codes + t * amx::TILE, x, count, scales + BLOCK * t, divides, totals + 256 * t);
                else dot<16, 1>(codes + t * amx::TILE, 64, 2 * amx::TILE, x.at, x.pitch, x.step, count, scales + BLOCK * t, divides, totals + 256 * t);
        } else if (x.rows <= 4) {
            dot<4, 2>(x.at, x.pitch, x.step, codes, 64, 2 * amx::TILE, count, scales, divides, totals);
        } else if (x.rows <= 8) {
            dot<8, 2>(x.at, x.pitch, x.step, codes, 64, 2 * amx::TILE, count, scales, divides, totals);
        } else if (x.rows <= 12) {
            dot<12, 2>(x.at, x.pitch, x.step, codes, 64, 2 * amx::TILE, count, scales, divides, totals);
        } else {
            for (int64_t t = 0; t < 2; t++)
                dot<16, 1>(x.at, x.pitch, x.step, codes + t * amx::TILE, 64, 2 * amx::TILE, count, scales + BLOCK * t, divides, totals + 256 * t);
        }
    }

    HFQ_INLINE void multiply(const char *codes, Factor x, Factor other, int64_t count, const float *scales, float *totals) {
        multiply(codes, x, count, scales, totals);
        if (other.at) multiply(codes, other, count, scales, totals + 2 * 256);
    }

    void finish() {}
};

// Unpacked codes of a pair, of channels from k on, in pieces with a scale each for its outputs; where their sums belong.
struct Step {
    const char *codes;
    int64_t k, count;
    struct { int64_t first, stop; const float *scales; } pieces[MOST_DEPTH / CHANNELS];
    float *totals;
};

// A step's codes times all activations: block by block, whose totals stay near.
template <bool LEFT, class Flow> static void add_step(const Job &job, Flow &flow, const Step &step) {
    float *totals = step.totals;
    for (int64_t b = 0; b < blocks(job.rows); b += 2, totals += 4 * 256) {
        const int64_t rows = least(BLOCK, job.rows - b * BLOCK), others = least(BLOCK, job.rows - (b + 1) * BLOCK);
        const char *x = job.x + place_of(*job.layer, job.rows, job.depth, b, step.k);
        const char *other = others > 0 ? job.x + place_of(*job.layer, job.rows, job.depth, b + 1, step.k) : nullptr;
        for (int64_t i = 0; i < step.count; i++) {
            const int64_t start = step.pieces[i].first - step.k, length = step.pieces[i].stop - step.pieces[i].first;
            const Factor first = {x + 2 * start * rows, LEFT ? (job.halved ? 8 : 4) * rows : 64, 64 * rows, rows};
            const Factor second = {other ? other + 2 * start * others : nullptr, LEFT ? 4 * others : 64, 64 * others, others};
            const int64_t tiles = up(length, LEFT ? 2 * CHANNELS : CHANNELS) / CHANNELS;
            flow.multiply(step.codes + start / CHANNELS * 2 * amx::TILE, first, second, tiles, step.pieces[i].scales, totals);
        }
    }
}

// One block of rows by the outputs of a pair but the first `skipped`, from `totals`, in the activations' dtype.
template <bool LEFT> static void write_pair(const Job &job, int64_t n, int64_t skipped, int64_t columns, int64_t row, int64_t rows, const float *totals) {
    const float shared = job.layer->kind == INT8 ? job.layer->shared : 1.0f;
    const bool is_two = job.halved || job.dtype == F16;  // sums
#if defined(HFQ_AMX)
    __m512i tiles[2][16];
    for (int t = 0; t < 2; t++) {
        HFQ_UNROLL
        for (int i = 0; i < 16; i++) tiles[t][i] = _mm512_load_si512(totals + 256 * t + 16 * i);
        if (LEFT) amx::transpose(tiles[t]);
    }
    for (int64_t m = 0; m < rows; m++) {
        const float *factors = job.factors + 2 * (row + m) * rows_of(job.dtype);
        __m256i halves[2];
        HFQ_UNROLL
        for (int t = 0; t < 2; t++) {
            __m512 value = _mm512_castsi512_ps(tiles[t][is_two ? 2 * m : m]);
            if (is_two) value = _mm512_add_ps(value, _mm512_castsi512_ps(tiles[t][2 * m + 1]));
            value = _mm512_mul_ps(value, _mm512_set1_ps(shared));
            if (job.dtype == F16) {  // none of whose numbers is so small or large that a row is normalized
                halves[t] = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
                continue;
            }
            value = _mm512_mul_ps(_mm512_mul_ps(value, _mm512_set1_ps(factors[0])), _mm512_set1_ps(factors[1]));
            const __m512i bits = _mm512_castps_si512(value), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
            __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
            rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
            halves[t] = _mm512_cvtepi32_epi16(rounded);
        }
        const __m512i line = _mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1);
        _mm512_mask_storeu_epi16(job.y + 2 * ((row + m) * job.y_stride + n), (columns < PAIR ? (1u << columns) - 1 : ~0u) & ~0u << skipped, line);
    }
#else
    for (int64_t m = 0; m < rows; m++)
        for (int64_t j = skipped; j < columns; j++) {
            const float *factors = job.factors + 2 * (row + m) * rows_of(job.dtype), *tile = totals + j / BLOCK * 256;
            const int64_t i = is_two ? 2 * m : m, place = LEFT ? 16 * (j % BLOCK) + i : 16 * i + j % BLOCK;
            float value = tile[place];
            if (is_two) value += tile[place + (LEFT ? 1 : 16)];
            const uint16_t half = job.dtype == F16 ? float_to_half(value * shared) : float_to_bfloat(value * shared * factors[0] * factors[1]);
            memcpy(job.y + 2 * ((row + m) * job.y_stride + n + j), &half, 2);
        }
#endif
}

// The scales of an output row.
static void find_row_scales(const Layer &layer, int64_t n, float *scales) {
    const int64_t groups = row_groups(layer);
    if (layer.scale_step == 1 && groups > 1) return avx512::row_scales(layer, n, groups, scales);
    for (int64_t g = 0; g < groups; g++) scales[g] = scale_at(layer, scale_place(layer, n, g));
}

// The scales of a part's rows that do not share them, [pair][group][32].
static void find_scales(const Layer &layer, int64_t first, int64_t width, float *scales, float *loose) {
    const int64_t groups = row_groups(layer);
    for (int64_t r = 0; r < up(width, PAIR); r++) {
        const int64_t n = first + least(r, width - 1);
        float *to = scales + r / PAIR * groups * PAIR + r % PAIR;
        find_row_scales(layer, n, loose);
        for (int64_t g = 0; g < groups; g++) to[g * PAIR] = loose[g];
    }
}

typedef void (*UnpackRows)(const Layer &, int64_t, int64_t, int64_t, int64_t, int64_t, char *);
inline UnpackRows row_unpacker(const Layer &layer) {
    if (folds(layer)) return unpack_folded;
    switch (layer.kind) {
        case E4M3: return unpack_rows<E4M3>;
        case E5M2: return unpack_rows<E5M2>;
        case INT8: return unpack_rows<INT8>;
        default: return takes_zeros(layer) ? unpack_rows<ZEROED> : unpack_rows<NIBBLES>;
    }
}
typedef void (*UnpackColumns)(const Layer &, int64_t, int64_t, int64_t, int64_t, int64_t, const float *, const char *, char *);
inline UnpackColumns column_unpacker(const Layer &layer) {
    const int bits = layer.kind == AWQ ? 0 : layer.bits;
    return bits == 0 ? unpack_columns<0> : bits == 2 ? unpack_columns<2> : bits == 3 ? unpack_columns<3> : bits == 4 ? unpack_columns<4> : unpack_columns<8>;
}

// Unpacks a step: the pair of outputs from `first` + n on of a part of `width`, by channels from step.k on. `slots` takes scales in turns.
template <bool LEFT> static void unpack_step(const Job &job, Kept &kept, int64_t first, int64_t width, int64_t n, int64_t &slots, char *codes, Step &step) {
    const Layer &layer = *job.layer;
    const int64_t size = group_size(layer), stop = least(layer.in_features, step.k + job.depth), count = least(PAIR, width - n);
    if (layer.kind == AWQ && n == 0) copy_words(layer, first, width, step.k, stop - step.k, job.lead, kept.words);
    if (LEFT) row_unpacker(layer)(layer, first + n, count, step.k, stop - step.k, job.lead, codes);
    step.count = 0;
    for (int64_t at = step.k, end; at < stop; at = end) {
        const int64_t group = at / size;
        end = least(least(stop, (group + 1) * size), at + PIECE);
        float *scales = kept.scales + slots++ % MOST_SCALES * PAIR;
        if (!LEFT) {
            find_group(layer, group, first + n, count, scales, kept.zeros);
            column_unpacker(layer)(layer, first + n, count, at, end - at, job.lead, kept.zeros,
                                   kept.words + (at - step.k) * (MOST_FEW / 2) + n / 2, codes + (at - step.k) / CHANNELS * 2 * amx::TILE);
        } else if (folds(layer)) {
            find_unfolded(layer, first + n, count, step.k, stop - step.k, scales);
        } else if (shares_rows(layer)) {
            const float scale = scale_at(layer, scale_place(layer, first + n, group));
            for (int64_t r = 0; r < PAIR; r++) scales[r] = scale;
        } else {
            scales = kept.scales + (n / PAIR * row_groups(layer) + group) * PAIR;
        }
        step.pieces[step.count++] = {at, end, scales};
    }
    step.codes = codes;
}

// One block of activations times GPTQ's words: codes are multiplied in the registers that they are unpacked in, to the sums that VectorFlow
// would make of them.
inline bool is_unstored(const Layer &layer, int64_t rows, bool by_tiles) {
#if defined(HFQ_AMX)
    return !by_tiles && rows <= BLOCK && has_columns(layer) && reads(layer);
#else
    return false;
#endif
}

#if defined(HFQ_AMX)
// totals += ROWS activation rows times `rows` words of each of 16 columns of TILES tiles, of which those from `skipped` to `count` are there.
template <int BITS, int ROWS, int TILES>
static HFQ_INLINE void dot_words(const char *words, int64_t pitch, int64_t rows, int64_t skipped, int64_t count, int64_t lead, const float *zeros,
                                 const char *x, int64_t x_step, const float *scales, float *totals) {
    const __m512i table = all_integers();
    __mmask16 there[TILES];
    __m512i shifts[TILES];
    __m512 sums[ROWS][TILES] = {};
    HFQ_UNROLL
    for (int t = 0; t < TILES; t++) {
        const int64_t columns = most(0, least(BLOCK, count - BLOCK * t));
        there[t] = (__mmask16)(((1u << columns) - 1) & (t ? ~0u : ~0u << skipped)), shifts[t] = shifts_of<BITS>(zeros + BLOCK * t);
    }
    for (int64_t row = 0; row < rows; row += UNIT<BITS>, words += UNIT<BITS> * pitch) {
        const char *left = x + row / BITS * x_step + row % BITS * (64 / BITS);
        avx512::keep_place(left);
        HFQ_UNROLL
        for (int t = 0; t < TILES; t++) {
            const Columns from = {words + 64 * t, pitch, rows - row, there[t]};
            __m512i unit[UNIT<BITS>], pairs[PAIRS<BITS>];
            HFQ_UNROLL
            for (int i = 0; i < UNIT<BITS>; i++) {
                __builtin_prefetch(from.words + i * pitch + lead, 0, 2);
                unit[i] = from.word(i);
            }
            unpack_pairs<BITS>(unit, shifts[t], table, pairs);
            HFQ_UNROLL
            for (int i = 0; i < PAIRS<BITS>; i++)
                HFQ_UNROLL
                for (int m = 0; m < ROWS; m++) dot_pairs(sums[m][t], (__m512bh)pairs[i], left + 64 * m + 4 * i);
        }
    }
    VectorFlow<false>::add_up<ROWS, TILES>(sums, scales, false, totals);
}

// The same for AWQ's words, of which `rows` are there of each 8 columns: two channels' at a time.
template <int ROWS, int TILES>
static HFQ_INLINE void dot_awq(const char *words, int64_t pitch, int64_t rows, int64_t count, int64_t lead, const float *zeros, const char *x,
                               int64_t x_step, const float *scales, float *totals) {
    const __m512i table = all_integers();
    __mmask8 there[TILES / 2];
    __m512i added[TILES];
    __m512 sums[ROWS][TILES] = {};
    HFQ_UNROLL
    for (int t = 0; t < TILES; t++) added[t] = awq_shifts(zeros + BLOCK * t);
    HFQ_UNROLL
    for (int p = 0; p < TILES / 2; p++) there[p] = (__mmask8)((1u << most(0, least(PAIR, count - PAIR * p)) / 8) - 1);
    for (int64_t row = 0; row < rows; row += 2, words += 2 * pitch) {
        const char *left = x + row / CHANNELS * x_step + row % CHANNELS * 2;
        avx512::keep_place(left);
        __builtin_prefetch(words + lead, 0, 2), __builtin_prefetch(words + lead + pitch, 0, 2);
        HFQ_UNROLL
        for (int p = 0; p < TILES / 2; p++) {
            __m512i pairs[2];
            unpack_awq_pairs(words + PAIR / 2 * p, pitch, row + 1 < rows, there[p], added + 2 * p, table, pairs);
            HFQ_UNROLL
            for (int t = 0; t < 2; t++)
                HFQ_UNROLL
                for (int m = 0; m < ROWS; m++) dot_pairs(sums[m][2 * p + t], (__m512bh)pairs[t], left + 64 * m);
        }
    }
    VectorFlow<false>::add_up<ROWS, TILES>(sums, scales, false, totals);
}

// The fewer rows, the more columns side by side: sums do not wait for each other, and more of a word's row is read at once.
template <int BITS, int ROWS> static void dot_columns(const Job &job, Kept &kept, int64_t first, int64_t skipped, int64_t width, int64_t k, int64_t m = 0) {
    const int TILES = ROWS == 2 || (BITS == 0 && ROWS == 4) ? 4 : ROWS <= HALF ? 2 : 1;
    const Layer &layer = *job.layer;
    const int64_t size = group_size(layer), stop = least(layer.in_features, k + job.depth), pitch = layer.row_nbytes;
    const int64_t column = first + skipped, there = width - skipped, before = column % 8, wide = up(width, 2 * PAIR) - skipped;
    const int64_t known = least(up(before + there, BLOCK), layer.out_features - column + before);  // zero points are read from whole words
    for (int64_t at = k, end; at < stop; at = end) {
        const int64_t group = at / size;
        const char *words = layer.codes + (BITS == 0 ? at * pitch + first / 2 : at * BITS / 32 * pitch + 4 * first);
        const char *x = job.x + place_of(layer, job.rows, job.depth, 0, at) + 64 * m;
        end = least(least(stop, (group + 1) * size), at + PIECE);
        avx512::group_scales(layer, group, column, there, kept.scales + skipped, wide);
        avx512::group_zeros(layer, group, column - before, known, kept.zeros + 8 + skipped - before, before + wide);
        for (int64_t n = 0; n < width; n += BLOCK * TILES) {
            const int64_t count = least(BLOCK * TILES, width - n);
            float *totals = kept.totals + 16 * (n + m);
            if constexpr (BITS == 0)
                dot_awq<ROWS, TILES>(words + n / 2, pitch, end - at, count, job.lead, kept.zeros + 8 + n, x, 64 * job.rows, kept.scales + n, totals);
            else
                dot_words<BITS, ROWS, TILES>(words + 4 * n, pitch, (end - at) * BITS / 32, n ? 0 : skipped, count, job.lead, kept.zeros + 8 + n, x,
                                             64 * job.rows, kept.scales + n, totals);
        }
    }
}

template <int BITS> static void dot_unstored(const Job &job, Kept &kept, int64_t first, int64_t skipped, int64_t width, int64_t k) {
    switch ((job.rows + 1) / 2) {
        case 1: return dot_columns<BITS, 2>(job, kept, first, skipped, width, k);
        case 2: return dot_columns<BITS, 4>(job, kept, first, skipped, width, k);
        case 3: return dot_columns<BITS, 6>(job, kept, first, skipped, width, k);
        case 4: return dot_columns<BITS, 8>(job, kept, first, skipped, width, k);
        case 5: case 6: return dot_columns<BITS, 12>(job, kept, first, skipped, width, k);
        default: return dot_columns<BITS, 16>(job, kept, first, skipped, width, k);
    }
}

// Of AWQ up to eight rows at a time: its codes are unpacked for two tiles at once, whose sums are as many as registers hold.
template <> void dot_unstored<0>(const Job &job, Kept &kept, int64_t first, int64_t skipped, int64_t width, int64_t k) {
    for (int64_t m = 0; m < job.rows; m += HALF)
        switch ((least(HALF, job.rows - m) + 1) / 2) {
            case 1: dot_columns<0, 2>(job, kept, first, skipped, width, k, m); break;
            case 2: dot_columns<0, 4>(job, kept, first, skipped, width, k, m); break;
            case 3: dot_columns<0, 6>(job, kept, first, skipped, width, k, m); break;
            default: dot_columns<0, 8>(job, kept, first, skipped, width, k, m);
        }
}
#endif

static void dot_step(const Job &job, Kept &kept, int64_t first, int64_t skipped, int64_t width, int64_t k) {
#if defined(HFQ_AMX)
    if (job.layer->kind == AWQ) return dot_unstored<0>(job, kept, first, skipped, width, k);
    (job.layer->bits == 2 ? dot_unstored<2> : job.layer->bits == 3 ? dot_unstored<3> : job.layer->bits == 4 ? dot_unstored<4> : dot_unstored<8>)(job, kept, first, skipped, width, k);
#endif
}

// Codes are multiplied a step after they were unpacked, when they have left the processor's queue of stores, for which tiles would wait.
template <bool LEFT, class Flow> static void part_of(const Job &job, int64_t first, int64_t width, float *scratch) {
    const Layer &layer = *job.layer;
    Kept &kept = *(Kept *)scratch;
    Flow flow(job, kept);
    const bool stores = LEFT || !is_unstored(layer, job.rows, job.by_tiles);
    const int64_t skipped = stores ? 0 : skipped_before(layer, job.cut, first);
    first -= skipped, width += skipped;
    const int64_t each = blocks(job.rows) * 2 * 256;
    int64_t slots = 0, turn = 0;
    Step steps[2];
    memset(kept.totals, 0, sizeof(float) * (up(width, PAIR) / PAIR * each));
    if (LEFT && !shares_rows(layer) && !folds(layer)) find_scales(layer, first, width, kept.scales, kept.zeros);
    for (int64_t k = 0; k < layer.in_features; k += job.depth) {
        if (!stores) dot_step(job, kept, first, skipped, width, k);
        for (int64_t n = 0; stores && n < width; n += PAIR, turn++) {
            Step &step = steps[turn % 2];
            step.k = k, step.totals = kept.totals + n / PAIR * each;
            unpack_step<LEFT>(job, kept, first, width, n, slots, kept.codes[turn % 2], step);
            if (turn > 0) add_step<LEFT, Flow>(job, flow, steps[(turn - 1) % 2]);
        }
    }
    if (stores) add_step<LEFT, Flow>(job, flow, steps[(turn - 1) % 2]);
    flow.finish();
    for (int64_t b = 0; b < blocks(job.rows); b++)
        for (int64_t n = 0; n < width; n += PAIR)
            write_pair<LEFT>(job, first + n, n ? 0 : skipped, least(PAIR, width - n), b * BLOCK / rows_of(job.dtype), least(BLOCK, job.rows - b * BLOCK) / rows_of(job.dtype),
                             kept.totals + n / PAIR * each + 2 * b * 256);
}

void part_of_layer(const Job &job, int64_t first, int64_t width, float *scratch) {
    const bool columns = has_columns(*job.layer);
    if (job.by_tiles) (columns ? part_of<false, TileFlow<false>> : part_of<true, TileFlow<true>>)(job, first, width, scratch);
    else (columns ? part_of<false, VectorFlow<false>> : part_of<true, VectorFlow<true>>)(job, first, width, scratch);
}

// Of a sorted layer strip by strip: the more rows, the less often are they to be read.
void part(const Job &job, int64_t first, int64_t width, float *scratch) {
    if (!is_sorted(*job.layer)) return part_of_layer(job, first, width, scratch);
    const int64_t strip_width = avx512::strip_columns(*job.layer, job.rows > 4 * BLOCK ? width : 1);
    Job of = job;
    for (int64_t i = 0, count; i < width; i += count) {
        count = least(strip_width - skipped_before(*job.layer, job.cut, first + i), width - i);
        const Layer strip = avx512::sort_strip(*job.layer, first + i, count, scratch);
        of.layer = &strip, of.lead = 0;  // nothing is left to be asked for
        part_of_layer(of, first + i, count, scratch);
    }
}

// The job of up to MOST rows, whose activations are packed at `packed`. With few rows of codes a part is as narrow as can be, and the next
// part is asked for; else the next channels.
Job plan(const Layer &layer, int64_t rows, int32_t dtype, char *y, int64_t y_stride, const char *packed, const float *factors, int threads, bool by_tiles) {
    const bool columns = has_columns(layer), is_few = rows <= 2 * BLOCK;
    const int64_t size = group_size(layer), share = up(layer.out_features / (4 * most(threads, 1)), PAIR);
    int64_t width = is_few && !columns ? PAIR : most(PAIR, least(is_few ? MOST_FEW : MOST_WIDTH, share));
    if (!columns && !shares_rows(layer) && !folds(layer)) width = most(PAIR, least(width, MOST_SCALES / row_groups(layer) * PAIR));
    const bool is_deep = is_few ? !by_tiles && !columns : by_tiles;  // as measured: vectors multiply many rows from the first cache
    const int64_t deep = is_deep ? MOST_DEPTH : PIECE, depth = size % PIECE == 0 || size == layer.in_features ? deep : most(size, deep / size * size);
    const int64_t below = (layer.kind == AWQ ? depth : depth * layer.bits / 32) * layer.row_nbytes;
    const int64_t lead = columns ? below : is_few ? layer.row_nbytes * PAIR * threads : depth;
    const bool by_lines = layer.kind == GPTQ && rows <= HALF && is_unstored(layer, rows, by_tiles);  // others take no longer across them
    const Cut cut = cut_outputs(layer, width, threads, by_lines);
    return {&layer, packed, factors, rows, depth, lead, cut, y, y_stride, dtype, layer.kind <= E5M2 && layer.divides, by_tiles, !by_tiles && !columns && rows <= HALF, false};
}

}  // namespace tiled
}  // namespace

#include "bfloat16_dots.h"

#if defined(HFQ_AMX)
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
