// Sums of columns: products of a part's codes and the limbs of activations. Included by vnni_column_major.h,
// in its namespace.

// A span of channels of some activation rows.
struct Span {
    const char *limbs;      // limbs of the first row, LIMBS bytes per activation
    const int32_t *totals;  // sums of the first row's highest limbs, and of its other limbs
    const float *units;     // value of 1 in the first row's limbs
    int64_t limbs_apart;    // bytes from one row of `limbs` to the next
    int64_t totals_apart;   // sums from one row of `totals` to the next
    int64_t units_apart;    // floats from one row of `units` to the next
    int64_t chunks;         // number of chunks of CHUNK channels
    uint32_t whole;         // bit per chunk: 1 if its lowest limbs are multiplied with the others
    uint32_t lowest;        // bit per four channels of other chunks: 1 if they have lowest limbs (not AWQ)
    HFQ_INLINE Span from(int64_t row) const {
        return {limbs + row * limbs_apart, totals + row * totals_apart, units + row * units_apart,
                limbs_apart, totals_apart, units_apart, chunks, whole, lowest};
    }
    Span part(int64_t first, int64_t count) const {  // a range of its chunks
        const uint32_t marks = (uint32_t)(lowest >> 8 * first & ((1ull << 8 * count) - 1));
        return {limbs + first * LIMBS * CHUNK,
                totals,
                units,
                limbs_apart,
                totals_apart,
                units_apart,
                count,
                whole >> first,
                marks};
    }
};

// Results of some columns of a part, and their sums between parts of a span.
struct Columns {
    float *y;       // results of each row, float32
    int32_t *high;  // sums of the highest limbs of each row
    int32_t *low;   // sums of the other limbs of each row
    int64_t wide;   // columns from one row to the next, of all three
    bool begins;    // true: a span begins here; false: it continues
    bool ends;      // true: the span ends here
    HFQ_INLINE Columns from(int64_t row) const {
        return {y + row * wide, high + row * wide, low + row * wide, wide, begins, ends};
    }
};

// Unpacked scales and zero points of some vectors of columns.
struct Unpacked {
    const float *scales;   // scale of each column
    const int32_t *zeros;  // zero point of each column
    HFQ_INLINE vu zero(int v) const { return load<vu>(zeros + v * W); }
    HFQ_INLINE vf scale(int v) const { return load<vf>(scales + v * W); }
};

// Access to zero points and scales of columns of 2, 4, or 8 bits, from column n or any number of words later.
template <int BITS> struct Reading {
    vi places;        // word of each element's zero point, from the first
    vu shifts;        // shift of each element's word in bits
    vu added;         // offset added to whole words
    vu more;          // offset added to a zero point
    vu kept;          // mask of a zero point after the offset
    int scale_dtype;  // Dtype of the scales
    HFQ_INLINE Reading(const Layer &layer, int64_t n) : scale_dtype(layer.scale_dtype) {
        const uint32_t from = (uint32_t)(n & (32 / BITS - 1)), most_value = (1u << BITS) - 1;
        vu columns;
        for (int j = 0; j < W; j++) columns[j] = (uint32_t)j;
        columns = (columns + from) * BITS;
        places = (vi)(columns >> 5), shifts = columns & 31u;
        added = (vu){} + (layer.zero_reading == WORD_PLUS_ONE ? word_ones(BITS) : 0);
        more = (vu){} +
               (layer.zero_reading == FIELD_PLUS_ONE || layer.zero_reading == MASKED_PLUS_ONE ? 1u : 0u);
        kept = (vu){} + (layer.zero_reading == MASKED_PLUS_ONE ? most_value : ~0u);
    }
};

// Packed scales and zero points of some vectors of columns. All bytes of a vector of zero points are read,
// also those of other columns.
template <int BITS> struct Packed {
    const Reading<BITS> &how;  // access to them
    const char *scales;        // address of the first column's scale
    const char *zeros;         // address of the word with the first column's zero point
    HFQ_INLINE vu zero(int v) const {
        const vu words = (vu)pick_floats(load<vf>(zeros), how.places + v * (W * BITS / 32));
        return (((words + how.added) >> how.shifts & ((1u << BITS) - 1)) + how.more) & how.kept;
    }
    HFQ_INLINE vf scale(int v) const {
        if (how.scale_dtype == F32) return load<vf>(scales + 4 * W * v);
        const vuh halves = load<vuh>(scales + 2 * W * v);
        return how.scale_dtype == F16 ? from_half(halves) : (vf)(__builtin_convertvector(halves, vu) << 16);
    }
};

