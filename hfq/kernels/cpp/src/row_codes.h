// Decoding of rows of codes, and products of one activation row with one of them. Included by
// instruction_set.h in the namespace of each instruction set.

// Decodes W codes to floats. e4m3 values are divided by 256, and NaN codes become numbers.
template <int KIND> static HFQ_INLINE vf decode(const char *p) {
    if (KIND == E5M2) return from_half(__builtin_convertvector(load<vuc>(p), vuh) << 8);
    return from_half((vuh)((__builtin_convertvector(load<vc>(p), vh) << 7) & (int16_t)0xBFFF));
}

// Returns the values of W 4-bit codes.
static HFQ_INLINE vf look_up(vu codes, const float *values) {
    vf table[16 / W];
    __builtin_memcpy(table, values, sizeof(table));
    return pick_values(table, codes);
}

static HFQ_INLINE vf decode_nibbles(const char *p, const float *values, int first) {
    vu words = (vu){} + load32(p), shifts;
    for (int i = 0; i < W; i++) shifts[i] = (uint32_t)(i % 8 * 4);
#if HFQ_ISA == 2 && !defined(HFQ_EMULATE)  // compilers set the elements one by one, which is slow
    const __m512i second = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    words = (vu)_mm512_permutexvar_epi32(second, _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)p)));
#elif HFQ_ISA == 2
    for (int i = 8; i < W; i++) words[i] = load32(p + 4);
#endif
    return look_up(words >> (shifts ^ (uint32_t)first) & 15u, values);
}

// Decodes eight codes at one place of eight 16-bit words. With 16 elements, also the codes at the next place.
static HFQ_INLINE vf decode_quads(const char *p, int place) {
    vu words;
#if HFQ_ISA == 2 && !defined(HFQ_EMULATE)
    const __m512i places = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
    const __m256i eight = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    words = (vu)_mm512_broadcast_i64x4(eight) >> ((vu)places + (uint32_t)(4 * place));
#elif HFQ_ISA == 2
    uint16_t narrow[8];
    __builtin_memcpy(narrow, p, 16);
    for (int i = 0; i < W; i++) words[i] = (uint32_t)narrow[i % 8] >> 4 * (place + i / 8);
#else
    words = __builtin_convertvector(load<vuh>(p), vu) >> (uint32_t)(4 * place);
#endif
    return to_float(words & 15u);
}

// The codes of an output row from a channel on, the operand of `decode_two` and `code_at`.
struct Codes {
    const char *row;   // address of the row's codes
    float values[16];  // NIBBLES: value of each code
    int first;         // NIBBLES: bits to shift a byte by for its first code, 0 or 4
};

template <int KIND> static HFQ_INLINE const char *codes_of(const Layer &layer, int64_t n) {
    if (KIND == QUADS) return layer.codes + 2 * (n / 4 * layer.in_features + n % 4 * 16);
    return layer.codes + n * layer.row_nbytes;
}

template <int KIND> static HFQ_INLINE void open_codes(const Layer &layer, Codes &codes) {
    if (KIND == NIBBLES) __builtin_memcpy(codes.values, layer.values, sizeof(codes.values));
    codes.first = layer.high_first ? 4 : 0;
}

// Byte offset of the codes from channel k on, and bytes of a number of codes. k must be even for NIBBLES and
// a multiple of 16 for QUADS.
template <int KIND> static HFQ_INLINE const char *codes_at(const char *row, int64_t k) {
    return row + (KIND == NIBBLES ? k / 2 : KIND == QUADS ? k / 64 * 128 + k / 32 % 2 * 16 : k);
}
template <int KIND> constexpr int64_t bytes_of(int64_t codes) {
    return KIND == NIBBLES ? (codes + 1) / 2 : codes;
}

