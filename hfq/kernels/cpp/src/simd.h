// Vectors of an instruction set, and activations as floats. Included by instruction_set.h in the
// namespace of each instruction set.

#if HFQ_ISA == 2
const int W = 16;  // 32-bit lanes per vector
#else
const int W = 8;
#endif
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef int16_t vh __attribute__((vector_size(2 * W)));
typedef uint16_t vuh __attribute__((vector_size(2 * W)));
typedef int8_t vc __attribute__((vector_size(W)));
typedef uint8_t vuc __attribute__((vector_size(W)));
typedef uint8_t vub __attribute__((vector_size(32)));
typedef uint16_t vuw __attribute__((vector_size(32)));
typedef uint8_t vb __attribute__((vector_size(4 * W)));
typedef int8_t vsb __attribute__((vector_size(4 * W)));
typedef int16_t vs __attribute__((vector_size(4 * W)));

template <class V> static HFQ_INLINE V load(const void *p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(V));
    return v;
}
template <class V> static HFQ_INLINE void store(void *p, V v) { __builtin_memcpy(p, &v, sizeof(V)); }
static HFQ_INLINE vf all(float value) { return value - (vf){}; }
static HFQ_INLINE vf to_float(vu v) { return __builtin_convertvector((vi)v, vf); }

