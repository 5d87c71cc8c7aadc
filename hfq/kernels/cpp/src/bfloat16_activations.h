// Activations as bfloat16, packed in the order in which tiles and vectors read them. Included by bfloat16.h,
// in its namespace.
//
// Layout: [`depth` channels][block of 16 rows][32 channels]. The innermost entry is a tile: [row][channel] as
// a left factor, [pair of channels][row][2] as a right factor. The tiles of a last block of fewer rows have
// fewer bytes. Bytes loaded beyond them only affect sums that are not used. If vectors multiply up to HALF
// rows as a right factor, tiles are [four channels][row][4], so that a row's sums use two lanes.

// Arguments of the packing of activations.
struct Packing {
    const Layer *layer;             // layer that they are multiplied by
    const char *x;                  // address of the activations, of `dtype`
    int64_t rows;                   // packed rows: two per row of float16
    int64_t x_stride;               // elements from one row of `x` to the next
    int64_t depth;                  // channels that are unpacked together
    int32_t dtype;                  // Dtype of `x`, BF16 or F16
    bool apart;                     // true: rows are separate, for bfloat16_dots.h: [64 channels][row][64]
    bool halved;                    // true: tiles have fours of channels, for sums in two lanes
    char *out;                      // address of the packed activations, bfloat16
    float *factors;                 // two per packed row, which undo the normalization
    float *sums;                    // negative sums of rows (sum_parts_of), or null
    alignas(64) int16_t order[64];  // order of 64 channels (find_order)
};

inline int64_t steps(const Layer &layer) { return up(layer.in_features, 2 * CHANNELS) / CHANNELS; }

// Byte offset of a block's tiles of the channels from k on.
inline int64_t place_of(const Layer &layer, int64_t rows, int64_t depth, int64_t block, int64_t k) {
    const int64_t start = k / depth * depth, count = least(depth, steps(layer) * CHANNELS - start);
    return 2 * (start * rows + block * BLOCK * count + (k - start) * least(BLOCK, rows - block * BLOCK));
}

inline int64_t packed_floats(const Layer &layer, int64_t rows) {
    return rows * steps(layer) * CHANNELS / 2 + 2 * rows + 512;
}

// Returns factors, powers of two, that normalize a row of very small or large numbers, and their inverses.
// Products of bfloat16 would treat subnormal numbers as zeros.
void normalize(const char *x, int64_t count, float *by, float *back) {
    uint16_t largest = 0;
    int64_t k = 0;
#if defined(HFQ_AMX)
    __m512i found = _mm512_setzero_si512();
    for (; k + 32 <= count; k += 32)
        found = _mm512_max_epu16(found,
                                 _mm512_and_si512(_mm512_loadu_si512(x + 2 * k), _mm512_set1_epi16(0x7FFF)));
    uint16_t lanes[32];
    _mm512_storeu_si512(lanes, found);
    for (uint16_t lane : lanes) largest = (uint16_t)most(largest, lane);
#endif
    for (; k < count; k++) largest = (uint16_t)most(largest, load16(x + 2 * k) & 0x7FFF);
    const int exponent = largest >> 7,
              power = !largest || exponent == 255 || (exponent > 100 && exponent < 180) ? 0 : 127 - exponent;
    const int halves[2] = {power / 2, power - power / 2};
    for (int i = 0; i < 2; i++) {
        by[i] = as_float((uint32_t)(127 + halves[i]) << 23);
        back[i] = as_float((uint32_t)(127 - halves[i]) << 23);
    }
}

#if defined(HFQ_AMX)
// Multiplies 32 bfloat16 by two powers of two.
static inline __m512i scaled(__m512i x, const float *by) {
    const __m512 first = _mm512_set1_ps(by[0]), second = _mm512_set1_ps(by[1]);
    __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
           odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xFFFF0000)));
    even = _mm512_mul_ps(_mm512_mul_ps(even, first), second),
    odd = _mm512_mul_ps(_mm512_mul_ps(odd, first), second);
    return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16),
                           _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32((int)0xFFFF0000)));
}
#endif

