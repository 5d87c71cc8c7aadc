// Products of int8 and rounding to int8, in plain C++ and by AVX2, and the arguments of all engines. Included
// by int8.cpp, in its namespace.

// One multiplication of rounded activations by a weight.
struct MatmulArgs {
    const int8_t *weight;        // codes, int8 [out_features, in_features]
    const int16_t *activations;  // codes within int8's range, int16 [rows, in_features]
    int32_t *result;             // sums, int32 [rows, out_features]
    int64_t rows;                // rows of activations
    int64_t in_features;         // input channels
    int64_t out_features;        // outputs
    int8_t *packed = nullptr;    // packed codes of activations for dot products or tiles, or null
    int32_t *sums = nullptr;     // scratch for each thread's sums; null if `packed` is null
    int32_t *offsets = nullptr;  // excess of each row's dot products; null if `packed` is null
};

void multiply_plainly(const MatmulArgs &args, int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n++)
        for (int64_t m = 0; m < args.rows; m++) {
            const int8_t *w = args.weight + n * args.in_features;
            const int16_t *x = args.activations + m * args.in_features;
            int32_t sum = 0;
            for (int64_t k = 0; k < args.in_features; k++) sum += (int32_t)w[k] * x[k];
            args.result[m * args.out_features + n] = sum;
        }
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
#define UNROLLED _Pragma("GCC unroll 4")

const int64_t AHEAD = 4096;  // bytes from the codes being read to those prefetched: one page

AVX2 inline int32_t sum_of(__m256i lanes) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1)));
}

// Multiplies OUT rows of the weight by ROWS rows of activations. Each vector of codes is widened once.
template <int OUT, int ROWS>
AVX2 inline void tile(const MatmulArgs &args, int64_t n, int64_t m) {
    const int64_t in = args.in_features;
    const int8_t *w = args.weight + n * in;
    const int16_t *x = args.activations + m * in;
    __m256i sums[OUT][ROWS];
    UNROLLED for (int i = 0; i < OUT; i++)
        UNROLLED for (int j = 0; j < ROWS; j++) sums[i][j] = _mm256_setzero_si256();
    int64_t k = 0;
    for (; k + 16 <= in; k += 16) {
        __m256i wide[OUT];
        UNROLLED
        for (int i = 0; i < OUT; i++)
            wide[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + i * in + k)));
        UNROLLED for (int j = 0; j < ROWS; j++) {
            __m256i values = _mm256_loadu_si256((const __m256i *)(x + j * in + k));
            UNROLLED
            for (int i = 0; i < OUT; i++)
                sums[i][j] = _mm256_add_epi32(sums[i][j], _mm256_madd_epi16(wide[i], values));
        }
    }
    UNROLLED for (int i = 0; i < OUT; i++)
        UNROLLED for (int j = 0; j < ROWS; j++) {
            int32_t sum = sum_of(sums[i][j]);
            for (int64_t rest = k; rest < in; rest++) sum += (int32_t)w[i * in + rest] * x[j * in + rest];
            args.result[(m + j) * args.out_features + n + i] = sum;
        }
}

// Multiplies one row, with sums in four vectors, so that additions do not wait for each other.
AVX2 inline void row(const MatmulArgs &args, int64_t n, int64_t m) {
    const int64_t in = args.in_features;
    const int8_t *w = args.weight + n * in;
    const int16_t *x = args.activations + m * in;
    __m256i sums[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                       _mm256_setzero_si256()};
    int64_t k = 0;
    for (; k + 64 <= in; k += 64) {
        __builtin_prefetch(w + k + AHEAD);
        UNROLLED for (int i = 0; i < 4; i++) {
            __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + k + 16 * i)));
            __m256i values = _mm256_loadu_si256((const __m256i *)(x + k + 16 * i));
            sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(wide, values));
        }
    }
    int32_t sum =
        sum_of(_mm256_add_epi32(_mm256_add_epi32(sums[0], sums[1]), _mm256_add_epi32(sums[2], sums[3])));
    for (; k < in; k++) sum += (int32_t)w[k] * x[k];
    args.result[m * args.out_features + n] = sum;
}

