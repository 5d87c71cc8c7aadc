// Codes of ggml's blocks as bfloat16, and their scales. Included by bfloat16.h, in its namespace.
//
// Codes convert to bfloat16 without loss, in the order of their channels.

using avx512::Block;

// True if weights are codes times scales, minus minima of 32 channels.
template <int TYPE> constexpr bool has_least() { return TYPE == Q4_K || TYPE == Q5_K; }

// Channels that share a scale.
template <int TYPE> constexpr int64_t PART = TYPE == Q6_K ? 16 : 32;

#if defined(HFQ_AMX)
// The values of a type's codes as bfloat16.
template <int TYPE> struct Values {
    __m512i low;   // of codes below 32
    __m512i high;  // of codes from 32 on
    explicit Values() {
        low = high = all_integers();  // -16 to 15
        alignas(64) uint16_t table[64] = {};
        const float *of = TYPE == Q4_0     ? avx512::NIBBLES_MINUS_8
                          : TYPE == MXFP4  ? avx512::TWICE_E2M1
                          : TYPE == Q4_K   ? avx512::NIBBLE_CODES
                                           : avx512::IQ4_VALUES;
        for (int i = 0; i < 64; i++)
            table[i] = short_of(TYPE == Q6_K   ? (float)(i - 32)
                                          : TYPE == Q5_K ? (float)i
                                                         : of[i % 16]);
        if (TYPE == Q5_0) return;
        low = _mm512_load_si512(table), high = _mm512_load_si512(table + 32);
    }
    // Returns the values of 32 codes; of nibbles, the higher bits do not matter.
    HFQ_INLINE __m512i of(__m512i codes) const { return _mm512_permutexvar_epi16(codes, low); }
};

static HFQ_INLINE __m512i widened(const char *p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
}

// Returns the codes of 16 bytes: of their lower halves, then of their higher halves.
static HFQ_INLINE __m512i both_halves(const char *p) {
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return _mm512_srlv_epi16(_mm512_cvtepu8_epi16(twice), shifts);
}

// Shifts left, or right by a negative number.
static HFQ_INLINE __m512i shifted(__m512i words, int by) {
    return by < 0 ? _mm512_srli_epi16(words, (unsigned)-by) : _mm512_slli_epi16(words, (unsigned)by);
}

// Returns the lower four bits of `low`, and the bits above of `high`.
static HFQ_INLINE __m512i joined(__m512i low, __m512i high) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), low, high, 0xCA);
}

// Returns the codes of part `part` of a block at `p` as bfloat16.
template <int TYPE> static HFQ_INLINE __m512bh take(const Values<TYPE> &values, const char *p, int part) {
    if constexpr (TYPE == Q8_0) {
        const __m512 low =
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 2))));
        const __m512 high =
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 18))));
        return _mm512_cvtne2ps_pbh(high, low);
    } else if constexpr (TYPE == Q4_K) {
        return (__m512bh)values.of(shifted(widened(p + 16 + part / 2 * 32), part % 2 * -4));
    } else if constexpr (TYPE == Q5_K) {
        const __m512i low = shifted(widened(p + 48 + part / 2 * 32), part % 2 * -4);
        return (__m512bh)values.of(joined(low, shifted(widened(p + 16), 4 - part)));
    } else if constexpr (TYPE == Q6_K) {
        const int place = part % 4;
        const __m512i low = shifted(widened(p + part / 4 * 64 + place % 2 * 32), place / 2 * -4);
        const __m512i high = shifted(widened(p + 128 + part / 4 * 32), 4 - 2 * place);
        return (__m512bh)_mm512_permutex2var_epi16(values.low, joined(low, high), values.high);
    } else if constexpr (TYPE == Q5_0) {
        const __m512i low = _mm512_and_si512(both_halves(p + 6), _mm512_set1_epi16(15));
        return (__m512bh)values.of(
            _mm512_mask_add_epi16(low, load32(p + 2), low, _mm512_set1_epi16(16)));
    } else {
        return (__m512bh)values.of(both_halves(p + (TYPE == MXFP4 ? 1 : TYPE == IQ4_XS ? 8 + 16 * part : 2)));
    }
}

