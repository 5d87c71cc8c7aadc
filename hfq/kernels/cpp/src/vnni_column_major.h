// Columns. Included by vnni.h, in its namespace.

// A span of activation rows, from the first of them on.
struct Span {
    const char *limbs;      // limbs of the first row, LIMBS bytes per activation
    const int32_t *totals;  // sums of the first row's highest limbs, and of its others
    const float *units;     // value of 1 in the first row's limbs
    int64_t limbs_apart;    // bytes of `limbs` from a row to the next
    int64_t totals_apart;   // sums from a row to the next
    int64_t units_apart;    // units from a row to the next
    int64_t chunks;         // chunks of CHUNK channels
    uint32_t whole;         // bit per chunk: its lowest limbs are multiplied with the others
    uint32_t lowest;        // bit per four channels of other chunks: lowest limbs are there (not AWQ's)
    HFQ_INLINE Span from(int64_t row) const {
        return {limbs + row * limbs_apart, totals + row * totals_apart, units + row * units_apart,
                limbs_apart, totals_apart, units_apart, chunks, whole, lowest};
    }
    Span part(int64_t first, int64_t count) const {  // some of its chunks
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

// Some columns of a part: their results, and their sums between two parts of a span.
struct Columns {
    float *y;       // results of each row, float32
    int32_t *high;  // sums of the highest limbs of each row
    int32_t *low;   // sums of the other limbs of each row
    int64_t wide;   // columns from a row to the next, of all three
    bool begins;    // whether a span begins here, or goes on
    bool ends;      // whether it ends here
    HFQ_INLINE Columns from(int64_t row) const {
        return {y + row * wide, high + row * wide, low + row * wide, wide, begins, ends};
    }
};

// Scales and zero points of some columns' vectors, as they were unpacked.
struct Unpacked {
    const float *scales;   // scale of each column
    const int32_t *zeros;  // zero point of each column, an integer
    HFQ_INLINE vu zero(int v) const { return load<vu>(zeros + v * W); }
    HFQ_INLINE vf scale(int v) const { return load<vf>(scales + v * W); }
};

// How zero points and scales of 2, 4 or 8 bits' columns are read that begin where column n does, or any
// number of words later.
template <int BITS> struct Reading {
    vi places;        // words from the first to that with each lane's zero point
    vu shifts;        // bits to shift each lane's word by
    vu added;         // what is added to whole words
    vu more;          // what is added to a zero point
    vu kept;          // bits that are left after that
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

// Scales and zero points of some columns' vectors, as a layer holds them. All of a vector's bytes are read of
// zero points, whatever is in them.
template <int BITS> struct Packed {
    const Reading<BITS> &how;  // how they are read
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

// Activations of bfloat16 have lowest limbs where they are below 2**-7 of a span's largest: a few of a row,
// in many of its chunks.
template <int BITS> static void find_lowest(Span &span, int64_t rows) {
    static_assert(CHUNK / FOUR == 8 && SPAN / FOUR <= 32,
                  "a byte of marks for a chunk, and a word for a span");
    const int most_alone = BITS == 3 ? 0 : MOST_ALONE;  // three bits are unpacked by chunks
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

// Whether scales and zero points are read where they are needed, not unpacked before.
template <int BITS> constexpr bool is_packed() { return BITS != 0 && BITS != 3; }

// Chunks that are taken together, of a span's.
template <int BITS> constexpr int64_t most_chunks() {
    return is_packed<BITS>() ? least(DEPTH / BITS, SPAN / CHUNK) : SPAN / CHUNK;
}
template <int BITS> constexpr bool is_parted() { return most_chunks<BITS>() < SPAN / CHUNK; }

// Columns' vectors that are multiplied at once: of AWQ those of a vector of words, and twice as many for one
// row as for some.
template <int BITS> constexpr int vectors(int64_t rows) {
    return BITS == 0 ? 8 : rows == 1 && (BITS == 2 || BITS == 4) ? 4 : 2;
}
template <int BITS> constexpr int64_t word_rows() { return BITS == 0 ? CHUNK : BITS; }  // of a chunk

// Sums of the highest, the middle and the lowest limbs of ROWS activation rows times VECTORS columns'
// vectors.
template <int ROWS, int VECTORS> struct Sums {
    vi of[LIMBS][ROWS][VECTORS];  // int32 per column
    // at what zero points take off them
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
    // Codes of the same four channels of each column, times their limbs from FIRST up to LAST.
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

// A chunk of codes, straight from their words. Later words are asked for between the products: all at once
// they would wait for each other.
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

// The lowest limbs of the fours of channels that are marked, of a span's.
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

// Four channels of 8 * W columns of AWQ: in the order of unpack<0>, but gathered before a byte's two columns
// are parted.
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

// The words of some chunks of a part's columns, and where all of the layer's begin and end.
struct Block {
    const char *at;     // address of the first word
    int64_t pitch;      // bytes from a row of words to the next
    int64_t rows;       // rows of words
    int64_t width;      // bytes of a row
    const char *begin;  // address of the layer's first word
    const char *end;    // address after its last word
    HFQ_INLINE bool holds(int64_t place, int64_t nbytes) const {
        return at + place >= begin && at + (rows - 1) * pitch + place + nbytes <= end;
    }
};

// Lines in the order that they lie in.
struct Lines {
    Block of;       // the words, from the row of the next line on
    int64_t place;  // bytes of that row before the next line
    HFQ_INLINE void ask_for_next() {
        ask_for(of.at + place), place += 64;
        if (place >= of.width) place = 0, of.at += of.pitch;
    }
};

// A span of some columns, or a part of one, times ROWS activation rows.
// Of AWQ, whose columns' words are a line wide, those that are read after them are asked for along the rows,
// a row of theirs for a row.
template <int BITS, int ROWS, int VECTORS, class POINTS>
static void multiply(const Span &span, const char *words, int64_t pitch, Lines *later, const Columns &to,
                     const POINTS &points) {
    Sums<ROWS, VECTORS> sums;
    if (!is_parted<BITS>() || to.begins) sums.begin(span, points);
    else sums.go_on(to);
    const char *limbs = span.limbs;
    if constexpr (BITS != 0 && BITS != 3)
        add_lowest<BITS>(span.lowest, words, pitch, limbs, span.limbs_apart, sums);
    for (int64_t c = 0; c < span.chunks; c++, limbs += LIMBS * CHUNK) {
        if constexpr (BITS == 0) {
            for (int64_t k = 0; k < CHUNK; k += FOUR, words += FOUR * pitch) {
                HFQ_UNROLL
                for (int i = 0; i < FOUR && later; i++) later->ask_for_next();
                if (load32(limbs + (LIMBS - 1) * CHUNK + k)) add_four<LIMBS>(words, pitch, limbs + k, sums);
                else add_four<LIMBS - 1>(words, pitch, limbs + k, sums);
            }
        } else {
            if (span.whole >> c & 1)
                add_chunk<BITS, ROWS, VECTORS, LIMBS>(words, pitch, limbs, span.limbs_apart, sums);
            else add_chunk<BITS, ROWS, VECTORS, LIMBS - 1>(words, pitch, limbs, span.limbs_apart, sums);
            words += BITS * pitch;
        }
    }
    if (!is_parted<BITS>() || to.ends) sums.end(span, to, points);
    else sums.leave(to);
}

template <int BITS, int VECTORS, class POINTS>
static HFQ_INLINE void multiply_rows(const Span &span, int64_t rows, const char *words, int64_t pitch,
                                     Lines *later, const Columns &to, const POINTS &points) {
    for (int64_t m = 0, taken; m < rows; m += taken) {
        taken = BITS == 0 || VECTORS == 4 ? 1 : at_once(rows - m);
        if constexpr (BITS != 0 && VECTORS != 4) {
            if (taken == 4)
                multiply<BITS, 4, VECTORS>(span.from(m), words, pitch, nullptr, to.from(m), points);
            if (taken == 2)
                multiply<BITS, 2, VECTORS>(span.from(m), words, pitch, nullptr, to.from(m), points);
        }
        if (taken == 1)
            multiply<BITS, 1, VECTORS>(span.from(m), words, pitch, m ? nullptr : later, to.from(m), points);
    }
}

// 8 * W floats in the order of AWQ's codes.
static HFQ_INLINE void put_in_order(const float *from, float *to) {
#if defined(HFQ_VNNI)
    HFQ_UNROLL
    for (int v = 0; v < 4; v++) {
        __m512 a = _mm512_castps128_ps512(_mm_loadu_ps(from + 8 * v)),
               b = _mm512_castps128_ps512(_mm_loadu_ps(from + 8 * v + 4));
        a = _mm512_insertf32x4(a, _mm_loadu_ps(from + 8 * v + 32), 1),
        b = _mm512_insertf32x4(b, _mm_loadu_ps(from + 8 * v + 36), 1);
        a = _mm512_insertf32x4(a, _mm_loadu_ps(from + 8 * v + 64), 2),
        b = _mm512_insertf32x4(b, _mm_loadu_ps(from + 8 * v + 68), 2);
        a = _mm512_insertf32x4(a, _mm_loadu_ps(from + 8 * v + 96), 3),
        b = _mm512_insertf32x4(b, _mm_loadu_ps(from + 8 * v + 100), 3);
        _mm512_storeu_ps(to + v * W, _mm512_unpacklo_ps(a, b)),
            _mm512_storeu_ps(to + (v + 4) * W, _mm512_unpackhi_ps(a, b));
    }
#else
    for (int i = 0; i < 8 * W; i++) to[i] = from[awq_order.column[i]];
#endif
}

// Those of the next group, of the columns of a strip.
static HFQ_INLINE void ask_for_scales(const Layer &layer, int64_t group, int64_t n, int64_t count) {
    const int64_t size = layer.scale_dtype == F32 ? 4 : 2;  // of a scale
    for (int64_t i = 0; i < count * size; i += 64)
        ask_for(layer.scales + (((group + 1) * layer.out_features + n) * size + i));
    for (int64_t i = 0; i < count * layer.bits / 8; i += 64)
        ask_for(layer.zeros + 4 * (group + 1) * layer.zero_words + n * layer.bits / 8 + i);
}

// Scales and zero points of up to STRIP columns of a group, in the order that sums come in; `skipped` of them
// are none. Zero points are read from the first of eight columns on: up to 7 before them, and W after them,
// are written, too.
template <int BITS> static void find_scales(const Layer &layer, int64_t group, int64_t n, int64_t skipped,
                                            int64_t count, float *scales, int32_t *zeros) {
    const int64_t wide = up(count, vectors<BITS>(1) * W), first = n + skipped, there = count - skipped;
    ask_for_scales(layer, group, first, there);
    if constexpr (BITS != 0) {
        const int64_t before = first % 8,
                      known = least(up(before + there, W), layer.out_features - first + before);
        for (int64_t i = 0; i < skipped; i++) scales[i] = 0, zeros[i] = 0;
        group_scales(layer, group, first, there, scales + skipped, wide - skipped);
        integer_zeros(layer, group, first - before, known, zeros + skipped - before,
                      most(known, before + wide - skipped));
    } else {
        float loose[STRIP];
        for (int64_t i = 0; i < skipped; i++) loose[i] = 0;
        group_scales(layer, group, first, there, loose + skipped, wide - skipped);
        for (int64_t i = 0; i < wide; i += 8 * W) put_in_order(loose + i, scales + i);
        const char *row = layer.zeros + 4 * (group * layer.zero_words + n / 8);
        int64_t i = 0;
        for (vb places; i < count && layer.zero_reading == STORED; i += 8 * W) {
            char cut[4 * W] = {};
            const int64_t begin = i ? 0 : skipped, end = least(8 * W, count - i);
            const bool is_whole = end - begin == 8 * W;
            if (!is_whole) __builtin_memcpy(cut + begin / 2, row + (i + begin) / 2, (end - begin) / 2);
            const vb words = load<vb>(is_whole ? row + i / 2 : cut);
            HFQ_UNROLL
            for (int v = 0; v < 8; v++) {
                for (int j = 0; j < 4 * W; j++) places[j] = (uint8_t)(v % 4 * 4 + j / 4 % 4);
                store(zeros + i + v * W, (vu)pick_bytes(words, places) >> v / 4 * 4 & 15u);
            }
        }
        if (i < count) group_zeros(layer, group, first, there, loose + skipped, wide - skipped);
        for (; i < wide; i++) zeros[i] = (int32_t)loose[i / (8 * W) * 8 * W + awq_order.column[i % (8 * W)]];
    }
}

template <int BITS> constexpr int64_t word_nbytes(int64_t columns) {
    return BITS == 0 ? columns / 2 : 4 * columns;
}

// Blocks of a part's columns, of which `skipped` are none. Those that are not all there are multiplied with
// what lies there in the layer's memory; where that ends they are copied.
struct Part {
    const Layer &layer;  // whose columns they are
    int64_t group;       // number of the group of channels
    int64_t n;           // column at which the part begins
    int64_t skipped;     // columns at its beginning that are none
    int64_t count;       // columns, with those
    // The columns of a block that begins at i which are there: from the first of them up to the last.
    HFQ_INLINE int64_t first(int64_t i) const { return i ? 0 : skipped; }
    HFQ_INLINE int64_t last(int64_t i, int64_t columns) const { return least(columns, count - i); }
};

template <int BITS, int VECTORS, class POINTS>
static HFQ_INLINE void multiply_block(const Span &span, int64_t rows, const Block &words, int64_t first,
                                      int64_t last, Lines *later, const Columns &to, const POINTS &points) {
    const int64_t columns = VECTORS * W, width = word_nbytes<BITS>(columns);
    if (words.rows == span.chunks * word_rows<BITS>() &&
        ((first == 0 && last == columns) || words.holds(0, width)))
        return multiply_rows<BITS, VECTORS>(span, rows, words.at, words.pitch, later, to, points);
    char cut[SPAN * 4 * W];
    static_assert(DEPTH * VECTORS <= SPAN, "of AWQ it is as many rows of a vector, of 3 bits fewer of two");
    __builtin_memset(cut, 0, sizeof(cut));
    for (int64_t r = 0; r < words.rows; r++)
        __builtin_memcpy(cut + r * width + word_nbytes<BITS>(first),
                         words.at + r * words.pitch + word_nbytes<BITS>(first),
                         word_nbytes<BITS>(last - first));
    multiply_rows<BITS, VECTORS>(span, rows, cut, width, later, to, points);
}

// A span times all columns of a part: DEPTH rows of words along the columns, and then those below.
template <int BITS, int VECTORS> static void multiply_packed(const Part &part, const Span &span, int64_t rows,
                                                             const Block &words, const Columns &all_columns) {
    const Layer &layer = part.layer;
    const int64_t columns = VECTORS * W, depth = most_chunks<BITS>(), row_words = layer.zero_words,
                  size = layer.scale_dtype == F32 ? 4 : 2;
    const char *scales = layer.scales + part.group * layer.out_features * size,
               *zeros = layer.zeros + 4 * part.group * row_words;
    const char *end = layer.zeros + 4 * layer.groups * row_words;
    const Reading<BITS> reading(layer, part.n);
    for (int64_t chunk = 0; chunk < span.chunks; chunk += depth) {
        const Span some = span.part(chunk, least(depth, span.chunks - chunk));
        const int64_t row = chunk * BITS;
        Block block = {words.at + row * words.pitch,
                       words.pitch,
                       least(some.chunks * BITS, words.rows - row),
                       columns * 4,
                       words.begin,
                       words.end};
        Columns to = {all_columns.y,    all_columns.high, all_columns.low,
                      all_columns.wide, chunk == 0,       chunk + some.chunks == span.chunks};
        for (int64_t i = 0; i < part.count; i += columns) {
            const int64_t n = part.n + i, first = part.first(i), last = part.last(i, columns),
                          word = n * BITS >> 5;
            const char *scale = scales + n * size, *zero = zeros + 4 * word;
            if (to.begins) {  // those of the next group
                for (int64_t line = 0; line < columns * size; line += 64)
                    ask_for(scale + layer.out_features * size + line);
                ask_for(zero + 4 * row_words);
            }
            if (first == 0 && last == columns && zero + 4 * W <= end) {
                multiply_block<BITS, VECTORS>(some, rows, block, first, last, nullptr, to,
                                              Packed<BITS>{reading, scale, zero});
            } else {
                char some_scales[columns * 4] = {}, some_zeros[4 * W] = {};
                const int64_t before = (n + first) * BITS >> 5, after = ((n + last) * BITS + 31) >> 5;
                __builtin_memcpy(some_scales + first * size, scale + first * size, (last - first) * size);
                __builtin_memcpy(some_zeros + 4 * (before - word), zeros + 4 * before, 4 * (after - before));
                multiply_block<BITS, VECTORS>(some, rows, block, first, last, nullptr, to,
                                              Packed<BITS>{reading, some_scales, some_zeros});
            }
            block.at += block.width, to.y += columns, to.high += columns, to.low += columns;
        }
    }
}

// The same of AWQ and of 3 bits: scales and zero points are unpacked, strip by strip.
template <int BITS, int VECTORS> static void multiply_unpacked(const Part &part, const Span &span,
                                                               int64_t rows, const Block &words, Columns to) {
    const int64_t columns = VECTORS * W, width = word_nbytes<BITS>(columns);
    alignas(64) float scales[STRIP];
    alignas(64) int32_t room[STRIP + 2 * W], *zeros = room;
    Lines later = {words, 0};
    later.of.at += words.rows * words.pitch;
    Block block = {words.at, words.pitch, words.rows, width, words.begin, words.end};
    for (int64_t i = 0; i < part.count; i += columns, block.at += width) {
        const int64_t place = i % STRIP, first = part.first(i);
        if (place == 0) {
            zeros = room + (BITS == 0 ? 0 : (part.n + i + first) % 8);
            find_scales<BITS>(part.layer, part.group, part.n + i, first, least(STRIP, part.count - i), scales,
                              zeros);
        }
        for (int64_t r = 0; BITS == 3 && r < words.rows; r++)
            for (int64_t line = 0; line < width; line += 64)
                ask_for(block.at + (BELOW_THREE + r) * words.pitch + line);
        multiply_block<BITS, VECTORS>(span, rows, block, first, part.last(i, columns), &later, to,
                                      Unpacked{scales + place, zeros + place});
        to.y += columns, to.high += columns, to.low += columns;
    }
}

// As integer_tile: span by span, and each of them along the columns, from where a line of the cache begins.
template <int BITS, int VECTORS> static void tile(const MatmulArgs &args, int64_t row, int64_t rows,
                                                  int64_t n, int64_t count, float *scratch) {
    const Layer &layer = *args.layer;
    const int64_t skipped = skipped_before(layer, args.outputs, n);
    n -= skipped, count += skipped;
    const int64_t wide = up(count, VECTORS * W), pitch = layer.row_nbytes;
    int32_t *high = (int32_t *)(scratch + rows * wide);
    const Columns to = {scratch, high, high + rows * wide, wide, true, true};
    __builtin_memset(scratch, 0, 4 * rows * wide);
    Span span = {args.limbs + row * limbs_nbytes(layer),
                 args.totals + row * totals(layer),
                 args.units + row * spans(layer),
                 limbs_nbytes(layer),
                 totals(layer),
                 spans(layer),
                 0,
                 0,
                 0};
    const auto words_of = [](int64_t channels) { return BITS == 0 ? channels : channels * BITS / 32; };
    const char *end = layer.codes + words_of(layer.in_features) * pitch;
    for (int64_t group = 0; group < layer.groups; group++)
        for (int64_t chunk = 0; chunk < group_chunks(layer); chunk += span.chunks) {
            const int64_t k = group * layer.block_in + chunk * CHUNK;
            span.chunks = least(group_chunks(layer) - chunk, SPAN / CHUNK);
            if (BITS != 0) find_lowest<BITS>(span, rows);
            const int64_t codes =
                least(span.chunks * CHUNK, least((group + 1) * layer.block_in, layer.in_features) - k);
            const Block words = {layer.codes + words_of(k) * pitch + word_nbytes<BITS>(n),
                                 pitch,
                                 words_of(codes),
                                 word_nbytes<BITS>(count),
                                 layer.codes,
                                 end};
            const Part part = {layer, group, n, skipped, count};
            if constexpr (is_packed<BITS>()) multiply_packed<BITS, VECTORS>(part, span, rows, words, to);
            else multiply_unpacked<BITS, VECTORS>(part, span, rows, words, to);
            span.limbs += span.chunks * LIMBS * CHUNK, span.totals += 2, span.units++;
        }
    put_columns(args, row, rows, n, skipped, count, scratch, wide, BITS == 0);
}

template <int BITS> static void tile(const MatmulArgs &args, int64_t row, int64_t rows, int64_t n,
                                     int64_t count, float *scratch) {
    (rows == 1 ? tile<BITS, vectors<BITS>(1)> : tile<BITS, vectors<BITS>(2)>)(args, row, rows, n, count,
                                                                              scratch);
}

static void multiply_columns(const MatmulArgs &args, int64_t n, int64_t count, float *scratch) {
    if (!args.limbs || args.layer->scale_dtype > F16)
        return avx512::multiply_columns(args, n, count, scratch);
    const int bits = args.layer->kind == AWQ ? 0 : args.layer->bits;
    for (int64_t row = 0; row < args.rows; row += PASS)
        (bits == 0 ? tile<0> : bits == 2 ? tile<2> : bits == 3 ? tile<3> : bits == 4 ? tile<4> : tile<8>)(
            args, row, least(PASS, args.rows - row), n, count, scratch);
}

static void columns_part(const void *context, int64_t part, float *scratch) {
    multiply_strips<multiply_columns>(*(const MatmulArgs *)context, part, scratch);
}
