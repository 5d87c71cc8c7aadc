// Rows of ggml's blocks: codes of 32 or 256 channels with their scales. Included by instruction_set.h in the
// namespace of each instruction set.
//
// A block is read where it lies. `Block<TYPE>` holds its scales. `take` returns the weights of a part of 32
// channels, bit-identical to the reference kernel's. `take_codes` returns them before they are multiplied by
// `scale_of` and before a minimum is subtracted.

static const float NIBBLES_MINUS_8[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
static const float NIBBLE_CODES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const float IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
// twice the values of MXFP4; zero has no sign
static const float TWICE_E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

const int PART = 32 / W;  // vectors of 32 channels

static HFQ_INLINE float half_at(const char *p) {
#if HFQ_ISA != 0 && !defined(HFQ_EMULATE)
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(load16(p))));
#else
    return half_to_float(load16(p));
#endif
}

// Shifts right by the place of an element among eight, times `bits`.
static HFQ_INLINE vu shift_in_turn(uint32_t bits_of_all, int bits) {
    vu places;
    for (int i = 0; i < W; i++) places[i] = (uint32_t)(i % 8);
    return ((vu){} + bits_of_all) >> places * (uint32_t)bits;
}

// Keeps floats in memory at this point. A float is then spread to a vector by its load, and not by a shuffle.
template <class T> static HFQ_INLINE void keep_in_memory(T &values) {
#if HFQ_ISA != 0 && defined(__x86_64__) && !defined(HFQ_EMULATE)
    __asm__("" : "+m"(values));
#endif
}

// The values of 4-bit codes.
struct Sixteen {
    vf of[16 / W];
    explicit HFQ_INLINE Sixteen(const float *values) { __builtin_memcpy(of, values, sizeof(of)); }
    HFQ_INLINE Sixteen &scale(float scale) {
        HFQ_UNROLL
        for (int i = 0; i < 16 / W; i++) of[i] *= all(scale);
        return *this;
    }
    HFQ_INLINE Sixteen &subtract(float least) {
        HFQ_UNROLL
        for (int i = 0; i < 16 / W; i++) of[i] -= all(least);
        return *this;
    }
    // Returns the weights of 16 bytes: of their lower halves, then of their higher halves.
    HFQ_INLINE void take_both(const char *codes, vf *out) const {
        HFQ_UNROLL
        for (int i = 0; i < PART / 2; i++) {
            const vu bytes = from_bytes(codes + i * W);
            out[i] = pick_values(of, bytes), out[PART / 2 + i] = pick_values(of, bytes >> 4);
        }
    }
    // Returns the weights of the lower or higher halves of 32 bytes.
    HFQ_INLINE void take_half(const char *codes, int half, vf *out) const {
        HFQ_UNROLL
        for (int i = 0; i < PART; i++) out[i] = pick_values(of, from_bytes(codes + i * W) >> 4 * half);
    }
};

template <int TYPE> struct Block;

// Blocks of 16 bytes of 4-bit codes with one scale.
struct ScaledNibbles {
    const char *codes;
    const float *values;  // of each code
    float scale;
    HFQ_INLINE void take(int, vf *out) const { Sixteen(values).scale(scale).take_both(codes, out); }
    HFQ_INLINE void take_codes(int, vf *out) const { Sixteen(values).take_both(codes, out); }
    HFQ_INLINE float scale_of(int, int) const { return scale; }
};

template <> struct Block<Q4_0> : ScaledNibbles {
    static const int SIZE = 32, NBYTES = 18;
    explicit HFQ_INLINE Block(const char *p) : ScaledNibbles{p + 2, NIBBLES_MINUS_8, half_at(p)} {}
};

template <> struct Block<IQ4_NL> : ScaledNibbles {
    static const int SIZE = 32, NBYTES = 18;
    explicit HFQ_INLINE Block(const char *p) : ScaledNibbles{p + 2, IQ4_VALUES, half_at(p)} {}
};

template <> struct Block<MXFP4> : ScaledNibbles {
    static const int SIZE = 32, NBYTES = 17;
    explicit HFQ_INLINE Block(const char *p) : ScaledNibbles{p + 1, TWICE_E2M1, half_of((uint8_t)*p)} {}
    // Half of 2**(exponent - 127), since the table has twice the values. The two smallest are subnormal.
    static HFQ_INLINE float half_of(uint32_t exponent) {
        return as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    }
};