// Returns the scales of a block's parts. Q4_K and Q5_K: eight scales, then eight minima. Q6_K: one for 16
// channels. Others: one.
template <int TYPE> static HFQ_INLINE __m512 scales_of(const char *p) {
    if constexpr (TYPE == Q4_K || TYPE == Q5_K) {  // see PartScales
        const __m128i head = _mm_loadu_si128((const __m128i *)p);
        const __m128i low = _mm_and_si128(
            _mm_srlv_epi32(_mm_shuffle_epi32(head, 0xED), _mm_setr_epi32(0, 0, 0, 4)),
            _mm_setr_epi32(0x3F3F3F3F, 0x0F0F0F0F, 0x3F3F3F3F, 0x0F0F0F0F));
        const __m128i high = _mm_and_si128(_mm_srli_epi32(_mm_shuffle_epi32(head, 0xA5), 2),
                                           _mm_setr_epi32(0, 0x30303030, 0, 0x30303030));
        const __m512i both = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        const __m512 factors = _mm512_permutexvar_ps(both, _mm512_castps128_ps512(_mm_cvtph_ps(head)));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_or_si128(low, high))), factors);
    } else if constexpr (TYPE == Q6_K) {
        const __m512i scales = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 192)));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(scales), _mm512_set1_ps(avx512::half_at(p + 208)));
    } else if constexpr (TYPE == IQ4_XS) {
        return (__m512)Block<TYPE>(p).held[0];
    } else {
        return _mm512_set1_ps(Block<TYPE>(p).scale);
    }
}
#endif

// Unpacks channels [k, k + length), whole blocks, of rows [n, n + count), as unpack_rows.
template <int TYPE> static void unpack_blocks(const Layer &layer, int64_t n, int64_t count, int64_t k,
                                              int64_t length, int64_t, char *out) {
    typedef Block<TYPE> Of;
#if defined(HFQ_AMX)
    const Values<TYPE> values;
#endif
    for (int64_t r = 0; r < PAIR; r++) {  // rows beyond the last repeat the last
        const char *p = avx512::row_of_blocks(layer, n + least(r, count - 1)) + k / Of::SIZE * Of::NBYTES;
        char *to = out + r / BLOCK * amx::TILE + r % BLOCK * 64;
        for (int64_t i = 0; i < length; i += Of::SIZE, p += Of::NBYTES) {
            __builtin_prefetch(p + length / Of::SIZE * Of::NBYTES);
            HFQ_UNROLL
            for (int part = 0; part < Of::SIZE / 32; part++, to += 2 * amx::TILE) {
#if defined(HFQ_AMX)
                _mm512_store_si512(to, (__m512i)take<TYPE>(values, p, part));
#else
                float codes[32];
                avx512::vf found[32 / avx512::W];
                Of(p).take_codes(part, found);
                memcpy(codes, found, sizeof(codes));
                for (int j = 0; j < 32; j++) {
                    const uint16_t half = short_of(codes[j]);
                    memcpy(to + 2 * j, &half, 2);
                }
#endif
            }
        }
    }
}

// Writes the scales of channels [k, k + length), whole blocks, of a pair's rows: [part][32 rows]. Minima of
// Q4_K and Q5_K follow the scales of a block.
template <int TYPE> static void find_part_scales(const Layer &layer, int64_t n, int64_t count, int64_t k,
                                                 int64_t length, float *out) {
    typedef Block<TYPE> Of;
    for (int64_t r = 0; r < PAIR; r++) {
        const char *p = avx512::row_of_blocks(layer, n + least(r, count - 1)) + k / Of::SIZE * Of::NBYTES;
        float *to = out + r;
        for (int64_t i = 0; i < length; i += Of::SIZE, p += Of::NBYTES) {
            const Of block(p);
            for (int64_t part = 0; part < Of::SIZE / PART<TYPE>; part++, to += PAIR)
                *to = block.scale_of((int)(part * PART<TYPE> / 32), (int)(part % (32 / PART<TYPE>)));
            if constexpr (has_least<TYPE>())
                for (int part = 0; part < Of::SIZE / 32; part++, to += PAIR) *to = block.least_of(part);
        }
    }
}

// How blocks of a layer are unpacked.
struct BlockUnpacker {
    void (*codes)(const Layer &, int64_t, int64_t, int64_t, int64_t, int64_t, char *);
    void (*scales)(const Layer &, int64_t, int64_t, int64_t, int64_t, float *);
    int64_t part;  // channels that share a scale
};
template <int TYPE> static BlockUnpacker unpacker_of() {
    return {unpack_blocks<TYPE>, find_part_scales<TYPE>, PART<TYPE>};
}
static BlockUnpacker block_unpacker(const Layer &layer) {
    switch (layer.block_type) {
        case Q4_0: return unpacker_of<Q4_0>();
        case Q5_0: return unpacker_of<Q5_0>();
        case Q8_0: return unpacker_of<Q8_0>();
        case Q4_K: return unpacker_of<Q4_K>();
        case Q5_K: return unpacker_of<Q5_K>();
        case Q6_K: return unpacker_of<Q6_K>();
        case IQ4_NL: return unpacker_of<IQ4_NL>();
        case IQ4_XS: return unpacker_of<IQ4_XS>();
        default: return unpacker_of<MXFP4>();
    }
}