// Decodes 2 * W codes from channel k on; e4m3 values are divided by 256.
template <int KIND>
static HFQ_INLINE void decode_two(const char *row, int64_t k, const Codes &codes, vf &low, vf &high) {
    const char *p = codes_at<KIND>(row, k);
    if constexpr (KIND == NIBBLES) {
        low = decode_nibbles(p, codes.values, codes.first),
        high = decode_nibbles(p + W / 2, codes.values, codes.first);
        return;
    }
    if constexpr (KIND == QUADS) {
        low = decode_quads(p, (int)(k % 32 / 8)), high = decode_quads(p, (int)(k % 32 / 8) + W / 8);
        return;
    }
    if constexpr (KIND == INT8) {
        low = from_int8(p), high = from_int8(p + W);
        return;
    }
    if constexpr (KIND == BIASED || KIND == UINT8) {
        const float bias = KIND == BIASED ? 128.0f : 0.0f;
        low = to_float(from_bytes(p)) - bias, high = to_float(from_bytes(p + W)) - bias;
        return;
    }
#if HFQ_ISA == 1 && !defined(HFQ_EMULATE)
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    __m256i wide = KIND == E4M3 ? _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7),
                                                   _mm256_set1_epi16((short)0xBFFF))
                                : _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
    low = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(wide)),
    high = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(wide, 1));
#else
    low = decode<KIND>(p), high = decode<KIND>(p + W);
#endif
}

template <int KIND> static float decode_one(const char *row, int64_t k, const Codes &codes) {
    const char *p = codes_at<KIND>(row, k);
    if (KIND == NIBBLES) return codes.values[(uint8_t)*p >> (4 * (k % 2) ^ codes.first) & 15];
    if (KIND == QUADS) return (float)(load16(p + 2 * (k % 8)) >> 4 * (k % 32 / 8) & 15);
    if (is_integer(KIND)) return integer_value((uint8_t)*p, KIND);
    if (KIND == UINT8) return (float)(uint8_t)*p;
    return code_value((uint8_t)*p, KIND);
}

// Returns true if any of these e4m3 codes is NaN.
static bool has_nan(const char *codes, int64_t count) {
    vub worst = {};
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        vub rest = load<vub>(codes + i) & 0x7F;
        worst = rest > worst ? rest : worst;
    }
    uint64_t found = 0, parts[4];
    store(parts, (vub)(worst == 0x7F));
    for (; i < count; i++) found |= (codes[i] & 0x7F) == 0x7F;
    return found | parts[0] | parts[1] | parts[2] | parts[3];
}

// One weight, or W weights, bit-identical to the reference kernel's.
template <int KIND, class V> static HFQ_INLINE V weight_of(const Layer &layer, V value, V scale, V zero) {
    if (adds_zeros(KIND, layer)) return value * scale + zero;
    if (is_integer(KIND)) return (value - zero) * scale * layer.shared;
    if (KIND == NIBBLES) return (value - zero) * scale;
    return layer.divides ? value / scale : value * scale;
}

// Dequantizes weights whose groups are scattered over the input.
template <int KIND>
static void decode_scattered(const Layer &layer, int64_t n, int64_t k, int64_t count, float *out) {
    Codes codes;
    open_codes<KIND>(layer, codes);
    const char *row = codes_of<KIND>(layer, n);
    for (int64_t i = k; i < k + count; i++) {
        int64_t group = group_of(layer, i);
        float scale = scale_at(layer, scale_place(layer, n, group)), zero = row_zero(layer, n, group);
        out[i - k] = weight_of<KIND, float>(layer, decode_one<KIND>(row, i, codes), scale, zero);
    }
}

// Dequantizes weights [k, k + count) of one output row, bit-identical to the reference kernel's.
template <int KIND>
static void decode_row(const Layer &layer, int64_t n, int64_t k, int64_t count, float *out) {
    if (KIND == BLOCKS) return block_reader(layer).decode(layer, n, k, count, out);
    if (KIND != E4M3 && KIND != E5M2 && layer.index_nbytes)
        return decode_scattered<KIND>(layer, n, k, count, out);
    Codes codes;
    open_codes<KIND>(layer, codes);
    const char *row = codes_of<KIND>(layer, n);
    for (int64_t at = k, stop; at < k + count; at = stop) {
        int64_t segment = at / layer.block_in;
        stop = least(k + count, (segment + 1) * layer.block_in);
        float scale = scale_at(layer, scale_place(layer, n, segment)), zero = row_zero(layer, n, segment);
        bool slow = KIND == E4M3 && has_nan(row + at, stop - at);
        int64_t i = at;
        vf low, high;
        if (!slow)
            for (; i + 2 * W <= stop; i += 2 * W) {
                decode_two<KIND>(row, i, codes, low, high);
                if (KIND == E4M3) low *= 256.0f, high *= 256.0f;
                store(out + i - k, weight_of<KIND, vf>(layer, low, all(scale), all(zero)));
                store(out + i - k + W, weight_of<KIND, vf>(layer, high, all(scale), all(zero)));
            }
        for (; i < stop; i++)
            out[i - k] = weight_of<KIND, float>(layer, decode_one<KIND>(row, i, codes), scale, zero);
    }
}

