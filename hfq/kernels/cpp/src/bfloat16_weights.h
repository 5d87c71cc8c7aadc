// Codes as bfloat16. Included by bfloat16.h, in its namespace.
//
// Layout: [32 channels][two tiles], the codes of a pair's outputs. They are a left factor if codes are rows,
// and a right factor if codes are columns.

inline uint16_t short_of(float value) { return (uint16_t)(as_bits(value) >> 16); }

// The bfloat16 values of the 128 non-negative codes of an 8-bit float.
struct Bytes {
    alignas(64) uint8_t high[128];  // higher byte of each value
    alignas(64) uint8_t low[128];   // lower byte of each value
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

// Kind of NIBBLES whose zero points are subtracted, after the values of Kind.
const int ZEROED = 16;

// Lookup table of codes, kept in registers.
#if defined(HFQ_AMX)
template <int KIND> struct Table {
    __m512i high[2];  // higher bytes of 128 bfloat16; of integers and NIBBLES, 32 whole bfloat16 in [0]
    __m512i low[2];   // lower bytes of 128 bfloat16
    explicit Table(const Layer &layer) {
        if (KIND == ZEROED) high[0] = all_integers();
        if (KIND == NIBBLES)
            high[0] = _mm512_broadcast_i64x4(
                _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_loadu_si512(layer.values), 16)));
        if (KIND != E4M3 && KIND != E5M2) return;
        static const Bytes bytes(KIND);
        for (int i = 0; i < 2; i++)
            high[i] = _mm512_load_si512(bytes.high + 64 * i), low[i] = _mm512_load_si512(bytes.low + 64 * i);
    }
};
#else
template <int KIND> struct Table {
    const Layer &layer;  // layer whose codes are unpacked
    int16_t order[64];   // order of 64 channels (find_order)
    explicit Table(const Layer &of) : layer(of) { find_order(of, order); }
};
#endif

// Unpacks 64 codes of a row, from `p`, to rows of two tiles; `shift` is added to codes with a zero point.
template <int KIND> static HFQ_INLINE void unpack_row(const Table<KIND> &table, const char *p, int shift,
                                                      char *first, char *second) {
#if defined(HFQ_AMX)
    if constexpr (KIND == NIBBLES || KIND == ZEROED) {
        const __m512i codes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
        __m512i low = _mm512_and_si512(codes, _mm512_set1_epi16(15)), high = _mm512_srli_epi16(codes, 4);
        if (KIND == ZEROED)
            low = _mm512_add_epi16(low, _mm512_set1_epi16((short)shift)),
            high = _mm512_add_epi16(high, _mm512_set1_epi16((short)shift));
        _mm512_store_si512(first, _mm512_permutexvar_epi16(low, table.high[0])),
            _mm512_store_si512(second, _mm512_permutexvar_epi16(high, table.high[0]));
    } else if constexpr (is_integer(KIND)) {
        const __m128i flipped = _mm_set1_epi8(KIND == BIASED ? (char)0x80 : 0);
        for (int i = 0; i < 64; i += 32) {
            const __m128i *from = (const __m128i *)(p + i);
            const __m512 low =
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_xor_si128(_mm_loadu_si128(from), flipped)));
            const __m512 high =
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_xor_si128(_mm_loadu_si128(from + 1), flipped)));
            _mm512_store_si512(i ? second : first, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    } else {
        const __m512i codes = _mm512_loadu_si512(p),
                      low = _mm512_permutex2var_epi8(table.low[0], codes, table.low[1]);
        __m512i high = _mm512_permutex2var_epi8(table.high[0], codes, table.high[1]);
        // ORs the signs of the codes
        high = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8((char)0x80), 0xF8);
        _mm512_store_si512(first, _mm512_unpacklo_epi8(low, high)),
            _mm512_store_si512(second, _mm512_unpackhi_epi8(low, high));
    }
#else
    const bool high_first = table.layer.high_first != 0;
    for (int i = 0; i < 64; i++) {
        const int k = table.order[i];
        const bool is_nibble = KIND == NIBBLES || KIND == ZEROED;
        const uint8_t byte = (uint8_t)p[is_nibble ? k / 2 : k],
                      nibble = byte >> ((k % 2 != 0) != high_first ? 4 : 0) & 15;
        float value = is_integer(KIND) ? integer_value(byte, KIND) : code_value(byte, KIND);
        if (is_nibble)
            value = KIND == ZEROED ? (float)(nibble + shift - 16) : float_at(table.layer.values, F32, nibble);
        const uint16_t half = short_of(value);
        memcpy((i < 32 ? first : second) + 2 * (i % 32), &half, 2);
    }