AVX2 void multiply_rows(const MatmulArgs &args, int64_t first, int64_t last, int64_t from, int64_t to) {
    int64_t n = first;
    for (; to - from > 1 && n + 2 <= last; n += 2) {
        int64_t m = from;
        for (; m + 4 <= to; m += 4) tile<2, 4>(args, n, m);
        for (; m + 2 <= to; m += 2) tile<2, 2>(args, n, m);
        for (; m < to; m++) tile<2, 1>(args, n, m);
    }
    for (; n < last; n++)
        for (int64_t m = from; m < to; m++) row(args, n, m);
}

// Multiplies as many activations together as stay in the second-level cache while the weight is read.
AVX2 void multiply_avx2(const MatmulArgs &args, int64_t first, int64_t last) {
    int64_t step = (128 << 10) / args.in_features / 4 * 4;
    if (step < 4) step = 4;
    for (int64_t from = 0; from < args.rows; from += step)
        multiply_rows(args, first, last, from, from + step < args.rows ? from + step : args.rows);
}
#endif

inline float widened(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

inline float from_half(uint16_t half) {
    uint32_t bits = (half & 0x7fffu) << 13 | ((half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0);
    float value;
    memcpy(&value, &bits, 4);
    return (half & 0x8000 ? -value : value) * 0x1p112f;  // difference of the exponents' offsets
}

inline uint16_t narrowed(float value) {  // to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void widen_plainly(const uint16_t *narrow, int64_t count, float *values) {
    for (int64_t k = 0; k < count; k++) values[k] = widened(narrow[k]);
}

// Returns the amplitude of a row; NaN if a value is NaN.
float amplitude_plainly(const float *values, int64_t count, float amax) {
    for (int64_t k = 0; k < count; k++) {
        float size = fabsf(values[k]);
        if (!(size <= amax)) amax = size;
        if (size != size) return size;
    }
    return amax;
}

void round_plainly(const float *values, int64_t count, float scale, int16_t *codes) {
    for (int64_t k = 0; k < count; k++) {
        float code = nearbyintf(values[k] / scale);
        codes[k] = code != code ? 0 : (int16_t)(code < -128 ? -128 : code > 127 ? 127 : code);
    }
}

#if defined(__x86_64__)
AVX2 float amplitude_avx2(const float *values, int64_t count, float amax) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 most = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
    int64_t k = 0;
    for (; k + 8 <= count; k += 8) {
        __m256 size = _mm256_andnot_ps(sign, _mm256_loadu_ps(values + k));
        odd = _mm256_or_ps(odd, _mm256_cmp_ps(size, size, _CMP_UNORD_Q));
        most = _mm256_max_ps(most, size);
    }
    if (_mm256_movemask_ps(odd)) return NAN;
    float lanes[8];
    _mm256_storeu_ps(lanes, most);
    for (float lane : lanes) amax = lane > amax ? lane : amax;
    return amplitude_plainly(values + k, count - k, amax);
}

AVX2 void widen_avx2(const uint16_t *narrow, int64_t count, float *values) {
    int64_t k = 0;
    for (; k + 8 <= count; k += 8) {
        __m256i wide =
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(narrow + k))), 16);
        _mm256_storeu_ps(values + k, _mm256_castsi256_ps(wide));
    }
    widen_plainly(narrow + k, count - k, values + k);
}

AVX2 void round_avx2(const float *values, int64_t count, float scale, int16_t *codes) {
    const __m256 by = _mm256_set1_ps(scale), low = _mm256_set1_ps(-128), high = _mm256_set1_ps(127);
    int64_t k = 0;
    for (; k + 8 <= count; k += 8) {
        __m256 code = _mm256_div_ps(_mm256_loadu_ps(values + k), by);
        code = _mm256_and_ps(_mm256_round_ps(code, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                             _mm256_cmp_ps(code, code, _CMP_ORD_Q));
        __m256i whole = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(code, low), high));
        __m256i narrow = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole, whole), 0x08);
        _mm_storeu_si128((__m128i *)(codes + k), _mm256_castsi256_si128(narrow));
    }
    round_plainly(values + k, count - k, scale, codes + k);
}
#endif

