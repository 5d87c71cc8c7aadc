// Rows of ggml's blocks: codes of 32 or 256 channels with their scales. Included by instruction_set.h in the
// namespace of each instruction set.
//
// A block is read where it lies. `Block<TYPE>` holds its scales, and `take` returns the weights of 32 of its
// channels, bit-identical to the reference kernel's.

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

// The values of 4-bit codes times a scale, plus `added` if ADDS.
struct Sixteen {
    vf of[16 / W];
    template <bool ADDS> HFQ_INLINE void fill(const float *values, float scale, float added) {
        HFQ_UNROLL
        for (int i = 0; i < 16 / W; i++) {
            of[i] = load<vf>(values + i * W) * all(scale);
            if (ADDS) of[i] += all(added);
        }
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

template <> struct Block<Q4_0> {
    static const int SIZE = 32, NBYTES = 18;
    const char *p;
    Sixteen values;
    explicit HFQ_INLINE Block(const char *from) : p(from) {
        values.fill<false>(NIBBLES_MINUS_8, half_at(p), 0);
    }
    HFQ_INLINE void take(int, vf *out) const { values.take_both(p + 2, out); }
};

template <> struct Block<Q4_1> {
    static const int SIZE = 32, NBYTES = 20;
    const char *p;
    Sixteen values;
    explicit HFQ_INLINE Block(const char *from) : p(from) {
        values.fill<true>(NIBBLE_CODES, half_at(p), half_at(p + 2));
    }
    HFQ_INLINE void take(int, vf *out) const { values.take_both(p + 4, out); }
};

template <> struct Block<IQ4_NL> {
    static const int SIZE = 32, NBYTES = 18;
    const char *p;
    Sixteen values;
    explicit HFQ_INLINE Block(const char *from) : p(from) { values.fill<false>(IQ4_VALUES, half_at(p), 0); }
    HFQ_INLINE void take(int, vf *out) const { values.take_both(p + 2, out); }
};

template <> struct Block<MXFP4> {
    static const int SIZE = 32, NBYTES = 17;
    const char *p;
    Sixteen values;
    explicit HFQ_INLINE Block(const char *from) : p(from) {
        const uint32_t e = (uint8_t)*p;
        // half of 2**(e - 127), since the table has twice the values
        const float half = as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        values.fill<false>(TWICE_E2M1, half, 0);
    }
    HFQ_INLINE void take(int, vf *out) const { values.take_both(p + 1, out); }
};

// Returns the codes of 5 bits of W channels, two halves of 16 bytes, with their highest bits in a word.
static HFQ_INLINE vu five_bits(const char *codes, uint32_t high, int i) {
    const int half = i / (PART / 2), within = i % (PART / 2) * W;
    vu places;
    for (int j = 0; j < W; j++) places[j] = (uint32_t)(16 * half + within + j);
    const vu top = (((vu){} + high) >> places & 1u) << 4;
    return (from_bytes(codes + within) >> 4 * half & 15u) | top;
}

template <> struct Block<Q5_0> {
    static const int SIZE = 32, NBYTES = 22;
    const char *p;
    vf scale;
    explicit HFQ_INLINE Block(const char *from) : p(from), scale(all(half_at(from))) {}
    HFQ_INLINE void take(int, vf *out) const {
        HFQ_UNROLL
        for (int i = 0; i < PART; i++)
            out[i] = (to_float(five_bits(p + 6, load32(p + 2), i)) - 16.0f) * scale;
    }
};

template <> struct Block<Q5_1> {
    static const int SIZE = 32, NBYTES = 24;
    const char *p;
    vf scale, added;
    explicit HFQ_INLINE Block(const char *from)
        : p(from), scale(all(half_at(from))), added(all(half_at(from + 2))) {}
    HFQ_INLINE void take(int, vf *out) const {
        HFQ_UNROLL
        for (int i = 0; i < PART; i++)
            out[i] = to_float(five_bits(p + 8, load32(p + 4), i)) * scale + added;
    }
};

template <> struct Block<Q8_0> {
    static const int SIZE = 32, NBYTES = 34;
    const char *p;
    vf scale;
    explicit HFQ_INLINE Block(const char *from) : p(from), scale(all(half_at(from))) {}
    HFQ_INLINE void take(int, vf *out) const {
        HFQ_UNROLL
        for (int i = 0; i < PART; i++) out[i] = from_int8(p + 2 + i * W) * scale;
    }
};

// The scales and minima of the eight parts of Q4_K and Q5_K: six bits each, in twelve bytes.
struct PartScales {
    float scales[8], least[8];
    explicit HFQ_INLINE PartScales(const char *p) {
        const uint32_t first = load32(p + 4), second = load32(p + 8), third = load32(p + 12);
        const uint32_t packed[4] = {
            first & 0x3F3F3F3Fu, (third & 0x0F0F0F0Fu) | (first >> 6 & 0x03030303u) << 4,
            second & 0x3F3F3F3Fu, (third >> 4 & 0x0F0F0F0Fu) | (second >> 6 & 0x03030303u) << 4};
        const float scale = half_at(p), step = half_at(p + 2);
        vf factors[16 / W];
        for (int i = 0; i < 16; i++) factors[i / W][i % W] = i < 8 ? scale : step;
        float both[16];
        HFQ_UNROLL
        for (int i = 0; i < 16 / W; i++)
            store(both + i * W, to_float(from_bytes((const char *)packed + i * W)) * factors[i]);
        __builtin_memcpy(scales, both, 32), __builtin_memcpy(least, both + 8, 32);
    }
};

template <> struct Block<Q4_K> {
    static const int SIZE = 256, NBYTES = 144;
    const char *p;
    PartScales of;
    explicit HFQ_INLINE Block(const char *from) : p(from), of(from) {}
    HFQ_INLINE void take(int part, vf *out) const {
        Sixteen values;
        values.fill<true>(NIBBLE_CODES, of.scales[part], -of.least[part]);
        values.take_half(p + 16 + part / 2 * 32, part % 2, out);
    }
};

template <> struct Block<Q5_K> {
    static const int SIZE = 256, NBYTES = 176;
    const char *p;
    PartScales of;
    explicit HFQ_INLINE Block(const char *from) : p(from), of(from) {}
    HFQ_INLINE void take(int part, vf *out) const {
        HFQ_UNROLL
        for (int i = 0; i < PART; i++) {
            const vu low = from_bytes(p + 48 + part / 2 * 32 + i * W) >> part % 2 * 4 & 15u;
            const vu codes = low | (from_bytes(p + 16 + i * W) >> part & 1u) << 4;
            out[i] = to_float(codes) * all(of.scales[part]) - all(of.least[part]);
        }
    }
};

template <> struct Block<Q6_K> {
    static const int SIZE = 256, NBYTES = 210;
    const char *p;
    float scales[16];
    explicit HFQ_INLINE Block(const char *from) : p(from) {
        HFQ_UNROLL
        for (int i = 0; i < 16; i += W) store(scales + i, from_int8(p + 192 + i) * all(half_at(p + 208)));
    }
    HFQ_INLINE void take(int part, vf *out) const {
        const int place = part % 4;
        const char *low = p + part / 4 * 64 + place % 2 * 32, *high = p + 128 + part / 4 * 32;
        HFQ_UNROLL
        for (int i = 0; i < PART; i++) {
            const vu codes = (from_bytes(low + i * W) >> place / 2 * 4 & 15u) |
                             (from_bytes(high + i * W) >> 2 * place & 3u) << 4;
            out[i] = (to_float(codes) - 32.0f) * all(scales[2 * part + i * W / 16]);
        }
    }
};

template <> struct Block<IQ4_XS> {
    static const int SIZE = 256, NBYTES = 136;
    const char *p;
    float scales[W];
    explicit HFQ_INLINE Block(const char *from) : p(from) {
        const vu low = shift_in_turn(load32(p + 4), 4) & 15u, high = shift_in_turn(load16(p + 2), 2) & 3u;
        store(scales, (to_float(low | high << 4) - 32.0f) * all(half_at(p)));
    }
    HFQ_INLINE void take(int part, vf *out) const {
        Sixteen values;
        values.fill<false>(IQ4_VALUES, scales[part], 0);
        values.take_both(p + 8 + part * 16, out);
    }
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

// Multiplies a block by activations. Sums take turns, so that they do not wait for each other.
template <int TYPE> static HFQ_INLINE void dot_block(const char *p, const float *x, int turn, vf *sum) {
    const Block<TYPE> block(p);
    HFQ_UNROLL
    for (int part = 0; part < Block<TYPE>::SIZE / 32; part++) {
        vf weights[PART];
        block.take(part, weights);
        HFQ_UNROLL
        for (int v = 0; v < PART; v++) {
            vf &to = sum[((turn + part) * PART + v) % 4];
            to = fma(weights[v], load<vf>(x + part * 32 + v * W), to);
        }
    }
}

// Multiplies one output row by one activation row, without storing decoded weights.
template <int TYPE> static float dot_blocks(const Layer &layer, int64_t n, const float *x) {
    typedef Block<TYPE> Of;
    const char *p = row_of_blocks(layer, n);
    const int64_t blocks = layer.in_features / Of::SIZE, together = Of::SIZE == 32 ? 2 : 1;
    vf sum[4] = {};
    int64_t i = 0;
    for (; i + together <= blocks; i += together) {
        HFQ_UNROLL
        for (int turn = 0; turn < together; turn++) {
            for (int64_t line = 0; line < Of::NBYTES; line += 64) __builtin_prefetch(p + AHEAD + line);
            dot_block<TYPE>(p, x, turn, sum);
            p += Of::NBYTES, x += Of::SIZE;
        }
    }
    if (i < blocks) dot_block<TYPE>(p, x, 0, sum);
    return sum_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

struct BlockReader {
    void (*decode)(const Layer &layer, int64_t n, int64_t k, int64_t count, float *out);
    float (*dot)(const Layer &layer, int64_t n, const float *x);
};

static BlockReader block_reader(const Layer &layer) {
    switch (layer.block_type) {
        case Q4_0: return {decode_blocks<Q4_0>, dot_blocks<Q4_0>};
        case Q4_1: return {decode_blocks<Q4_1>, dot_blocks<Q4_1>};
        case Q5_0: return {decode_blocks<Q5_0>, dot_blocks<Q5_0>};
        case Q5_1: return {decode_blocks<Q5_1>, dot_blocks<Q5_1>};
        case Q4_K: return {decode_blocks<Q4_K>, dot_blocks<Q4_K>};
        case Q5_K: return {decode_blocks<Q5_K>, dot_blocks<Q5_K>};
        case Q6_K: return {decode_blocks<Q6_K>, dot_blocks<Q6_K>};
        case IQ4_NL: return {decode_blocks<IQ4_NL>, dot_blocks<IQ4_NL>};
        case IQ4_XS: return {decode_blocks<IQ4_XS>, dot_blocks<IQ4_XS>};
        case MXFP4: return {decode_blocks<MXFP4>, dot_blocks<MXFP4>};
        default: return {decode_blocks<Q8_0>, dot_blocks<Q8_0>};
    }
}