#endif
}

// Offset from a row's codes, from channel k on, to their places in all_integers.
template <int KIND> static HFQ_INLINE int shift_of(const Layer &layer, int64_t n, int64_t k) {
    return KIND == ZEROED
               ? 16 - (int)row_zero(layer, n, k / layer.block_in) - (layer.row_zeros == OUTPUT_WORDS ? 8 : 0)
               : 0;
}

// Unpacks channels [k, k + length) of rows [n, n + count). Codes `lead` bytes ahead are prefetched by the
// line of their end, since the line of their start was prefetched with the codes before them.
template <int KIND> static void unpack_rows(const Layer &layer, int64_t n, int64_t count, int64_t k,
                                            int64_t length, int64_t lead, char *out) {
    const int64_t line = KIND == NIBBLES || KIND == ZEROED ? 32 : 64, whole = length / 128 * 128;
    const Table<KIND> table(layer);
    const char *row = layer.codes + n * layer.row_nbytes + k / 64 * line;
    // rows beyond the last repeat the last
    for (int64_t r = 0; r < PAIR; r++, row += r < count ? layer.row_nbytes : 0) {
        char *to = out + r / BLOCK * amx::TILE + r % BLOCK * 64;
        const char *codes = row;
        int64_t i = 0;
        // the line is shared with earlier codes and may have left the second-level cache
        __builtin_prefetch(row + ROWS_AHEAD * layer.row_nbytes);
        for (; i < whole; i += 128, codes += 2 * line, to += 8 * amx::TILE) {
            HFQ_UNROLL
            for (int j = 0; j < 2; j++) {
                if (j == 0 || line == 64) __builtin_prefetch(codes + j * line + lead + 63, 0, 2);
                unpack_row<KIND>(table, codes + j * line,
                                 shift_of<KIND>(layer, n + least(r, count - 1), k + i + 64 * j),
                                 to + j * 4 * amx::TILE, to + (4 * j + 2) * amx::TILE);
            }
        }
        for (; i < length; i += 64, codes += line, to += 4 * amx::TILE) {
            char rest[64];
            const char *at = codes;
            if (length - i < 64) {
                memset(rest, 0, sizeof(rest)), memcpy(rest, codes, ((length - i) * line + 63) / 64);
                at = rest;
            }
            unpack_row<KIND>(table, at, shift_of<KIND>(layer, n + least(r, count - 1), k + i), to,
                             to + 2 * amx::TILE);
        }
    }
}

// Largest exponent of the scales, powers of two, of up to 16 groups of a row in a step. The largest scale is
// applied to the sums, and codes are multiplied by the scales relative to it. Weights of any magnitude are
// then normal numbers in a tile.
inline int largest_exponent(const char *scales, int64_t count) {
#if defined(HFQ_AMX)
    __m128i largest = _mm_maskz_loadu_epi8((__mmask16)((1u << count) - 1), scales);
    largest = _mm_max_epu8(largest, _mm_srli_si128(largest, 8)),
    largest = _mm_max_epu8(largest, _mm_srli_si128(largest, 4));
    largest = _mm_max_epu8(largest, _mm_srli_si128(largest, 2)),
    largest = _mm_max_epu8(largest, _mm_srli_si128(largest, 1));
    return _mm_cvtsi128_si32(largest) & 255;
#else
    int largest = 0;
    for (int64_t i = 0; i < count; i++) largest = (int)most(largest, (uint8_t)scales[i]);
    return largest;
#endif
}

// The scale that a group's codes are multiplied by, without the factor that is applied to sums.
inline float folded_scale(const Layer &layer, int64_t place, int largest) {
    if (layer.scale_dtype != E8M0) return code_value((uint8_t)layer.scales[place], E4M3);
    return as_float((uint32_t)most(127 + (uint8_t)layer.scales[place] - largest, 0) << 23);
}

// Writes the scales of the sums of a pair's rows.
inline void find_unfolded(const Layer &layer, int64_t n, int64_t count, int64_t k, int64_t length,
                          float *scales) {
    const int64_t first = k / layer.block_in, groups = (length + layer.block_in - 1) / layer.block_in;
    const float shared = layer.divides ? 1 / layer.shared : layer.shared;
    for (int64_t r = 0; r < PAIR; r++) {
        const char exponent =
            (char)(layer.scale_dtype == E8M0
                       ? largest_exponent(
                             layer.scales + (n + least(r, count - 1)) * layer.scale_stride + first, groups)
                       : 0);
        scales[r] = layer.scale_dtype == E8M0 ? float_at(&exponent, E8M0, 0) : shared;
    }
}

