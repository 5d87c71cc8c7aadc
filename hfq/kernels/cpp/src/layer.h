// A quantized layer, one multiplication by it, and access to the fields of both.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

// How a layer's codes are stored.
enum Kind {
    E4M3 = 0,     // rows of 8-bit floats: 4 bits of exponent, 3 of mantissa
    E5M2 = 1,     // rows of 8-bit floats: 5 bits of exponent, 2 of mantissa
    NIBBLES = 2,  // rows of 4-bit codes, two per byte
    INT8 = 3,     // rows of signed bytes
    QUADS = 4,    // AWQ's gemv_fast: four rows share each 16-bit word
    BLOCKS = 5,   // rows of ggml's blocks, which hold their scales
    BIASED = 6,   // rows of bytes, 128 above their signed values
    UINT8 = 7,    // rows of unsigned bytes, whose zero points are ADDED
    GPTQ = 8,     // columns: bit-packed along the input channels
    AWQ = 9,      // columns: words of eight columns for each input channel
};
// Types of blocks, as ggml numbers them.
enum BlockType {
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    IQ4_XS = 23,
    MXFP4 = 39,
};
// Dtypes of scales, activations, results, and added zero points.
enum Dtype {
    F32 = 0,          // float32
    BF16 = 1,         // bfloat16
    F16 = 2,          // float16
    E8M0 = 3,         // scales only: one byte, the exponent of a power of two
    E4M3_SCALED = 4,  // scales only: E4M3 codes, multiplied or divided by `shared`
    NESTED = 5,       // scales only: codes that have scales themselves
};
// Offset of the stored zero points of columns.
enum ZeroReading {
    STORED = 0,           // nothing
    FIELD_PLUS_ONE = 1,   // 1, added to the extracted field; the result may need one more bit
    MASKED_PLUS_ONE = 2,  // 1, added to the extracted field, modulo its bits
    WORD_PLUS_ONE = 3,    // 1, added to each field of the whole word, with carries
};
// Storage of the zero points of rows.
enum RowZeros {
    NONE = 0,          // no zero points
    GROUP_WORDS = 1,   // nibbles along the groups, `zero_words` words per row
    OUTPUT_WORDS = 2,  // nibbles along the outputs, minus 8: words [outputs / 8, groups]
    BYTES = 3,         // signed bytes in the layout of the scales
    ADDED = 4,         // floats in the layout of the scales, added to the products
    OUTPUT_BYTES = 5,  // bytes along the outputs, minus 128: words [outputs / 4, groups]
};

