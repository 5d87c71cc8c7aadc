// Decoding of columns: GPTQ's bit-packed words and AWQ's words. Included by instruction_set.h in the
// namespace of each instruction set.
//
// 32 codes of a column occupy BITS words, one per row of words. W neighboring columns are decoded together.

// Position of a code among 32 codes.
template <int BITS, int CODE> struct Place {
    static const int word = CODE * BITS / 32;                      // word index
    static const int shift = CODE * BITS % 32;                     // bits above the lowest bit of the word
    static const bool straddles = shift + BITS > 32;               // true: it continues in the next word
    static const bool is_high = shift + BITS > 31;                 // true: it has the highest bit of the word
    // log2 of the factor of a value that is not shifted down
    static const int exponent = straddles || is_high ? 0 : shift;
};
template <int BITS, int CODE, bool SHIFTED>
static HFQ_INLINE vf code_at(const char *words, int64_t pitch) {
    typedef Place<BITS, CODE> P;
    const uint32_t mask = (1u << BITS) - 1;
    vu word = load<vu>(words + P::word * pitch);
    if (P::straddles)
        return to_float(
            (word >> P::shift | load<vu>(words + (P::word + 1) * pitch) << ((32 - P::shift) % 32)) & mask);
    if (P::is_high) return to_float(word >> P::shift);
    if (SHIFTED) return to_float(word >> P::shift & mask);
    return to_float(word & (mask << P::shift));
}

// The least number of codes that fill whole words: those of one word, or all 32 if some straddle words.
template <int BITS> constexpr int unit() { return 32 % BITS == 0 ? 32 / BITS : 32; }