#if defined(HFQ_AMX)
// Returns up to 16 folded scales.
static HFQ_INLINE __m512 folded_scales(const Layer &layer, int64_t place, int64_t count, int largest) {
    const __m128i bytes =
        _mm_maskz_loadu_epi8((__mmask16)((1u << least(count, 16)) - 1), layer.scales + place);
    if (layer.scale_dtype == E8M0) {
        const __m512i exponents =
            _mm512_add_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(127 - largest));
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_max_epi32(exponents, _mm512_setzero_si512()), 23));
    }
    const __m256i wide =
        _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), _mm256_set1_epi16((short)0xBFFF));
    const __mmask16 nan = _mm_cmpeq_epi8_mask(_mm_and_si128(bytes, _mm_set1_epi8(0x7F)), _mm_set1_epi8(0x7F));
    return _mm512_mask_mov_ps(_mm512_mul_ps(_mm512_cvtph_ps(wide), _mm512_set1_ps(256)), nan,
                              _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)));
}
#endif

#if defined(HFQ_AMX)
// Multiplies the 16 values by each of two scales.
static HFQ_INLINE __m512i scaled_values(__m512 values, const float *scales) {
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(values, _mm512_set1_ps(scales[1])),
                                        _mm512_mul_ps(values, _mm512_set1_ps(scales[0])));
}
#endif

// Unpacks rows of nibbles, multiplied by their scales; otherwise as unpack_rows.
static void unpack_folded(const Layer &layer, int64_t n, int64_t count, int64_t k, int64_t length,
                          int64_t lead, char *out) {
    const char *row = layer.codes + n * layer.row_nbytes + k / 2;
    const int64_t start = k / layer.block_in, groups = (length + layer.block_in - 1) / layer.block_in;
#if defined(HFQ_AMX)
    const __m512 values = _mm512_loadu_ps(layer.values);
    const bool is_short = layer.block_in == 16;
    const int shift = is_short ? 4 : 5;  // log2 of the channels per group
    alignas(64) int16_t tables[32];  // 16 times the group of each byte's codes
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
        alignas(64) float factors[MOST_DEPTH / 16 + 3];  // the last codes may read 3 floats beyond
        _mm512_store_ps(factors, folded_scales(layer, place, groups, largest));
        factors[16] = factors[17] = factors[18] = 0;
#endif
        for (int64_t i = 0; i < length; i += 64, to += 4 * amx::TILE) {
            char rest[32];
            const char *codes = row + i / 2;
            if (i % 128 == 0) __builtin_prefetch(codes + lead + 63, 0, 2);
            if (length - i < 64)
                memset(rest, 0, sizeof(rest)), memcpy(rest, codes, (length - i + 1) / 2), codes = rest;
#if defined(HFQ_AMX)
            const float *of = factors + (i >> shift);
            const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes));
            const __m512i low = _mm512_or_si512(_mm512_and_si512(bytes, fifteen), groups_of),
                          high = _mm512_or_si512(_mm512_srli_epi16(bytes, 4), groups_of);
            const __m512i table = scaled_values(values, of);
            if (is_short) {
                const __m512i other = scaled_values(values, of + 2);
                _mm512_store_si512(to, _mm512_permutex2var_epi16(table, low, other));
                _mm512_store_si512(to + 2 * amx::TILE, _mm512_permutex2var_epi16(table, high, other));
            } else {
                _mm512_store_si512(to, _mm512_permutexvar_epi16(low, table)),
                    _mm512_store_si512(to + 2 * amx::TILE, _mm512_permutexvar_epi16(high, table));
            }
#else
            for (int j = 0; j < 64; j++) {
                const int at = order[j];
                const uint8_t code =
                    (uint8_t)codes[at / 2] >> ((at % 2 != 0) != (layer.high_first != 0) ? 4 : 0) & 15;
                const float scale =
                    i + at < length ? folded_scale(layer, place + (i + at) / layer.block_in, largest) : 0;
                const uint16_t half = short_of(float_at(layer.values, F32, code) * scale);
                memcpy(to + j / 32 * 2 * amx::TILE + 2 * (j % 32), &half, 2);
            }
#endif
        }
    }
}

// The words of a tile's 32 channels and 16 columns. Words outside `rows` and `mask` are read as zeros.
#if defined(HFQ_AMX)
struct Columns {
    const char *words;  // address of the first word
    int64_t pitch;      // bytes from one row of words to the next
    int64_t rows;       // rows of words that exist
    __mmask16 mask;     // bit per column that exists
    HFQ_INLINE __m512i word(int64_t row) const {
        return row < rows ? _mm512_maskz_loadu_epi32(mask, words + row * pitch) : _mm512_setzero_si512();
    }
};