// One quantized layer; hfq/kernels/cpp/layers.py sets the fields.
//
// Rows of codes: W[n, k] = (value(codes[n, k]) - zero) * scale. The place of scale and zero is
// n / block_out * scale_stride + g * scale_step. The group g is index[k], or k / block_in without an index.
// QUADS and UINT8: W[n, k] = code * scale + zero.
// BLOCKS: see ggml_blocks.h. From row `order_start` on, the file has rows as [outer, order_first,
// order_second, order_inner], and the layer as [outer, order_second, order_first, order_inner].
// E4M3_SCALED: scales are E4M3 codes, multiplied or divided by `shared`.
// NESTED: scales are nested_values[code] * nested_scales[place / nested_size] + shared.
//
// GPTQ: W[n, k] = scales[g, n] * (q[k, n] - z[g, n]). AWQ: the same formula. Row k of its codes, and row g of
// its zero points, are words of eight columns each. A layer with `index` but with index_nbytes of 0 is sorted
// (act_order.h).
struct Layer {
    const char *codes;          // address of the codes, at any alignment
    const char *scales;         // address of the scales, of `scale_dtype`
    const char *zeros;          // address of the zero points, or null
    const char *index;          // group of each channel; if sorted, int32 channels in group order; or null
    const char *values;         // NIBBLES: address of the float32 values of the 16 codes
    const char *integers;       // NIBBLES: address of 16 bytes, value / unit + offset; null if not integers
    const char *nested_scales;  // NESTED: address of a float32 scale per `nested_size` scales
    const char *nested_values;  // NESTED: address of the float32 values of the 256 scale codes
    int64_t in_features;        // input channels
    int64_t out_features;       // outputs
    int64_t block_out;          // outputs that share a scale
    int64_t block_in;           // input channels that share a scale (a group)
    int64_t scale_stride;       // scales from one block of outputs to the next
    int64_t scale_step;         // scales from one group to the next
    int64_t nested_size;        // NESTED: scales that share a nested scale
    int64_t groups;             // groups of input channels
    int64_t zero_words;         // 32-bit words of packed zero points per output row, or of columns per group
    int64_t row_nbytes;         // bytes from one row of codes, or of words, to the next
    int64_t order_start;        // BLOCKS: rows that the file has in the order of the layer
    int64_t order_first;        // BLOCKS: sizes of the stored order of the other rows
    int64_t order_second;       // BLOCKS: the same
    int64_t order_inner;        // BLOCKS: the same; 0 if all rows are in order
    float shared;               // factor of INT8, BIASED, or E4M3_SCALED scales; added to NESTED scales
    float unit;                 // NIBBLES with `integers`: value of 1, a power of two; 1 if zero points
    int32_t kind;               // Kind
    int32_t bits;               // bits per code; of columns only
    int32_t scale_dtype;        // Dtype of the scales
    int32_t divides;            // 1: codes or scales are divided by their factor; 0: multiplied
    int32_t zero_reading;       // ZeroReading; of columns only
    int32_t index_nbytes;       // bytes per entry of `index`, 4 or 8; 0 without it and if sorted
    int32_t row_zeros;          // RowZeros; of rows only
    int32_t zero_dtype;         // ADDED: Dtype of the zero points
    int32_t high_first;         // NIBBLES: 1 if the higher half of a byte is the first code, else 0
    int32_t offset;             // NIBBLES with `integers`: offset added to them; 15 if zero points
    int32_t block_type;         // BLOCKS: BlockType
};

// A layer's outputs in numbered parts of `width`. The first begins at 0; the last has the remaining outputs.
struct OutputParts {
    int64_t total;  // outputs of the layer
    int64_t begin;  // output at which the first part would begin, 0 or less
    int64_t width;  // outputs per part
    int64_t parts;  // number of parts
    int64_t first(int64_t part) const { return part == 0 ? 0 : begin + part * width; }
    int64_t count(int64_t part) const {
        return (part + 1 == parts ? total : begin + (part + 1) * width) - first(part);
    }
};

// One multiplication of activations by a layer.
struct MatmulArgs {
    const Layer *layer;     // right factor
    const float *x32;       // activations, float32 [rows, stride], zero beyond in_features
    int64_t rows;           // rows of activations
    int64_t stride;         // floats from one row of `x32` to the next
    OutputParts outputs;    // parts that threads compute
    char *y;                // address of the results, [rows, out_features] of `y_dtype`
    int64_t y_stride;       // elements from one row of `y` to the next
    int32_t y_dtype;        // Dtype of `y`
    const char *limbs;      // activations as integers, LIMBS bytes each; null if they are floats
    const float *units;     // value of 1 in `limbs`, float32 [rows, spans]
    const int32_t *totals;  // sums of limbs, totals(layer) per row
    const float *ordered;   // activations for subnormals.h, float32, then two factors per row; or null
    const float *part_sums; // BLOCKS with one row: see sum_parts; or null
};

// Biases of a layer's outputs.
struct Bias {
    const char *values;  // address of a number for each output, or null
    int64_t dtype;       // Dtype of the numbers
};

// Weighted sums of the results of experts.
struct ExpertSums {
    const char *rows;         // results of the experts, of `dtype` [pairs, features]
    const char *weights;      // weight of each pair, [tokens, top_k]
    const int64_t *order;     // pair of each row
    const int64_t *places;    // rows of each token, [tokens, top_k]: see find_places; -1 after the last
    char *result;             // sums, of `dtype` [tokens, features]
    int64_t top_k;            // pairs of a token
    int64_t features;         // numbers of a row
    int32_t dtype;            // Dtype of rows and sums
    int32_t weights_dtype;    // Dtype of the weights
    bool adds;                // true to add to the sums that `result` has
};