// from_int8: W signed bytes as floats.
// from_bytes: W unsigned bytes as integers.
// from_half: W float16 as floats.
// dot_bytes: sums of two products, each of an unsigned and a signed byte.
// dot_shorts: sums of two products of int16.
// pick_bytes: bytes of a table by their place in each 128 bits.
// pick_floats: floats of a table by their place.
// low_bytes, high_bytes, low_pairs, high_pairs: interleave the bytes, or pairs of bytes, of two vectors, from
// the low or the high half of each 128 bits.
#if HFQ_ISA == 1 && !defined(HFQ_EMULATE)
static HFQ_INLINE vf from_int8(const char *p) {
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static HFQ_INLINE vu from_bytes(const char *p) {
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
static HFQ_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
static HFQ_INLINE vf from_half(vuh v) { return (vf)_mm256_cvtph_ps((__m128i)v); }
static HFQ_INLINE vs dot_bytes(vb a, vsb b) { return (vs)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
static HFQ_INLINE vi dot_shorts(vs a, vs b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
static HFQ_INLINE vb pick_bytes(vb table, vb places) {
    return (vb)_mm256_shuffle_epi8((__m256i)table, (__m256i)places);
}
static HFQ_INLINE vf pick_floats(vf table, vi places) {
    return (vf)_mm256_permutevar8x32_ps((__m256)table, (__m256i)places);
}
static HFQ_INLINE vb low_bytes(vb a, vb b) { return (vb)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b); }
static HFQ_INLINE vb high_bytes(vb a, vb b) { return (vb)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b); }
static HFQ_INLINE vb low_pairs(vb a, vb b) { return (vb)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b); }
static HFQ_INLINE vb high_pairs(vb a, vb b) { return (vb)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b); }
#elif HFQ_ISA == 2 && !defined(HFQ_EMULATE)
static HFQ_INLINE vf from_int8(const char *p) {
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static HFQ_INLINE vu from_bytes(const char *p) {
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
static HFQ_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
static HFQ_INLINE vf from_half(vuh v) { return (vf)_mm512_cvtph_ps((__m256i)v); }
static HFQ_INLINE vs dot_bytes(vb a, vsb b) { return (vs)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
static HFQ_INLINE vi dot_shorts(vs a, vs b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
static HFQ_INLINE vb pick_bytes(vb table, vb places) {
    return (vb)_mm512_shuffle_epi8((__m512i)table, (__m512i)places);
}
static HFQ_INLINE vf pick_floats(vf table, vi places) {
    return (vf)_mm512_permutexvar_ps((__m512i)places, (__m512)table);
}
static HFQ_INLINE vb low_bytes(vb a, vb b) { return (vb)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b); }
static HFQ_INLINE vb high_bytes(vb a, vb b) { return (vb)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b); }
static HFQ_INLINE vb low_pairs(vb a, vb b) { return (vb)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
static HFQ_INLINE vb high_pairs(vb a, vb b) { return (vb)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }
#else
static inline vf from_int8(const char *p) {
    return __builtin_convertvector(__builtin_convertvector(load<vc>(p), vi), vf);
}
static inline vu from_bytes(const char *p) { return __builtin_convertvector(load<vuc>(p), vu); }
static inline vf fma(vf a, vf b, vf c) { return a * b + c; }
static inline vf from_half(vuh v) {
    vf out;
    for (int i = 0; i < W; i++) out[i] = half_to_float(v[i]);
    return out;
}
static inline vs dot_bytes(vb a, vsb b) {
    vs out;
    for (int i = 0; i < 2 * W; i++) out[i] = (int16_t)(a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1]);
    return out;
}
static inline vi dot_shorts(vs a, vs b) {
    vi out;
    for (int i = 0; i < W; i++) out[i] = a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return out;
}
static inline vb pick_bytes(vb table, vb places) {
    vb out;
    for (int i = 0; i < 4 * W; i++) out[i] = table[i / 16 * 16 + places[i] % 16];
    return out;
}
static inline vf pick_floats(vf table, vi places) {
    vf out;
    for (int i = 0; i < W; i++) out[i] = table[places[i]];
    return out;
}
static inline vb in_turns(vb a, vb b, int size, int first) {  // interleaves bytes from `first` on, of each 16
    vb out;
    for (int i = 0; i < 4 * W; i++) {
        int unit = i % 16 / size, from = i / 16 * 16 + first + unit / 2 * size + i % size;
        out[i] = unit % 2 ? b[from] : a[from];
    }
    return out;
}
static inline vb low_bytes(vb a, vb b) { return in_turns(a, b, 1, 0); }
static inline vb high_bytes(vb a, vb b) { return in_turns(a, b, 1, 8); }
static inline vb low_pairs(vb a, vb b) { return in_turns(a, b, 2, 0); }
static inline vb high_pairs(vb a, vb b) { return in_turns(a, b, 2, 8); }
#endif

// Returns the values of W codes by their lowest four bits.
static HFQ_INLINE vf pick_values(const vf *values, vu codes) {
#if HFQ_ISA == 1 && !defined(HFQ_EMULATE)
    __m256 low = _mm256_permutevar8x32_ps((__m256)values[0], (__m256i)codes);
    __m256 high = _mm256_permutevar8x32_ps((__m256)values[1], (__m256i)codes);
    return (vf)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32((__m256i)codes, 28)));
#elif HFQ_ISA == 2 && !defined(HFQ_EMULATE)
    return (vf)_mm512_permutexvar_ps((__m512i)codes, (__m512)values[0]);
#else
    float table[16];
    __builtin_memcpy(table, values, sizeof(table));
    vf out;
    for (int i = 0; i < W; i++) out[i] = table[codes[i] & 15];
    return out;
#endif
}

// Widens the i-th W of 32 bytes to integers.
template <bool SIGNED> static HFQ_INLINE vu widened(vub bytes, int i) {
#if HFQ_ISA == 1 && !defined(HFQ_EMULATE)
    __m128i half =
        i / 2 ? _mm256_extracti128_si256((__m256i)bytes, 1) : _mm256_castsi256_si128((__m256i)bytes);
    half = i % 2 ? _mm_srli_si128(half, 8) : half;
    return (vu)(SIGNED ? _mm256_cvtepi8_epi32(half) : _mm256_cvtepu8_epi32(half));
#elif HFQ_ISA == 2 && !defined(HFQ_EMULATE)
    const __m128i half =
        i ? _mm256_extracti128_si256((__m256i)bytes, 1) : _mm256_castsi256_si128((__m256i)bytes);
    return (vu)(SIGNED ? _mm512_cvtepi8_epi32(half) : _mm512_cvtepu8_epi32(half));
#else
    vu out;
    for (int j = 0; j < W; j++) out[j] = SIGNED ? (uint32_t)(int8_t)bytes[i * W + j] : bytes[i * W + j];
    return out;
#endif
}