// Packs 64 channels of a block of `count` rows to two tiles; `left` channels exist.
static void pack_two(const Packing &to, const char *x, int64_t stride, int64_t count, int64_t left,
                     const float (*by)[2], char *const *outs) {
    const bool is_left = has_columns(*to.layer);
#if defined(HFQ_AMX)
    const __m512i first = _mm512_load_si512(to.order), second = _mm512_load_si512(to.order + 32);
    const __mmask32 low = left >= 32 ? ~0u : (1u << left) - 1, high = left >= 64  ? ~0u
                                                                      : left > 32 ? (1u << (left - 32)) - 1
                                                                                  : 0;
    __m512i tiles[2][16] = {};
    for (int64_t m = 0; m < count; m++, x += 2 * stride) {
        __m512i a = _mm512_maskz_loadu_epi16(low, x), b = _mm512_maskz_loadu_epi16(high, x + 64);
        if (by[m][0] != 1 || by[m][1] != 1) a = scaled(a, by[m]), b = scaled(b, by[m]);
        tiles[0][m] = _mm512_permutex2var_epi16(a, first, b),
        tiles[1][m] = _mm512_permutex2var_epi16(a, second, b);
    }
    for (int t = 0; t < 2; t++) {
        char *out = outs[t];
        if (is_left)
            for (int64_t m = 0; m < count; m++) _mm512_storeu_si512(out + 64 * m, tiles[t][m]);
        else if (to.halved) {
            alignas(64) char row[64];
            for (int64_t m = 0; m < count; m++) {
                _mm512_store_si512(row, tiles[t][m]);
                for (int i = 0; i < 8; i++) memcpy(out + 8 * (count * i + m), row + 8 * i, 8);
            }
        } else {
            if (count > 1) amx::transpose(tiles[t]);
            if (count == 1) _mm512_storeu_si512(out, tiles[t][0]);
            else
                for (int i = 0; i < 16; i++)
                    _mm512_mask_storeu_epi32(out + 4 * count * i, (__mmask16)((1u << count) - 1),
                                             tiles[t][i]);
        }
    }
#else
    for (int t = 0; t < 2; t++)
        for (int64_t m = 0; m < count; m++)
            for (int i = 0; i < 32; i++) {
                const int64_t k = to.order[32 * t + i], lanes = to.halved ? 4 : 2;
                const int64_t place =
                    is_left ? 32 * m + i : lanes * count * (i / lanes) + lanes * m + i % lanes;
                const float value =
                    k < left ? float_at(x + 2 * m * stride, BF16, k) * by[m][0] * by[m][1] : 0;
                const uint16_t half = (uint16_t)(as_bits(value) >> 16);
                memcpy(outs[t] + 2 * place, &half, 2);
            }
#endif
}

// Packed rows of bfloat16 per row of activations.
inline int64_t rows_of(int32_t dtype) { return dtype == F16 ? 2 : 1; }

// Splits float16 into a sum of two bfloat16: its 11 bits, rounded to 8, and the rest.
void split_halves(const char *x, int64_t count, uint16_t *first, uint16_t *rest) {
    int64_t k = 0;
#if defined(HFQ_AMX)
    for (; k + 16 <= count; k += 16) {
        const __m512 value = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + 2 * k)));
        const __m256i high = (__m256i)_mm512_cvtneps_pbh(value);
        const __m512 taken = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
        const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(value), _mm512_set1_ps(65504), _CMP_LE_OQ);
        _mm256_storeu_si256((__m256i *)(first + k), high);
        _mm256_storeu_si256((__m256i *)(rest + k),
                            (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_sub_ps(finite, value, taken)));
    }
#endif
    for (; k < count; k++) {
        const float value = float_at(x, F16, k);
        first[k] = float_to_bfloat(value);
        rest[k] = float_to_bfloat(value - value == 0 ? value - as_float((uint32_t)first[k] << 16) : 0);
    }
}

