// Columns. Included by vnni.h, in its namespace.

#include "vnni_column_sums.h"

// The words of some chunks of a part's columns, and the bounds of the layer's words.
struct Block {
    const char *at;     // address of the first word
    int64_t pitch;      // bytes from one row of words to the next
    int64_t rows;       // rows of words
    int64_t width;      // bytes per row
    const char *begin;  // address of the layer's first word
    const char *end;    // address after the layer's last word
    HFQ_INLINE bool holds(int64_t place, int64_t nbytes) const {
        return at + place >= begin && at + (rows - 1) * pitch + place + nbytes <= end;
    }
};

// Cache lines to prefetch, in memory order.
struct Lines {
    Block of;       // the words from the row of the next line on
    int64_t place;  // bytes of that row before the next line
    HFQ_INLINE void ask_for_next() {
        ask_for(of.at + place), place += 64;
        if (place >= of.width) place = 0, of.at += of.pitch;
    }
};

// Multiplies a span, or a part of one, of some columns by ROWS activation rows. A vector of AWQ's columns is
// one cache line wide. For each row of words that is read, the next lines of the following rows are
// prefetched.
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

// Permutes 8 * W floats to the order of AWQ's codes.
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

// Prefetches scales and zero points of the next group for the columns of a strip.
static HFQ_INLINE void ask_for_scales(const Layer &layer, int64_t group, int64_t n, int64_t count) {
    const int64_t size = layer.scale_dtype == F32 ? 4 : 2;  // bytes per scale
    for (int64_t i = 0; i < count * size; i += 64)
        ask_for(layer.scales + (((group + 1) * layer.out_features + n) * size + i));
    for (int64_t i = 0; i < count * layer.bits / 8; i += 64)
        ask_for(layer.zeros + 4 * (group + 1) * layer.zero_words + n * layer.bits / 8 + i);
}

// Unpacks scales and zero points of up to STRIP columns of a group, in the order of sums; the first `skipped`
// are zero. Zero points are read from a multiple of eight columns on. Up to 7 before the strip and W after it
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

// Columns of a part; the first `skipped` are not computed. An incomplete block is multiplied together with
// its neighbors in the layer's memory. If it reaches beyond that memory, it is copied.
struct Part {
    const Layer &layer;  // layer of the columns
    int64_t group;       // group of channels
    int64_t n;           // first column, with the skipped ones
    int64_t skipped;     // columns at the start that are not computed
    int64_t count;       // columns, with the skipped ones
    // Range of the columns to compute in a block that begins at i, relative to the block.
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

// Multiplies a span by all columns of a part: DEPTH rows of words along the columns, then the rows below.
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
            if (to.begins) {  // prefetches the next group's
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

// The same for AWQ and 3 bits, whose scales and zero points are unpacked strip by strip.
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

// The same as integer_tile: span by span, each along the columns, from the start of a cache line.
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
