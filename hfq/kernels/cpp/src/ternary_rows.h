// Decodes rows of QMoE. Included by instruction_set.h in the namespace of each instruction set.

// Writes the 14 columns of a word of an entry, and zeros behind them up to a vector.
static HFQ_INLINE void write_word(uint32_t word, vf values, float *out) {
    for (int i = 0; i < 16; i += W) {
        vu shifts;
        for (int j = 0; j < W; j++) shifts[j] = 2 * (i + j);
        store(out + i, pick_floats(values, (vi)((((vu){} + (word >> 4)) >> shifts) & 3)));
    }
}

// Decodes one row. Returns false, without writing outside of it, if its codes have other columns.
static bool decode_ternary(const TernaryRows &given, int64_t row, float *out) {
    const char *dictionary = bytes_at(given.dictionary), *codes = bytes_at(given.codes);
    const char *bounds = bytes_at(given.bounds) + 4 * row;
    const int64_t first = load<int32_t>(bytes_at(given.offsets) + 4 * row);
    const int64_t last = load<int32_t>(bytes_at(given.offsets) + 4 * row + 4);
    if (first < 0 || last < first || last > given.count) return false;
    const uint32_t low = (uint32_t)load<uint16_t>(bounds) << 16;
    const uint32_t high = (uint32_t)load<uint16_t>(bounds + 2) << 16;
    vu table = {};
    table[1] = low, table[2] = high;
    int64_t column = 0;
    for (int64_t i = first; i < last; i++) {
        const char *entry = dictionary + 8 * (int64_t)load<uint16_t>(codes + 2 * i);
        const uint32_t words[2] = {load<uint32_t>(entry), load<uint32_t>(entry + 4)};
        const int64_t length = 2 * (words[0] & 15), left = given.columns - column;
        if (length > left + (left & 1)) return false;
        float tail[TERNARY_MOST];
        float *target = left < TERNARY_MOST ? tail : out + column;
        write_word(words[0], (vf)table, target);
        write_word(words[1], (vf)table, target + 14);
        if (target == tail)
            for (int64_t j = 0; j < (length < left ? length : left); j++) out[column + j] = tail[j];
        column += length;
    }
    return column == given.columns + (given.columns & 1);
}

static void ternary_part(const void *context, int64_t part, float *) {
    const TernaryWork &work = *(const TernaryWork *)context;
    const TernaryRows &given = *work.rows;
    const int64_t first = part * TERNARY_ROWS, end = first + TERNARY_ROWS;
    for (int64_t row = first; row < (end < given.rows ? end : given.rows); row++)
        if (!decode_ternary(given, row, (float *)(uintptr_t)given.out + row * given.columns))
            __atomic_store_n(work.is_wrong, 1, __ATOMIC_RELAXED);
}