// A product of few rows of activations by a weight of 16-bit floats.
struct DenseProduct {
    const char *weight;  // address of the weight, of `dtype` [outputs, channels]
    const float *x;      // activations, see spread_row
    char *y;             // address of the results, of `dtype` [rows, outputs]
    int64_t rows;        // rows of activations, at most DENSE_ROWS
    int64_t channels;    // channels of a row
    int64_t stride;      // floats from one row of `x` to the next
    int64_t outputs;     // outputs of a row
    int64_t width;       // outputs per part
    int32_t dtype;       // BF16 or F16
};

const int64_t DENSE_ROWS = 8;

// Rows to which biases are added.
struct BiasedRows {
    const int64_t *ends;  // number of rows up to the end of each expert's rows
    const Bias *biases;   // biases of each expert
    char *y;              // address of the first row
    int64_t y_stride;     // elements from one row to the next
    int64_t features;     // numbers of a row
    int64_t experts;      // number of experts
    int32_t dtype;        // Dtype of the rows
};

#ifdef __clang__
#define HFQ_UNROLL _Pragma("unroll")
#else
#define HFQ_UNROLL _Pragma("GCC unroll 16")
#endif

// Inlines a function into the code of each instruction set. Calling a function that was compiled for another
// instruction set while wide registers are in use costs more than its computation.
#define HFQ_INLINE inline __attribute__((always_inline))

const int64_t MOST_ROWS = 64;        // activation rows per call
const int64_t SCRATCH = 96 * 1024;   // floats of scratch per thread
// floats of prepared activations of layers that are multiplied together
const int64_t GROUPED_FLOATS = 2 << 20;
const int64_t STEP = 256;            // input channels per tile of decoded weights
const int64_t TILE_ROWS = 16;        // output rows per tile of decoded weights
const int64_t PASS = 8;              // activation rows that share one decoding of GPTQ's codes
const int64_t PANEL_ROWS = 4;        // output rows per part of a panel
const int64_t CHUNK = 32;            // input channels of a column that are unpacked together
const int64_t SPAN = 128;            // input channels whose integer activations share one unit
const int64_t LIMBS = 3;             // bytes per integer activation
// the most activation rows for which rows of codes are multiplied as integers
const int64_t LIMB_ROWS = 8;
const int64_t MOST_COLUMNS = 2048;   // output columns per part for one activation row; a multiple of 128
// the same if codes are read along rows of words (vnni.h), with three floats of scratch per column
const int64_t LONG_COLUMNS = 16384;
const int64_t AHEAD = 4096;          // bytes from the codes being read to those prefetched: one page
const int64_t ORDERED_ROWS = 8;      // the most activation rows for which e4m3 codes are read as small floats
// bytes of scratch per thread for products in bfloat16 (bfloat16.h), in place of SCRATCH floats
const int64_t TILED_SCRATCH = 688 << 10;
// more bytes of scratch per thread, after the first sorted layer: for strips of MOST_STRIP columns or more
const int64_t SORTED_SCRATCH = 3 << 20;
const int64_t MOST_STRIP = 64;     // columns of a strip that must fit into SORTED_SCRATCH
const int64_t MOST_GROUPS = 1024;  // groups per layer

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

constexpr bool is_integer(int kind) { return kind == INT8 || kind == BIASED; }

HFQ_INLINE float integer_value(uint8_t code, int kind) {
    return (float)(int8_t)(kind == BIASED ? code ^ 0x80 : code);
}