template <> struct Block<Q4_1> {
    static const int SIZE = 32, NBYTES = 20;
    const char *p;
    explicit HFQ_INLINE Block(const char *from) : p(from) {}
    HFQ_INLINE void take(int, vf *out) const {
        Sixteen(NIBBLE_CODES).scale(half_at(p)).subtract(-half_at(p + 2)).take_both(p + 4, out);
    }
    HFQ_INLINE void take_codes(int, vf *out) const { take(0, out); }
    HFQ_INLINE float scale_of(int, int) const { return 1; }
};

// Returns the codes of 5 bits of W channels, two halves of 16 bytes, with their highest bits in a word.
static HFQ_INLINE vf five_bits(const char *codes, uint32_t high, int i) {
    const int half = i / (PART / 2), within = i % (PART / 2) * W;
    vu places;
    for (int j = 0; j < W; j++) places[j] = (uint32_t)(16 * half + within + j);
    const vu top = (((vu){} + high) >> places & 1u) << 4;
    return to_float((from_bytes(codes + within) >> 4 * half & 15u) | top);
}

template <> struct Block<Q5_0> {
    static const int SIZE = 32, NBYTES = 22;
    const char *p;
    float scale;
    explicit HFQ_INLINE Block(const char *from) : p(from), scale(half_at(from)) {}
    HFQ_INLINE void take_codes(int, vf *out) const {
        HFQ_UNROLL
        for (int i = 0; i < PART; i++) out[i] = five_bits(p + 6, load32(p + 2), i) - 16.0f;
    }
    HFQ_INLINE void take(int, vf *out) const {
        take_codes(0, out);
        HFQ_UNROLL
        for (int i = 0; i < PART; i++) out[i] *= all(scale);
    }
    HFQ_INLINE float scale_of(int, int) const { return scale; }
};

template <> struct Block<Q5_1> {
    static const int SIZE = 32, NBYTES = 24;
    const char *p;
    explicit HFQ_INLINE Block(const char *from) : p(from) {}
    HFQ_INLINE void take(int, vf *out) const {
        const vf scale = all(half_at(p)), added = all(half_at(p + 2));
        HFQ_UNROLL
        for (int i = 0; i < PART; i++) out[i] = five_bits(p + 8, load32(p + 4), i) * scale + added;
    }
    HFQ_INLINE void take_codes(int, vf *out) const { take(0, out); }
    HFQ_INLINE float scale_of(int, int) const { return 1; }
};

template <> struct Block<Q8_0> {
    static const int SIZE = 32, NBYTES = 34;
    const char *p;
    float scale;
    explicit HFQ_INLINE Block(const char *from) : p(from), scale(half_at(from)) {}
    HFQ_INLINE void take_codes(int, vf *out) const {
        HFQ_UNROLL
        for (int i = 0; i < PART; i++) out[i] = from_int8(p + 2 + i * W);
    }
    HFQ_INLINE void take(int, vf *out) const {
        take_codes(0, out);
        HFQ_UNROLL
        for (int i = 0; i < PART; i++) out[i] *= all(scale);
    }
    HFQ_INLINE float scale_of(int, int) const { return scale; }
};

// The scales, then the minima, of the eight parts of Q4_K and Q5_K: six bits each, in twelve bytes.
struct PartScales {
    const char *p;
    vf held[16 / W];             // scales, then minima
    alignas(64) float both[16];  // the same in memory
    explicit HFQ_INLINE PartScales(const char *from) : p(from) {
        const uint32_t first = load32(p + 4), second = load32(p + 8), third = load32(p + 12);
        const uint32_t packed[4] = {
            first & 0x3F3F3F3Fu, (third & 0x0F0F0F0Fu) | (first >> 6 & 0x03030303u) << 4,
            second & 0x3F3F3F3Fu, (third >> 4 & 0x0F0F0F0Fu) | (second >> 6 & 0x03030303u) << 4};
        const float scale = half_at(p), step = half_at(p + 2);
        vf factors[16 / W];
        for (int i = 0; i < 16; i++) factors[i / W][i % W] = i < 8 ? scale : step;
        HFQ_UNROLL
        for (int i = 0; i < 16 / W; i++) {
            held[i] = to_float(from_bytes((const char *)packed + i * W)) * factors[i];
            store(both + i * W, held[i]);
        }
        keep_in_memory(both);
    }
    HFQ_INLINE float scale_of(int part, int) const { return both[part]; }
    HFQ_INLINE float least_of(int part) const { return both[8 + part]; }
};