// Scratch of a caller, kept between calls: codes and scales of its activations, and sums.
thread_local std::vector<int32_t> activation_scratch;

enum class Engine { plain, avx2, dots, tiles };

// Functions of an engine.
struct Level {
    Engine engine;  // the engine
    // Computes outputs [first, last) of all rows.
    void (*multiply)(const MatmulArgs &args, int64_t first, int64_t last);
    // Returns the largest magnitude of `count` values and `amax`; NaN if a value is NaN.
    float (*amplitude)(const float *values, int64_t count, float amax);
    // Divides values by their scale, and rounds to int8 codes, stored as int16.
    void (*round)(const float *values, int64_t count, float scale, int16_t *codes);
    // Converts bfloat16 to float32.
    void (*widen)(const uint16_t *narrow, int64_t count, float *values);
};

// Scaling of sums: y[m, n] = sum * scales[m] * (steps[n] * multiplier), float32 or bfloat16. If y is null,
// sums are not scaled.
struct Scaling {
    const float *scales;  // scale of each row of activations
    const char *steps;    // scales of the weight, one per output or one for all, at any alignment
    int64_t steps_count;  // number of `steps`
    int steps_dtype;      // 0 float32, 1 bfloat16, 2 float16
    float multiplier;     // factor of `steps`
    char *y;              // address of the results, [rows, out_features], or null
    int is_bfloat16;      // 1: `y` is bfloat16; 0: float32
    float step(int64_t n) const {
        const char *at = steps + (steps_count == 1 ? 0 : n) * (steps_dtype ? 2 : 4);
        uint16_t narrow;
        float value;
        if (steps_dtype)
            memcpy(&narrow, at, 2), value = steps_dtype == 1 ? widened(narrow) : from_half(narrow);
        else memcpy(&value, at, 4);
        return value * multiplier;
    }

    void put(const MatmulArgs &args, int64_t place, int32_t sum, int64_t m, float step) const {
        if (!y) {
            args.result[place] = sum;
            return;
        }
        const float value = (float)sum * scales[m] * step;
        if (is_bfloat16) ((uint16_t *)y)[place] = narrowed(value);
        else ((float *)y)[place] = value;
    }

    void apply(const MatmulArgs &args, int64_t first, int64_t last) const {
        if (!y) return;
        for (int64_t m = 0; m < args.rows; m++)
            for (int64_t n = first; n < last; n++) {
                const int64_t place = m * args.out_features + n;
                put(args, place, args.result[place], m, step(n));
            }
    }
};

// Rows of activations to be rounded.
struct Rows {
    const char *x;        // address of the activations
    int64_t stride;       // elements from one row to the next
    int is_bfloat16;      // 1: `x` is bfloat16; 0: float32
    int64_t in_features;  // elements per row
    float top;            // divisor of a row's amplitude for its scale
    float bound;          // upper bound of amplitudes
    // Returns `count` values of a row as float32; converted values are written to `wide`.
    const float *values(const Level &level, int64_t m, int64_t k, int64_t count, float *wide) const {
        if (!is_bfloat16) return (const float *)x + m * stride + k;
        level.widen((const uint16_t *)x + m * stride + k, count, wide);
        return wide;
    }

    float scale(float amax) const {
        if (amax > bound) amax = bound;
        return amax == 0 ? 1 : amax / top;
    }
};

// Rounds rows to codes, with one scale per row.
void round_rows(const Level &level, const Rows &given, int64_t rows, float *wide, float *scales,
                int16_t *codes) {
    KeptSubnormals here;
    for (int64_t m = 0; m < rows; m++) {
        const float *values = given.values(level, m, 0, given.in_features, wide);
        scales[m] = given.scale(level.amplitude(values, given.in_features, 0.0f));
        level.round(values, given.in_features, scales[m], codes + m * given.in_features);
    }
}