// Decodes codes of W columns to floats [codes][W].
template <int BITS, int CODE>
static HFQ_INLINE void spread_codes(const char *words, int64_t pitch, float *out) {
    if constexpr (CODE < unit<BITS>()) {
        store(out + CODE * W, code_at<BITS, CODE, true>(words, pitch));
        spread_codes<BITS, CODE + 1>(words, pitch, out);
    }
}
template <int BITS> static void decode_words(const char *words, int64_t pitch, int64_t codes, float *out) {
    for (int64_t c = 0; c < codes; c += unit<BITS>())
        spread_codes<BITS, 0>(words + c * BITS / 32 * pitch, pitch, out + c * W);
}
// Decodes AWQ, with one word, or two, per row of codes.
static void decode_awq(const char *words, int64_t pitch, int64_t codes, float *out) {
    vu shifts;
    for (int j = 0; j < W; j++) shifts[j] = (uint32_t)(4 * awq_place(j % 8));
    for (int64_t c = 0; c < codes; c++) {
        vu word = (vu){} + load32(words + c * pitch);
#if HFQ_ISA == 2
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
    return bits == 2   ? decode_words<2>
           : bits == 3 ? decode_words<3>
           : bits == 4 ? decode_words<4>
                       : decode_words<8>;
}

// Reads the scales of `count` columns of a group, padded with zeros to `wide` columns.
static void group_scales(const Layer &layer, int64_t group, int64_t n, int64_t count, float *out,
                         int64_t wide) {
    int64_t place = group * layer.out_features + n, i = 0;
    for (; i + W <= count && layer.scale_dtype <= F16; i += W)
        if (layer.scale_dtype == F32) store(out + i, load<vf>(layer.scales + 4 * (place + i)));
        else if (layer.scale_dtype == F16)
            store(out + i, from_half(load<vuh>(layer.scales + 2 * (place + i))));
        else store(out + i, __builtin_convertvector(load<vuh>(layer.scales + 2 * (place + i)), vu) << 16);
    for (; i < count; i++) out[i] = scale_at(layer, place + i);
    for (; i < wide; i++) out[i] = 0;
}

// Unpacking of the zero points of W columns. The first column must begin with a byte.
struct Zeros {
    const int bits;  // bits per zero point
    vu added;        // offset added to whole words
    vu shifts;       // shift of each element's word in bits
    vu mask;         // mask of a zero point
    vu more;         // offset added to a zero point
    vu kept;         // mask of a zero point after the offset
    HFQ_INLINE Zeros(const Layer &layer) : bits(layer.bits) {
        const uint32_t most_value = (1u << bits) - 1;
        vu places, of_awq;  // compile-time constants
        for (int j = 0; j < W; j++) places[j] = j % 8, of_awq[j] = (uint32_t)(4 * awq_place(j % 8));
        shifts = layer.kind == AWQ ? of_awq : bits == 8 ? (vu){} : places * (uint32_t)bits;
        added = (vu){} + (layer.zero_reading == WORD_PLUS_ONE ? word_ones(4) : 0);
        more = (vu){} +
               (layer.zero_reading == FIELD_PLUS_ONE || layer.zero_reading == MASKED_PLUS_ONE ? 1u : 0u);
        mask = (vu){} + most_value,
        kept = (vu){} + (layer.zero_reading == MASKED_PLUS_ONE ? most_value : ~0u);
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
    // Returns the number of columns from n on that `take` supports.
    static HFQ_INLINE int64_t whole(const Layer &layer, int64_t n, int64_t count) {
        // WORD_PLUS_ONE adds to 32 bits; for other than 4 bits, `take` reads fewer
        return n % 8 == 0 && (layer.zero_reading != WORD_PLUS_ONE || layer.bits == 4) ? count / W * W : 0;
    }
};

static void group_zeros(const Layer &layer, int64_t group, int64_t n, int64_t count, float *out,
                        int64_t wide) {
    const char *row = layer.zeros + 4 * group * layer.zero_words + n * layer.bits / 8;
    const int64_t whole = Zeros::whole(layer, n, count);
    const Zeros zeros(layer);
    int64_t i = 0;
    for (; i < whole; i += W) store(out + i, to_float(zeros.take(row + i * zeros.bits / 8)));
    for (; i < count; i++) out[i] = zero_at(layer, group, n + i);
    for (; i < wide; i++) out[i] = 0;
}

// Unpacks zero points of a group's columns as integers; of 4 bits, eight vectors together.
static void integer_zeros(const Layer &layer, int64_t group, int64_t n, int64_t count, int32_t *out,
                          int64_t wide) {
    const char *row = layer.zeros + 4 * group * layer.zero_words + n * layer.bits / 8;
    const int64_t whole = Zeros::whole(layer, n, count);
    const Zeros zeros(layer);
    int64_t i = 0;
    vi places;
    for (int j = 0; j < W; j++) places[j] = j / 8;
    for (; W == 16 && zeros.bits == 4 && i + 8 * W <= whole; i += 8 * W) {
        const vf table = load<vf>(row + i / 2);
        HFQ_UNROLL
        for (int v = 0; v < 8; v++)
            store(out + i + v * W, zeros.fields((vu)pick_floats(table, places + 2 * v)));
    }
    for (; i < whole; i += W) store(out + i, zeros.take(row + i * zeros.bits / 8));
    for (; i < count; i++) out[i] = (int32_t)zero_at(layer, group, n + i);
    for (; i < wide; i++) out[i] = 0;
}

// The words of up to CHUNK codes [k, k + codes) of neighboring columns. If the last column or the end of a
// group cuts them off, they are copied and padded with zeros.
struct Words {
    const char *at;            // address of the first word
    int64_t pitch;             // bytes from one row of words to the next
    char copy[CHUNK * 4 * W];  // copied words
    HFQ_INLINE void take(const Layer &layer, int64_t k, int64_t codes, int64_t n, int64_t columns,
                         int64_t most_columns, int64_t most_codes) {
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
        for (int64_t r = 0; r < rows; r++)
            __builtin_memcpy(copy + wide * r, at + pitch * r, least(nbytes, wide));
        at = copy, pitch = wide;
    }
};

// Unpacks CHUNK codes of W columns, or four codes of 8 * W columns of AWQ. An element has four codes of one
// column.
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
    } else if constexpr (BITS == 3) {  // eight codes are 24 bits; first collects the first, second, and third
                                       // bytes of the four runs of 24 bits
        vu w0 = load<vu>(words), w1 = load<vu>(words + pitch), w2 = load<vu>(words + 2 * pitch),
           low = (vu){} + 0xFFu;
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
            out[v] =
                (vb)(BITS == 8 ? word : word >> BITS * (v % parts) & (BITS == 4 ? 0x0F0F0F0Fu : 0x03030303u));
        }
    }
}

static HFQ_INLINE vsb spread(const char *limbs) { return (vsb)((vu){} + load32(limbs)); }