// Subtracts zero points from pairs of integers below 256, and converts them to pairs of bfloat16.
static HFQ_INLINE __m512i whole(__m512i pairs, __m512i zeros) {
    const __m512 low =
        _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF)), zeros));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(pairs, 16), zeros));
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high));
}

// Operand that converts a word's codes to bfloat16: for each column, 16 minus its zero point in every byte,
// or, for 8 bits, the zero point.
template <int BITS> static HFQ_INLINE __m512i shifts_of(const float *zeros) {
    const __m512i zero = _mm512_cvtps_epi32(_mm512_loadu_ps(zeros));
    return BITS == 8 ? zero
                     : _mm512_mullo_epi32(_mm512_sub_epi32(_mm512_set1_epi32(16), zero),
                                          _mm512_set1_epi32(0x01010101));
}

// Words of a column that contain only whole codes, and pairs of channels in them.
template <int BITS> constexpr int UNIT = BITS == 3 ? 3 : 1;
template <int BITS> constexpr int PAIRS = BITS == 3 ? 16 : 16 / BITS;

// Unpacks words of 16 columns to pairs of channels. A pair has a code of the first half of the channels and
// one of the second. Codes are first unpacked to bytes. Table lookups use the lower byte of each half of a
// word, and then the upper byte.
template <int BITS>
static HFQ_INLINE void unpack_pairs(const __m512i *words, __m512i shifts, __m512i table, __m512i *pairs) {
    if constexpr (BITS == 8) {
        const __m512i mask = _mm512_set1_epi32(0xFF00FF);
        pairs[0] = whole(_mm512_and_si512(words[0], mask), shifts),
        pairs[1] = whole(_mm512_and_si512(_mm512_srli_epi32(words[0], 8), mask), shifts);
    } else if constexpr (BITS == 3) {
        const __m512i seven = _mm512_set1_epi32(7),
                      both = _mm512_and_si512(shifts, _mm512_set1_epi32(0xFF00FF));
        HFQ_UNROLL
        for (int i = 0; i < 16; i++) {
            __m512i codes[2];
            HFQ_UNROLL
            for (int half = 0; half < 2; half++) {
                const int bit = 3 * (i + 16 * half), word = bit / 32, shift = bit % 32;
                codes[half] = _mm512_srli_epi32(words[word], shift);
                if (shift > 29)
                    codes[half] =
                        _mm512_or_si512(codes[half], _mm512_slli_epi32(words[(word + 1) % 3], 32 - shift));
                codes[half] = _mm512_and_si512(codes[half], seven);
            }
            const __m512i both_codes = _mm512_or_si512(codes[0], _mm512_slli_epi32(codes[1], 16));
            pairs[i] = _mm512_permutexvar_epi16(_mm512_add_epi16(both_codes, both), table);
        }
    } else {
        const int each = 8 / BITS;  // codes per byte
        const __m512i mask = _mm512_set1_epi8((1 << BITS) - 1);
        HFQ_UNROLL
        for (int i = 0; i < each; i++) {
            const __m512i bytes =
                _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(words[0], BITS * i), mask), shifts);
            pairs[i] = _mm512_permutexvar_epi16(bytes, table),
            pairs[i + each] = _mm512_permutexvar_epi16(_mm512_srli_epi32(bytes, 8), table);
        }
    }
}

template <int BITS>
static HFQ_INLINE void unpack_words(const Columns &from, const float *zeros, __m512i table, char *out) {
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

// Offsets from AWQ's codes of 16 columns to the places of codes minus zero points in all_integers.
static HFQ_INLINE __m512i awq_shifts(const float *zeros) {
    return _mm512_mullo_epi32(
        _mm512_sub_epi32(_mm512_set1_epi32(16), _mm512_cvtps_epi32(_mm512_loadu_ps(zeros))),
        _mm512_set1_epi32(0x10001));
}

// Unpacks two channels of a pair's columns of AWQ, whose words contain eight columns. Interleaving the halves
// of both channels' words separates even and odd columns. Shifting each copy by its nibble makes pairs of
// channels.
static HFQ_INLINE void unpack_awq_pairs(const char *words, int64_t pitch, bool are_two, __mmask8 there,
                                        const __m512i *added, __m512i table, __m512i *pairs) {
    const __m512i shifts = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12),
                  fifteen = _mm512_set1_epi32(0xF000F);
    const __m512i places = _mm512_setr_epi32(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3);
    const __m128i first = _mm_maskz_loadu_epi32(there, words),
                  second = are_two ? _mm_maskz_loadu_epi32(there, words + pitch) : _mm_setzero_si128();
    const __m128i turns[2] = {_mm_unpacklo_epi16(first, second), _mm_unpackhi_epi16(first, second)};
    HFQ_UNROLL
    for (int t = 0; t < 2; t++) {
        const __m512i spread = _mm512_permutexvar_epi32(places, _mm512_castsi128_si512(turns[t]));
        const __m512i codes = _mm512_and_si512(_mm512_srlv_epi32(spread, shifts), fifteen);
        pairs[t] = _mm512_permutexvar_epi16(_mm512_add_epi16(codes, added[t]), table);
    }
}