// True if a block's rows are gathered before they are packed; and the floats of scratch for them.
inline bool is_brought(const Layer &layer, int32_t dtype) { return is_sorted(layer) || dtype == F16; }
inline int64_t brought_floats(const Layer &layer, int32_t dtype) {
    return is_brought(layer, dtype) ? up((BLOCK + 1) * layer.in_features, 2) / 2 : 0;
}

// Gathers packed rows from `first` on as bfloat16, in the order of the layer's channels.
void bring_rows(const Packing &of, int64_t first, int64_t count, uint16_t *out) {
    const Layer &layer = *of.layer;
    const int64_t size = layer.in_features, each = rows_of(of.dtype);
    const int32_t *order = is_sorted(layer) ? (const int32_t *)layer.index : nullptr;
    uint16_t *row = out + BLOCK * size;
    for (int64_t m = 0; m < count; m += each, out += each * size) {
        const char *x = of.x + 2 * ((first + m) / each) * of.x_stride;
        if (order) {
            uint16_t *to = each == 1 ? out : row;
            for (int64_t k = 0; k < size; k++) to[k] = load16(x + 2 * order[k]);
            x = (const char *)to;
        }
        if (each == 2) split_halves(x, size, out, out + size);
    }
}

// Floats of the sums of rows' parts.
inline int64_t sum_floats(const Layer &layer, int64_t rows) {
    return has_least(layer) ? up(rows, BLOCK) * layer.in_features / 16 : 0;
}

// Writes the negative sums of a row's parts of 32 channels, normalized by `by`: of separate rows, per 256
// channels, eight zeros and eight sums; otherwise [block of 16 rows][part][row].
inline void sum_parts_of(const Packing &to, int64_t row, const char *x, const float *by) {
    const int64_t parts = to.layer->in_features / 32;
    for (int64_t part = 0; part < parts; part++) {
        float sums[16] = {}, sum = 0;
        for (int64_t i = 0; i < 32; i++)
            sums[i % 16] += as_float((uint32_t)load16(x + 2 * (32 * part + i)) << 16);
        for (float piece : sums) sum += piece;
        sum = -sum * by[0] * by[1];
        if (to.apart) {
            float *block = to.sums + row * parts * 2 + part / 8 * 16;
            block[part % 8] = 0, block[8 + part % 8] = sum;
        } else {
            to.sums[(row / BLOCK * parts + part) * BLOCK + row % BLOCK] = sum;
        }
    }
}

// Packs one block of rows.
void pack_block(const void *context, int64_t block, float *scratch) {
    const Packing &to = *(const Packing *)context;
    const int64_t each = to.apart ? 1 : BLOCK, first = block * each, count = least(each, to.rows - first),
                  size = to.layer->in_features;
    const bool is_there = !is_brought(*to.layer, to.dtype);
    const char *x = is_there ? to.x + 2 * first * to.x_stride : (const char *)scratch;
    const int64_t stride = is_there ? to.x_stride : size;
    if (!is_there) bring_rows(to, first, count, (uint16_t *)scratch);
    float by[BLOCK][2];
    for (int64_t m = 0; m < count; m++)
        normalize(x + 2 * m * stride, size, by[m], to.factors + 2 * (first + m));
    for (int64_t m = 0; m < count && to.sums; m++)
        sum_parts_of(to, first + m, x + 2 * m * stride, by[m]);
    for (int64_t k = 0; k < size; k += 64) {
        char *outs[2];
        for (int t = 0; t < 2; t++)
            outs[t] = to.out + (to.apart ? 2 * (k * to.rows + block * 2 * CHANNELS + t * CHANNELS)
                                         : place_of(*to.layer, to.rows, to.depth, block, k + t * CHANNELS));
        pack_two(to, x + 2 * k, stride, count, size - k, by, outs);
    }
}