// Marks the lowest limbs of a span. bfloat16 activations have them if they are below 2**-7 of a span's
// largest: few of a row, but in many of its chunks.
template <int BITS> static void find_lowest(Span &span, int64_t rows) {
    static_assert(CHUNK / FOUR == 8 && SPAN / FOUR <= 32,
                  "a byte of marks for a chunk, and a word for a span");
    const int most_alone = BITS == 3 ? 0 : MOST_ALONE;  // 3 bits: codes are unpacked by whole chunks
    span.whole = span.lowest = 0;
    for (int64_t c = 0; c < span.chunks; c++) {
        const char *limbs = span.limbs + (c * LIMBS + LIMBS - 1) * CHUNK;
        uint32_t marks = 0;
        for (int64_t m = 0; m < rows; m++)
            for (int i = 0; i < 8; i++)
                marks |= (uint32_t)(load32(limbs + m * span.limbs_apart + FOUR * i) != 0) << i;
        if (__builtin_popcount(marks) > most_alone) span.whole |= 1u << c;
        else span.lowest |= marks << 8 * c;
    }
}

// True if scales and zero points are read where they are used, and not unpacked before.
template <int BITS> constexpr bool is_packed() { return BITS != 0 && BITS != 3; }

// Chunks of a span that are read together.
template <int BITS> constexpr int64_t most_chunks() {
    return is_packed<BITS>() ? least(DEPTH / BITS, SPAN / CHUNK) : SPAN / CHUNK;
}
template <int BITS> constexpr bool is_parted() { return most_chunks<BITS>() < SPAN / CHUNK; }

// Vectors of columns that are multiplied together: for AWQ, those of one vector of words; for 2 and 4 bits,
// twice as many for one row.
template <int BITS> constexpr int vectors(int64_t rows) {
    return BITS == 0 ? 8 : rows == 1 && (BITS == 2 || BITS == 4) ? 4 : 2;
}
template <int BITS> constexpr int64_t word_rows() { return BITS == 0 ? CHUNK : BITS; }  // per chunk

// Sums of the products of the highest, middle, and lowest limbs of ROWS activation rows and VECTORS vectors
// of columns.
template <int ROWS, int VECTORS> struct Sums {
    vi of[LIMBS][ROWS][VECTORS];  // int32 per column
    // Starts the sums with the contribution of zero points.
    template <class POINTS> HFQ_INLINE void begin(const Span &span, const POINTS &points) {
        HFQ_UNROLL
        for (int v = 0; v < VECTORS; v++) {
            const vu zero = points.zero(v);
            HFQ_UNROLL
            for (int m = 0; m < ROWS; m++) {
                const int32_t *totals = span.totals + m * span.totals_apart;
                of[0][m][v] = (vi)(zero * (0u - (uint32_t)totals[0])), of[1][m][v] = (vi){},
                of[2][m][v] = (vi)(zero * (0u - (uint32_t)totals[1]));
            }
        }
    }
    // Multiplies codes of the same four channels of each column by their limbs from FIRST up to LAST.
    template <int FIRST, int LAST> HFQ_INLINE void add(const vb *codes, const char *limbs, int64_t apart) {
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++)
            HFQ_UNROLL
            for (int d = FIRST; d < LAST; d++) {
                const vsb x = spread(limbs + m * apart + d * CHUNK);
                HFQ_UNROLL
                for (int v = 0; v < VECTORS; v++) of[d][m][v] = dot_four(of[d][m][v], codes[v], x);
            }
    }
    HFQ_INLINE void go_on(const Columns &to) {
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++)
            HFQ_UNROLL
            for (int v = 0; v < VECTORS; v++) {
                const int64_t place = m * to.wide + v * W;
                of[0][m][v] = load<vi>(to.high + place), of[1][m][v] = (vi){},
                of[2][m][v] = load<vi>(to.low + place);
            }
    }
    HFQ_INLINE void leave(const Columns &to) const {
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++)
            HFQ_UNROLL
            for (int v = 0; v < VECTORS; v++)
                store(to.high + m * to.wide + v * W, of[0][m][v]),
                    store(to.low + m * to.wide + v * W, low(m, v));
    }
    HFQ_INLINE vi low(int m, int v) const { return of[2][m][v] + (vi)((vu)of[1][m][v] << 8); }
    template <class POINTS>
    HFQ_INLINE void end(const Span &span, const Columns &to, const POINTS &points) const {
        HFQ_UNROLL
        for (int v = 0; v < VECTORS; v++) {
            const vf scale = points.scale(v);
            HFQ_UNROLL
            for (int m = 0; m < ROWS; m++) {
                float *y = to.y + m * to.wide + v * W;
                store(y, fma(scale, of_limbs(of[0][m][v], low(m, v)) * all(span.units[m * span.units_apart]),
                             load<vf>(y)));
            }
        }
    }
};