// Unpacks 32 channels of a pair's columns of AWQ.
static HFQ_INLINE void unpack_awq(const char *words, int64_t pitch, int64_t rows, int64_t columns,
                                  const float *zeros, __m512i table, char *out) {
    const __mmask8 there = (__mmask8)((1u << (columns + 7) / 8) - 1);
    const __m512i added[2] = {awq_shifts(zeros), awq_shifts(zeros + BLOCK)};
    for (int64_t i = 0; i < CHANNELS; i += 2, words += 2 * pitch, out += 64) {
        __m512i pairs[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        unpack_awq_pairs(words, pitch, i + 1 < rows, i < rows ? there : 0, added, table, pairs);
        for (int t = 0; t < 2; t++) _mm512_store_si512(out + t * amx::TILE, pairs[t]);
    }
}
#endif

// Unpacks the scales and zero points of a group for a pair's columns.
inline void find_group(const Layer &layer, int64_t group, int64_t n, int64_t count, float *scales,
                       float *zeros) {
    avx512::group_scales(layer, group, n, count, scales, PAIR);
    avx512::group_zeros(layer, group, n, count, zeros, PAIR);
}

// Unpacks a tile of 32 channels and 16 columns; `codes` channels and `count` columns exist.
template <int BITS> static HFQ_INLINE void unpack_tile(const Layer &layer, int64_t n, int64_t count,
                                                       int64_t k, int64_t codes, int64_t lead,
                                                       const float *zeros, const Integers &table, char *out) {
    const int64_t pitch = layer.row_nbytes, columns = least(BLOCK, count);
    if (columns <= 0) { memset(out, 0, amx::TILE); return; }
#if defined(HFQ_AMX)
    const Columns from = {layer.codes + k * BITS / 32 * pitch + 4 * n, pitch, codes * BITS / 32,
                          (__mmask16)((1u << columns) - 1)};
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
                if (BITS == 0)
                    found = load32(layer.codes + channel * pitch + column / 8 * 4) >>
                            4 * awq_place((int)(column % 8));
                else found = load32(layer.codes + channel * layer.bits / 32 * pitch + 4 * column);
                if (BITS == 3 && bit > 29)
                    found |=
                        (uint64_t)load32(layer.codes + (channel * layer.bits / 32 + 1) * pitch + 4 * column)
                        << 32;
                value = (float)(found >> (BITS == 0 ? 0 : bit) & ((1u << layer.bits) - 1)) - zeros[j];
            }
            const uint16_t half = short_of(value);
            memcpy(out + 64 * (place / 2) + 4 * j + 2 * (place % 2), &half, 2);
        }
#endif
}

// Copies AWQ's words of a part's columns and `length` channels to contiguous rows. In the checkpoint, they
// share few sets of the first-level cache.
static void copy_words(const Layer &layer, int64_t n, int64_t width, int64_t k, int64_t length, int64_t lead,
                       char *out) {
    const int64_t pitch = layer.row_nbytes, nbytes = up(width, 8) / 2;
    const char *words = layer.codes + k * pitch + n / 2;
    for (int64_t row = 0; row < length; row++, words += pitch, out += MOST_FEW / 2) {
        memcpy(out, words, nbytes);
        for (int64_t i = 0; i < nbytes; i += 64) __builtin_prefetch(words + lead + i, 0, 2);
        __builtin_prefetch(words + lead + nbytes - 1, 0, 2);
    }
}

// Unpacks channels of one group of columns. AWQ's words are read from `words`, in rows of MOST_FEW columns.
template <int BITS> static void unpack_columns(const Layer &layer, int64_t n, int64_t count, int64_t k,
                                               int64_t length, int64_t lead, const float *zeros,
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
        for (int64_t t = 0; t < 2; t++)
            unpack_tile<BITS>(layer, n + BLOCK * t, count - BLOCK * t, k + i, codes, lead, zeros + BLOCK * t,
                              table, out + t * amx::TILE);
    }
}