// True if zero points are added to the products of codes and scales.
HFQ_INLINE bool adds_zeros(int kind, const Layer &layer) {
    return kind == QUADS || kind == UINT8 || (kind == NIBBLES && layer.row_zeros == ADDED);
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

// Zero point of a row's group: subtracted from codes, or, if ADDED, added to the products with the scale.
HFQ_INLINE float row_zero(const Layer &layer, int64_t n, int64_t group) {
    switch (layer.row_zeros) {
        case GROUP_WORDS:
            return (float)(load32(layer.zeros + 4 * (n * layer.zero_words + group / 8)) >> group % 8 * 4 &
                           15);
        case OUTPUT_WORDS:
            return (float)(load32(layer.zeros + 4 * (n / 8 * layer.groups + group)) >> n % 8 * 4 & 15) - 8.0f;
        case BYTES: return (float)(int8_t)layer.zeros[scale_place(layer, n, group)];
        case OUTPUT_BYTES:
            return (float)(uint8_t)layer.zeros[4 * (n / 4 * layer.groups + group) + n % 4] - 128.0f;
        case ADDED: return float_at(layer.zeros, layer.zero_dtype, scale_place(layer, n, group));
    }
    return 0;
}

HFQ_INLINE int64_t group_of(const Layer &layer, int64_t k) {
    if (layer.index_nbytes == 8) { int64_t g; memcpy(&g, layer.index + 8 * k, 8); return g; }
    if (layer.index_nbytes == 4) return (int32_t)load32(layer.index + 4 * k);
    return k / layer.block_in;
}

HFQ_INLINE uint32_t word_ones(int bits) {
    return bits == 2 ? 0x55555555u : bits == 4 ? 0x11111111u : 0x01010101u;
}

// Position of a column's nibble among the eight of its word.
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

HFQ_INLINE void put(const MatmulArgs &args, int64_t m, int64_t n, float value) {
    char *row = args.y + (m * args.y_stride + n) * (args.y_dtype == F32 ? 4 : 2);
    if (args.y_dtype == F32) { memcpy(row, &value, 4); return; }
    uint16_t half = args.y_dtype == BF16 ? float_to_bfloat(value) : float_to_half(value);
    memcpy(row, &half, 2);
}

// True if neighboring codes in memory belong to neighboring outputs.
HFQ_INLINE bool has_columns(const Layer &layer) { return layer.kind >= GPTQ; }

// True if a group's sum cannot be scaled as a whole: groups are scattered, or end within a word.
HFQ_INLINE bool is_scattered(const Layer &layer) {
    return layer.index_nbytes || (layer.kind == GPTQ && layer.block_in * layer.bits % 32);
}

// True if the layer's channels are sorted by group, which differs from their order in memory.
HFQ_INLINE bool is_sorted(const Layer &layer) {
    return layer.kind == GPTQ && layer.index && !layer.index_nbytes;
}

// Floats per row of activations. The 16 extra floats keep rows of a power of two off the same cache sets.
HFQ_INLINE int64_t padded_columns(const Layer &layer) { return (layer.in_features + 15) / 16 * 16 + 16; }

// Rows of activations, padded: products with columns compute 1, PASS / 2, or PASS rows together.
HFQ_INLINE int64_t padded_rows(const Layer &layer, int64_t rows) {
    int64_t rest = rows % PASS;
    if (!has_columns(layer) || rest <= 1) return rows;
    return rows - rest + (rest <= PASS / 2 ? PASS / 2 : PASS);
}

// True if codes are integers and a group's sum can be scaled as a whole.
HFQ_INLINE bool has_integers(const Layer &layer, int64_t rows) {
    if (has_columns(layer)) return !is_scattered(layer);
    if (layer.kind != NIBBLES || !layer.integers || layer.index_nbytes || layer.block_out != 1 ||
        rows > LIMB_ROWS)
        return false;
    if (layer.row_zeros > OUTPUT_WORDS || layer.scale_step != 1) return false;
    bool is_single = layer.block_in >= layer.in_features;
    return is_single || layer.block_in % SPAN == 0 || layer.block_in == 64 || layer.block_in == 32 ||
           layer.block_in == 16;
}

HFQ_INLINE int64_t up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// Sizes of one row of integer activations: bytes of limbs, spans (each with its own unit), and totals.
HFQ_INLINE int64_t group_chunks(const Layer &layer) {
    return up(least(layer.block_in, layer.in_features), CHUNK) / CHUNK;
}
HFQ_INLINE int64_t group_spans(const Layer &layer) { return up(group_chunks(layer) * CHUNK, SPAN) / SPAN; }
// the 192 extra bytes keep rows off the same cache sets
HFQ_INLINE int64_t limbs_nbytes(const Layer &layer) {
    return LIMBS * (has_columns(layer) ? layer.groups * group_chunks(layer) * CHUNK
                                       : up(layer.in_features, SPAN)) +
           192;
}
HFQ_INLINE int64_t spans(const Layer &layer) {
    return has_columns(layer) ? layer.groups * group_spans(layer) : up(layer.in_features, SPAN) / SPAN;
}
HFQ_INLINE int64_t totals(const Layer &layer) {
    return 2 * (has_columns(layer) ? spans(layer) : up(layer.in_features, SPAN) / 8);
}

// Floats per row of activations in the order of e4m3 codes that are read as small floats.
HFQ_INLINE int64_t ordered_columns(const Layer &layer) { return up(layer.in_features, 64) + 16; }

// Floats of the sums of one row of activations that are multiplied by blocks.
HFQ_INLINE int64_t part_sums(const Layer &layer) { return up(layer.in_features, 256) / 16; }

// Output columns per part of a product with columns.
HFQ_INLINE int64_t tile_columns(const Layer &layer, int64_t rows, int threads, bool integers, bool along) {
    if (!integers) return most(16, least(64, SCRATCH / 4 / layer.groups / 16 * 16));
    // a block of AWQ's words is one cache line wide and 128 rows high
    const int64_t along_rows = layer.kind == AWQ ? 2 * MOST_COLUMNS : LONG_COLUMNS;
    const int64_t widest = rows > 1 ? 256
                           : along  ? along_rows
                                    : MOST_COLUMNS,
                  parts = up((layer.out_features + widest - 1) / widest, most(threads, 1));
    return most(128, up((layer.out_features + parts - 1) / parts, 128));  // the same number for each thread
}

// Columns from the start of a cache line to the word of column n, in each row of words. It is not always 0,
// since files align tensors to 8 bytes only.
HFQ_INLINE int64_t after_line(const Layer &layer, int64_t n) {
    const int64_t nbytes =
        (int64_t)((uintptr_t)layer.codes + (uintptr_t)(layer.kind == AWQ ? n / 2 : 4 * n)) & 63;
    return layer.row_nbytes % 64 || nbytes % 4 ? 0 : nbytes / 4 * (layer.kind == AWQ ? 8 : 1);
}

// Divides the outputs into parts of `width`. With `by_lines`, the first part is shorter and the last is
// longer by as much, so that the others begin with a cache line. If each thread has few columns, parts stay
// even: one thread would take noticeably longer for its longer part.
HFQ_INLINE OutputParts cut_outputs(const Layer &layer, int64_t width, int threads = 1,
                                   bool by_lines = false) {
    const int64_t together = layer.kind == AWQ ? 128 : is_sorted(layer) ? 64 : 32;  // columns read together
    const bool is_even = threads <= 1 || layer.out_features >= 16 * together * threads;
    return {layer.out_features, by_lines && is_even ? -after_line(layer, 0) : 0, width,
            (layer.out_features + width - 1) / width};
}

// Columns from the start of a cache line to column n, where a part or strip begins. They are not computed.
HFQ_INLINE int64_t skipped_before(const Layer &layer, const OutputParts &outputs, int64_t n) {
    return outputs.begin ? after_line(layer, n) : 0;
}

// Output columns per part of a panel.
HFQ_INLINE int64_t panel_columns(const Layer &layer) { return layer.groups <= 512 ? 64 : 32; }

// Outputs [start, start + count) of a layer, to be dequantized.
struct Panel {
    const Layer *layer;  // layer to dequantize
    int64_t start;       // first output
    int64_t count;       // outputs
    char *out;           // address of the result: [count, in_features]; of columns [in_features, count]
    int32_t dtype;       // Dtype of `out`, F32 or BF16
};

}  // namespace