template <int BITS> constexpr uint32_t mask() {
    return BITS == 2 ? 0x03030303u : BITS == 4 ? 0x0F0F0F0Fu : ~0u;
}

// Multiplies a chunk of codes, read from their words. Prefetches are placed between the products, since a
// burst of them would stall.
template <int BITS, int ROWS, int VECTORS, int COUNT>
static HFQ_INLINE void add_chunk(const char *words, int64_t pitch, const char *limbs, int64_t apart,
                                 Sums<ROWS, VECTORS> &sums) {
    vb codes[VECTORS];
    if constexpr (BITS == 3) {
        vb all_codes[VECTORS][8];
        HFQ_UNROLL
        for (int v = 0; v < VECTORS; v++) unpack<3>(words + 4 * W * v, pitch, all_codes[v]);
        HFQ_UNROLL
        for (int i = 0; i < 8; i++) {
            HFQ_UNROLL
            for (int v = 0; v < VECTORS; v++) codes[v] = all_codes[v][i];
            sums.template add<0, COUNT>(codes, limbs + FOUR * i, apart);
        }
    } else {
        const char *below = words + BELOW * pitch;
        HFQ_UNROLL
        for (int r = 0; r < BITS; r++, words += pitch, below += pitch) {
            keep_place(words), keep_place(below);
            vu word[VECTORS];
            HFQ_UNROLL
            for (int v = 0; v < VECTORS; v++) {
                word[v] = load<vu>(words + 4 * W * v);
                keep_here(word[v]);
                ask_for(below + 4 * W * v), __builtin_prefetch(words + NEAR + 4 * W * v);
            }
            HFQ_UNROLL
            for (int part = 0; part < 8 / BITS; part++) {
                HFQ_UNROLL
                for (int v = 0; v < VECTORS; v++) codes[v] = (vb)(word[v] >> BITS * part & mask<BITS>());
                sums.template add<0, COUNT>(codes, limbs + FOUR * (r * (8 / BITS) + part), apart);
            }
        }
    }
}

// Multiplies the lowest limbs of a span's marked fours of channels.
template <int BITS, int ROWS, int VECTORS>
static HFQ_INLINE void add_lowest(uint32_t marks, const char *words, int64_t pitch, const char *limbs,
                                  int64_t apart, Sums<ROWS, VECTORS> &sums) {
    const int in_word = 8 / BITS;
    for (; marks; marks &= marks - 1) {
        const int four = __builtin_ctz(marks);
        const char *row = words + four / in_word * pitch;
        vb codes[VECTORS];
        HFQ_UNROLL
        for (int v = 0; v < VECTORS; v++)
            codes[v] = (vb)(load<vu>(row + 4 * W * v) >> four % in_word * BITS & mask<BITS>());
        sums.template add<LIMBS - 1, LIMBS>(codes, limbs + four / 8 * LIMBS * CHUNK + four % 8 * FOUR, apart);
    }
}

// Multiplies four channels of 8 * W columns of AWQ. The order is that of unpack<0>, but channels are
// interleaved before the two columns of a byte are separated.
template <int COUNT>
static HFQ_INLINE void add_four(const char *words, int64_t pitch, const char *limbs, Sums<1, 8> &sums) {
    vb row[4];
    HFQ_UNROLL
    for (int k = 0; k < 4; k++) row[k] = load<vb>(words + k * pitch);
    const vb a = low_bytes(row[0], row[1]), b = low_bytes(row[2], row[3]), c = high_bytes(row[0], row[1]),
             d = high_bytes(row[2], row[3]);
    const vu pairs[4] = {(vu)low_pairs(a, b), (vu)high_pairs(a, b), (vu)low_pairs(c, d),
                         (vu)high_pairs(c, d)};
    HFQ_UNROLL
    for (int v = 0; v < 8; v++) {
        const vb codes = (vb)(pairs[v % 4] >> 4 * (v / 4) & 0x0F0F0F0Fu);
        HFQ_UNROLL
        for (int i = 0; i < COUNT; i++)
            sums.of[i][0][v] = dot_four(sums.of[i][0][v], codes, spread(limbs + i * CHUNK));
    }
}