template <> struct Block<Q4_K> : PartScales {
    static const int SIZE = 256, NBYTES = 144;
    explicit HFQ_INLINE Block(const char *from) : PartScales(from) {}
    HFQ_INLINE void take_codes(int part, vf *out) const {
        Sixteen(NIBBLE_CODES).take_half(p + 16 + part / 2 * 32, part % 2, out);
    }
    HFQ_INLINE void take(int part, vf *out) const {
        Sixteen(NIBBLE_CODES)
            .scale(both[part])
            .subtract(least_of(part))
            .take_half(p + 16 + part / 2 * 32, part % 2, out);
    }
};

// Returns the lower or higher halves of 32 bytes with a bit, or two bits, of each of 32 other bytes above.
template <int BITS>
static HFQ_INLINE vub with_high_bits(const char *low, int half, const char *high, int place) {
    const vuw codes = load<vuw>(low) >> 4 * half & 0x0F0F, rest = load<vuw>(high);
    const vuw above = place < 4 ? rest << (4 - place) : rest >> (place - 4);
    return (vub)(codes | (above & (uint16_t)(BITS == 1 ? 0x1010 : 0x3030)));
}

template <> struct Block<Q5_K> : PartScales {
    static const int SIZE = 256, NBYTES = 176;
    explicit HFQ_INLINE Block(const char *from) : PartScales(from) {}
    HFQ_INLINE void take_codes(int part, vf *out) const {
        const vub codes = with_high_bits<1>(p + 48 + part / 2 * 32, part % 2, p + 16, part);
        HFQ_UNROLL
        for (int i = 0; i < PART; i++) out[i] = to_float(widened<false>(codes, i));
    }
    HFQ_INLINE void take(int part, vf *out) const {
        take_codes(part, out);
        HFQ_UNROLL
        for (int i = 0; i < PART; i++) out[i] = out[i] * all(both[part]) - all(least_of(part));
    }
};

template <> struct Block<Q6_K> {
    static const int SIZE = 256, NBYTES = 210;
    const char *p;
    vf held[16 / W];               // scales of halves of parts
    alignas(64) float scales[16];  // the same in memory
    explicit HFQ_INLINE Block(const char *from) : p(from) {
        HFQ_UNROLL
        for (int i = 0; i < 16 / W; i++) {
            held[i] = from_int8(p + 192 + i * W) * all(half_at(p + 208));
            store(scales + i * W, held[i]);
        }
        keep_in_memory(scales);
    }
    HFQ_INLINE void take_codes(int part, vf *out) const {
        const int place = part % 4;
        const char *low = p + part / 4 * 64 + place % 2 * 32, *high = p + 128 + part / 4 * 32;
        const vub codes = with_high_bits<2>(low, place / 2, high, 2 * place) - 32;
        HFQ_UNROLL
        for (int i = 0; i < PART; i++) out[i] = to_float(widened<true>(codes, i));
    }
    HFQ_INLINE void take(int part, vf *out) const {
        take_codes(part, out);
        HFQ_UNROLL
        for (int i = 0; i < PART; i++) out[i] *= all(scale_of(part, i * W / 16));
    }
    HFQ_INLINE float scale_of(int part, int half) const { return scales[2 * part + half]; }
};

template <> struct Block<IQ4_XS> {
    static const int SIZE = 256, NBYTES = 136;
    const char *p;
    vf held[1];                   // scales of eight parts
    alignas(64) float scales[W];  // the same in memory
    explicit HFQ_INLINE Block(const char *from) : p(from) {
        const vu low = shift_in_turn(load32(p + 4), 4) & 15u, high = shift_in_turn(load16(p + 2), 2) & 3u;
        held[0] = (to_float(low | high << 4) - 32.0f) * all(half_at(p));
        store(scales, held[0]);
        keep_in_memory(scales);
    }
    HFQ_INLINE void take(int part, vf *out) const {
        Sixteen(IQ4_VALUES).scale(scales[part]).take_both(p + 8 + part * 16, out);
    }
    HFQ_INLINE void take_codes(int part, vf *out) const {
        Sixteen(IQ4_VALUES).take_both(p + 8 + part * 16, out);
    }
    HFQ_INLINE float scale_of(int part, int) const { return scales[part]; }
};

// Returns the codes of an output row, which the file may store in another order.
static HFQ_INLINE const char *row_of_blocks(const Layer &layer, int64_t n) {
    if (layer.order_inner && n >= layer.order_start) {
        const int64_t place = n - layer.order_start, inner = place % layer.order_inner,
                      rest = place / layer.order_inner, first = rest % layer.order_first,
                      second = rest / layer.order_first % layer.order_second,
                      outer = rest / layer.order_first / layer.order_second;
        const int64_t stored = (outer * layer.order_first + first) * layer.order_second + second;
        n = layer.order_start + stored * layer.order_inner + inner;
    }
    return layer.codes + n * layer.row_nbytes;
}