// Multiplies 4 * W codes, minus a zero point, by activations. `worst` collects the largest magnitudes of e4m3
// codes.
template <int KIND> static HFQ_INLINE void dot_codes(const char *row, int64_t k, const Codes &codes, vf zero,
                                                     const float *x, vf *sum, vub &worst) {
    HFQ_UNROLL
    for (int j = 0; j < 4; j += 2) {
        vf low, high;
        decode_two<KIND>(row, k + j * W, codes, low, high);
        if (is_integer(KIND) || KIND == NIBBLES) low -= zero, high -= zero;
        sum[j] = fma(low, load<vf>(x + j * W), sum[j]);
        sum[j + 1] = fma(high, load<vf>(x + (j + 1) * W), sum[j + 1]);
    }
    if (KIND != E4M3) return;
    HFQ_UNROLL
    for (int j = 0; j < 4 * W; j += 32) {
        vub rest = load<vub>(row + k + j) & 0x7F;
        worst = rest > worst ? rest : worst;
    }
}

// Multiplies one output row by one activation row, without storing decoded weights.
template <int KIND> static float dot_row(const Layer &layer, int64_t n, const float *x) {
    Codes codes;
    open_codes<KIND>(layer, codes);
    const char *row = codes_of<KIND>(layer, n);
    int64_t size = layer.in_features, first = scale_place(layer, n, 0);
    const char *scales = layer.scales + 4 * first;  // float32, contiguous
    const bool adds = adds_zeros(KIND, layer);
    vf total = all(0.0f);
    vub worst = {};
    for (int64_t at = 0, stop, segment = 0; at < size; at = stop, segment++) {
        stop = least(size, at + layer.block_in);
        vf sum[4] = {}, plain = all(0.0f),
           zero = all(KIND == E4M3 || KIND == E5M2 || adds ? 0.0f : row_zero(layer, n, segment));
        int64_t i = at;
        for (; i + 4 * W <= stop; i += 4 * W) {
            __builtin_prefetch(codes_at<KIND>(row, i) + AHEAD);
            dot_codes<KIND>(row, i, codes, zero, x + i, sum, worst);
            if (adds)
                plain += (load<vf>(x + i) + load<vf>(x + i + W)) +
                         (load<vf>(x + i + 2 * W) + load<vf>(x + i + 3 * W));
        }
        if (i < stop) {
            char rest[4 * W];
            float part[4 * W];
            __builtin_memset(rest, 0, sizeof(rest)), __builtin_memset(part, 0, sizeof(part));
            __builtin_memcpy(rest, codes_at<KIND>(row, i), bytes_of<KIND>(stop - i)),
                __builtin_memcpy(part, x + i, 4 * (stop - i));
            dot_codes<KIND>(rest, 0, codes, zero, part, sum, worst);
            for (int64_t j = 0; adds && j < 4 * W; j += W) plain += load<vf>(part + j);
        }
        vf piece = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        float scale = layer.scale_dtype == F32 ? as_float(load32(scales + 4 * segment))
                                               : scale_at(layer, first + segment * layer.scale_step);
        bool divides = KIND <= E5M2 && layer.divides;
        if (adds) total = fma(plain, all(row_zero(layer, n, segment)), total);
        total = divides ? total + piece / scale : fma(piece, all(scale), total);
    }
    uint8_t magnitudes[32], found = 0;
    store(magnitudes, worst);
    for (int i = 0; i < 32; i++) found = found > magnitudes[i] ? found : magnitudes[i];
    if (KIND == E4M3 && found == 0x7F) return as_float(0x7FC00000);
    return sum_of(total) * (KIND == E4M3 ? 256.0f : is_integer(KIND) ? layer.shared : 1.0f);
}
