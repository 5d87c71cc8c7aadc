// Sorting of channels by group, for columns with scattered groups (GPTQ's act-order). The permutation is
// lossless. Activations are permuted once, and words strip by strip. A sorted strip is then multiplied as any
// other layer. Included by instruction_set.h in the namespace of each instruction set.
//
// The codes of a word have different groups. The codes of each channel are therefore unpacked to a row of
// bytes, and the rows are packed to new words in the order of groups.

const int64_t STRIP_COLUMNS = 4 * W;  // columns that are sorted together
static_assert(STRIP_COLUMNS <= MOST_STRIP, "a strip is wider than what threads keep for it");

// Splits the words of a strip's columns into a row of their first bytes, a row of their second bytes, and so
// on. The columns are permuted within each row.
static HFQ_INLINE void part_bytes(vb *v) {
    HFQ_UNROLL
    for (int round = 0; round < 2; round++) {
        const vb a = low_bytes(v[0], v[2]), b = low_bytes(v[1], v[3]), c = high_bytes(v[0], v[2]),
                 d = high_bytes(v[1], v[3]);
        v[0] = low_bytes(a, b), v[1] = high_bytes(a, b), v[2] = low_bytes(c, d), v[3] = high_bytes(c, d);
    }
}

// Inverts part_bytes.
static HFQ_INLINE void join_bytes(vb *v) {
    const vb a = low_bytes(v[0], v[1]), b = low_bytes(v[2], v[3]), c = high_bytes(v[0], v[1]),
             d = high_bytes(v[2], v[3]);
    v[0] = low_pairs(a, b), v[1] = high_pairs(a, b), v[2] = low_pairs(c, d), v[3] = high_pairs(c, d);
}

// Sorts the codes of `count` columns from column n. Writes a row of bytes for each channel to `rows`, and
// words in the layer's layout, with channels in the order of groups, to `out`.
template <int BITS> static void sort_words(const Layer &layer, int64_t n, int64_t count, char *rows,
                                           char *out, int64_t out_pitch) {
    const int FIELDS = 8 / BITS;  // codes per byte
    const int64_t words = layer.in_features * BITS / 32, pitch = layer.row_nbytes, ahead = 32;
    const uint32_t mask = BITS == 8 ? ~0u : BITS == 4 ? 0x0F0F0F0Fu : 0x03030303u;
    const char *from = layer.codes + 4 * n;
    char *to = rows;
    const char *later = from + ahead * pitch;  // near the end, the start of the next strip
    for (int64_t word = 0; word < words; word++, from += pitch, later += pitch) {
        if (word + ahead == words) later = layer.codes + 4 * (n + STRIP_COLUMNS);
        char cut[4 * sizeof(vb)];
        const char *at = from;
        if (count < STRIP_COLUMNS)
            __builtin_memset(cut, 0, sizeof(cut)), __builtin_memcpy(cut, from, 4 * count), at = cut;
        vb bytes[4];
        HFQ_UNROLL
        for (int i = 0; i < 4; i++) {
            __builtin_prefetch(later + i * sizeof(vb), 0, 2);
            bytes[i] = load<vb>(at + i * sizeof(vb));
        }
        part_bytes(bytes);
        HFQ_UNROLL
        for (int i = 0; i < 4; i++)
            HFQ_UNROLL
            for (int field = 0; field < FIELDS; field++, to += sizeof(vb))
                store(to, (vu)bytes[i] >> BITS * field & mask);
    }
    const int32_t *order = (const int32_t *)layer.index;
    for (int64_t word = 0; word < words; word++, out += out_pitch) {
        vb bytes[4];
        HFQ_UNROLL
        for (int i = 0; i < 4; i++) {
            vu codes = {};
            HFQ_UNROLL
            for (int field = 0; field < FIELDS; field++)
                codes |= load<vu>(rows + *order++ * (int64_t)sizeof(vb)) << BITS * field;
            bytes[i] = (vb)codes;
        }
        join_bytes(bytes);
        HFQ_UNROLL
        for (int i = 0; i < 4; i++) store(out + i * sizeof(vb), bytes[i]);
    }
}

// Columns that can be sorted together: `wanted`, or as many as the scratch holds.
static int64_t strip_columns(const Layer &layer, int64_t wanted) {
    const int64_t room =
        (SORTED_SCRATCH - layer.in_features * STRIP_COLUMNS) / (layer.in_features * layer.bits / 8);
    return least(up(wanted, STRIP_COLUMNS), room / STRIP_COLUMNS * STRIP_COLUMNS);
}

// Returns the layer with sorted words of up to strip_columns columns, in the thread's scratch. It has no
// codes of other columns.
static Layer sort_strip(const Layer &layer, int64_t n, int64_t count, float *scratch) {
    char *rows = (char *)scratch + TILED_SCRATCH, *words = rows + layer.in_features * STRIP_COLUMNS;
    const int64_t pitch = 4 * up(count, STRIP_COLUMNS);
    for (int64_t i = 0; i < count; i += STRIP_COLUMNS)
        (layer.bits == 2 ? sort_words<2> : layer.bits == 4 ? sort_words<4> : sort_words<8>)(
            layer, n + i, least(STRIP_COLUMNS, count - i), rows, words + 4 * i, pitch);
    Layer strip = layer;
    strip.codes = words - 4 * n, strip.row_nbytes = pitch, strip.index = nullptr;
    return strip;
}

// Permutes activations to the order of a sorted layer's channels; `row` has memory for one row.
static void sort_activations(const Layer &layer, int64_t rows, int64_t stride, float *x, float *row) {
    const int32_t *order = (const int32_t *)layer.index;
    for (int64_t m = 0; m < rows; m++, x += stride) {
        __builtin_memcpy(row, x, 4 * layer.in_features);
        for (int64_t k = 0; k < layer.in_features; k++) x[k] = row[order[k]];
    }
}