// Dequantizes weights [k, k + count) of an output row; both are whole blocks.
template <int TYPE>
static void decode_blocks(const Layer &layer, int64_t n, int64_t k, int64_t count, float *out) {
    typedef Block<TYPE> Of;
    const char *p = row_of_blocks(layer, n) + k / Of::SIZE * Of::NBYTES;
    for (int64_t i = 0; i < count; i += Of::SIZE, p += Of::NBYTES, out += Of::SIZE) {
        const Of block(p);
        HFQ_UNROLL
        for (int part = 0; part < Of::SIZE / 32; part++) {
            vf weights[PART];
            block.take(part, weights);
            HFQ_UNROLL
            for (int v = 0; v < PART; v++) store(out + part * 32 + v * W, weights[v]);
        }
    }
}

// True if weights of a type are codes times a scale, minus a minimum.
template <int TYPE> constexpr bool has_least() { return TYPE == Q4_K || TYPE == Q5_K; }

// Multiplies a block by a row of activations: codes first, then the sums by their scales. `sums` has the
// negative sums of the activations of each part, after as many zeros. Parts take turns, so that they do not
// wait for each other.
template <int TYPE>
static HFQ_INLINE void dot_block(const char *p, const float *x, const float *sums, int turn, vf *total) {
    const Block<TYPE> block(p);
    const int halves = TYPE == Q6_K ? 2 : 1, each = PART / halves;  // vectors of codes that share a scale
    HFQ_UNROLL
    for (int part = 0; part < Block<TYPE>::SIZE / 32; part++) {
        vf codes[PART];
        block.take_codes(part, codes);
        HFQ_UNROLL
        for (int half = 0; half < halves; half++) {
            const float *from = x + part * 32 + half * 16;
            vf piece = codes[half * each] * load<vf>(from);
            HFQ_UNROLL
            for (int v = 1; v < each; v++) piece = fma(codes[half * each + v], load<vf>(from + v * W), piece);
            vf &to = total[(turn + part * halves + half) % 4];
            to = fma(piece, all(block.scale_of(part, half)), to);
        }
    }
    if constexpr (has_least<TYPE>()) {
        HFQ_UNROLL
        for (int i = W == 8 ? 8 : 0; i < 16; i += W)
            total[4] = fma(block.held[i / W], load<vf>(sums + i), total[4]);
    }
}

// Multiplies one output row by one activation row, without storing decoded weights.
template <int TYPE>
static float dot_blocks(const Layer &layer, int64_t n, const float *x, const float *sums) {
    typedef Block<TYPE> Of;
    const char *p = row_of_blocks(layer, n);
    const int64_t blocks = layer.in_features / Of::SIZE, together = Of::SIZE == 32 ? 4 : 1;
    vf total[5] = {};
    int64_t i = 0;
    for (; i + together <= blocks; i += together) {
        for (int64_t line = 0; line < together * Of::NBYTES; line += 64)
            __builtin_prefetch(p + AHEAD + line);
        HFQ_UNROLL
        for (int turn = 0; turn < together; turn++) {
            dot_block<TYPE>(p, x, sums, turn, total);
            p += Of::NBYTES, x += Of::SIZE, sums += 16;
        }
    }
    for (; i < blocks; i++, p += Of::NBYTES, x += Of::SIZE) dot_block<TYPE>(p, x, sums, 0, total);
    return sum_of(((total[0] + total[1]) + (total[2] + total[3])) + total[4]);
}

// Multiplies blocks of an output row by ROWS rows of activations, and adds to two vectors of each row.
template <int TYPE, int ROWS>
static HFQ_INLINE void add_blocks(const char *p, int64_t blocks, const float *const *x, int64_t k, vf *sums) {
    typedef Block<TYPE> Of;
    vf total[ROWS][2];
    HFQ_UNROLL
    for (int m = 0; m < ROWS; m++)
        total[m][0] = load<vf>(sums + 2 * m), total[m][1] = load<vf>(sums + 2 * m + 1);
    for (int64_t i = 0; i < blocks; i++, p += Of::NBYTES) {
        const Of block(p);
        HFQ_UNROLL
        for (int part = 0; part < Of::SIZE / 32; part++, k += 32) {
            vf weights[PART];
            block.take(part, weights);
            HFQ_UNROLL
            for (int v = 0; v < PART; v++)
                HFQ_UNROLL
                for (int m = 0; m < ROWS; m++)
                    total[m][v % 2] = fma(weights[v], load<vf>(x[m] + k + v * W), total[m][v % 2]);
        }
    }
    HFQ_UNROLL
    for (int m = 0; m < ROWS; m++) store(sums + 2 * m, total[m][0]), store(sums + 2 * m + 1, total[m][1]);
}