// Keeps a value in a register at this point. The compiler would otherwise compute all terms of a sum first,
// more than the registers hold, or load a word again for each use.
template <class V> static HFQ_INLINE void keep_here(V &value) {
#if HFQ_ISA != 0 && defined(__x86_64__) && !defined(HFQ_EMULATE)
    __asm__("" : "+v"(value));
#endif
}

// Stops the compiler from precomputing one address per unrolled step.
static HFQ_INLINE void keep_place(const char *&place) {
#if HFQ_ISA != 0 && defined(__x86_64__) && !defined(HFQ_EMULATE)
    __asm__("" : "+r"(place));
#endif
}

// Combines the sums of the highest limbs, and of the two others, to floats.
static HFQ_INLINE vf of_limbs(vi high, vi low) {
    return fma(__builtin_convertvector(high, vf), all(65536.0f), __builtin_convertvector(low, vf));
}

static HFQ_INLINE float sum_of(vf v) {
#if HFQ_ISA == 2 && !defined(HFQ_EMULATE)
    const __m512 halves = _mm512_add_ps((__m512)v, _mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4E));
    const __m512 fourths = _mm512_add_ps(halves, _mm512_shuffle_f32x4(halves, halves, 0xB1));
    const __m512 pairs = _mm512_add_ps(fourths, _mm512_permute_ps(fourths, 0x4E));
    return _mm512_cvtss_f32(_mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0xB1)));
#else
    float half[W / 2];
    for (int i = 0; i < W / 2; i++) half[i] = v[i] + v[i + W / 2];
    for (int size = W / 4; size; size /= 2)
        for (int i = 0; i < size; i++) half[i] += half[i + size];
    return half[0];
#endif
}

// Returns the bits of the largest magnitude: 0x7F800000 or more if a value is not finite.
static uint32_t largest_bits(const float *x, int64_t count) {
    vu largest = {};
    uint32_t found = 0;
    int64_t k = 0;
    for (; k + W <= count; k += W) {
        vu bits = load<vu>(x + k) & 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    }
    for (; k < count; k++) found = most(found, as_bits(x[k]) & 0x7FFFFFFF);
    for (int i = 0; i < W; i++) found = most(found, largest[i]);
    return found;
}

// Converts activations to floats, padded with zeros to `stride` channels and padded_rows rows. Returns true
// if all are finite.
static bool widen(const Layer &layer, const char *x, int32_t dtype, int64_t rows, int64_t x_stride,
                  int64_t stride, float *out) {
    int64_t size = layer.in_features, padded = padded_rows(layer, rows);
    for (int64_t m = 0; m < rows; m++) {
        const char *from = x + m * x_stride * (dtype == F32 ? 4 : 2);
        float *to = out + m * stride;
        int64_t k = 0;
        if (dtype == F32) __builtin_memcpy(to, from, 4 * size), k = size;
        for (; k + W <= size; k += W) {
            vuh narrow = load<vuh>(from + 2 * k);
            store(to + k, dtype == F16 ? from_half(narrow) : (vf)(__builtin_convertvector(narrow, vu) << 16));
        }
        for (; k < size; k++) to[k] = float_at(from, dtype, k);
        __builtin_memset(to + size, 0, 4 * (stride - size));
    }
    __builtin_memset(out + rows * stride, 0, 4 * (padded - rows) * stride);
    return largest_bits(out, rows * stride) < 0x7F800000;
}