const int MOST_TOGETHER = W == 16 ? 8 : 4;  // activation rows that share the decoding of a block
const int64_t BLOCK_STEP = 512;             // channels of them that stay in the first-level cache

// Multiplies outputs [n, n + count) by `rows` rows of activations from `row` on, at most ROWS.
template <int TYPE, int ROWS>
static void few_rows(const MatmulArgs &args, int64_t row, int64_t rows, int64_t n, int64_t count,
                     float *scratch) {
    typedef Block<TYPE> Of;
    const Layer &layer = *args.layer;
    const float *x[ROWS];
    for (int64_t m = 0; m < ROWS; m++) x[m] = args.x32 + (row + least(m, rows - 1)) * args.stride;
    vf sums[TILE_ROWS][2 * ROWS] = {};
    for (int64_t k = 0; k < layer.in_features; k += BLOCK_STEP) {
        const int64_t blocks = least(BLOCK_STEP, layer.in_features - k) / Of::SIZE;
        for (int64_t r = 0; r < count; r++) {
            const char *p = row_of_blocks(layer, n + r) + k / Of::SIZE * Of::NBYTES;
            for (int64_t line = 0; line < BLOCK_STEP / Of::SIZE * Of::NBYTES; line += 64)
                __builtin_prefetch(p + BLOCK_STEP / Of::SIZE * Of::NBYTES + line);
            add_blocks<TYPE, ROWS>(p, blocks, x, k, sums[r]);
        }
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t m = 0; m < rows; m++)
            put(args, row + m, n + r, sum_of(sums[r][2 * m] + sums[r][2 * m + 1]));
}

template <int TYPE>
static void blocks_of(const MatmulArgs &args, int64_t n, int64_t count, float *scratch) {
    if (args.rows == 1) {
        for (int64_t r = n; r < n + count; r++)
            put(args, 0, r, dot_blocks<TYPE>(*args.layer, r, args.x32, args.part_sums));
        return;
    }
    for (int64_t row = 0, rows; row < args.rows; row += rows) {
        const int64_t left = args.rows - row;
        rows = least(left, left >= MOST_TOGETHER - 1 ? MOST_TOGETHER : left >= 3 ? 4 : 2);
        (rows > 4   ? few_rows<TYPE, MOST_TOGETHER>
         : rows > 2 ? few_rows<TYPE, 4>
                    : few_rows<TYPE, 2>)(args, row, rows, n, count, scratch);
    }
}

// Writes the negative sums of the activations of each part of 32 channels: per 256 channels, eight zeros and
// eight sums.
static void sum_parts(const float *x, int64_t size, float *out) {
    for (int64_t k = 0; k < size; k += 256, out += 16) {
        __builtin_memset(out, 0, 64);
        for (int64_t part = 0; part < 8 && k + part * 32 < size; part++) {
            vf sum = all(0.0f);
            for (int64_t i = 0; i < 32; i += W) sum += load<vf>(x + k + part * 32 + i);
            out[8 + part] = -sum_of(sum);
        }
    }
}

struct BlockReader {
    void (*decode)(const Layer &layer, int64_t n, int64_t k, int64_t count, float *out);
    void (*multiply)(const MatmulArgs &args, int64_t n, int64_t count, float *scratch);
};

static BlockReader block_reader(const Layer &layer) {
    switch (layer.block_type) {
        case Q4_0: return {decode_blocks<Q4_0>, blocks_of<Q4_0>};
        case Q4_1: return {decode_blocks<Q4_1>, blocks_of<Q4_1>};
        case Q5_0: return {decode_blocks<Q5_0>, blocks_of<Q5_0>};
        case Q5_1: return {decode_blocks<Q5_1>, blocks_of<Q5_1>};
        case Q4_K: return {decode_blocks<Q4_K>, blocks_of<Q4_K>};
        case Q5_K: return {decode_blocks<Q5_K>, blocks_of<Q5_K>};
        case Q6_K: return {decode_blocks<Q6_K>, blocks_of<Q6_K>};
        case IQ4_NL: return {decode_blocks<IQ4_NL>, blocks_of<IQ4_NL>};
        case IQ4_XS: return {decode_blocks<IQ4_XS>, blocks_of<IQ4_XS>};
        case MXFP4: return {decode_blocks<MXFP4>, blocks_of<MXFP4>};
        default: return {decode_blocks<Q8_0>, blocks_of<Q8_0>};
    }
}
