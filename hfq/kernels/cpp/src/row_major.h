// Products with rows of codes, and panels of them. Included by instruction_set.h in the namespace of each
// instruction set.

// Reads W contiguous scales.
template <int DTYPE> static HFQ_INLINE vf scales_at(const Layer &layer, int64_t place) {
    if (DTYPE == F16) return from_half(load<vuh>(layer.scales + 2 * place));
    if (DTYPE == BF16) return (vf)(__builtin_convertvector(load<vuh>(layer.scales + 2 * place), vu) << 16);
    if (DTYPE == E8M0) {
        vu exponents = from_bytes(layer.scales + place), none = (vu)(exponents == 0),
           nan = (vu)(exponents == 255);
        return (vf)((exponents << 23 | (none & 0x00400000u)) | (nan & 0x7FC00000u));
    }
    vf scales = decode<E4M3>(layer.scales + place) * 256.0f;
    return layer.divides ? scales / layer.shared : scales * layer.shared;
}
template <int DTYPE>
static HFQ_INLINE int64_t take_scales(const Layer &layer, int64_t place, int64_t groups, float *out) {
    int64_t i = 0;
    for (; i + W <= groups; i += W) store(out + i, scales_at<DTYPE>(layer, place + i));
    return i;
}

// Reads the scales of an output row's groups.
static void row_scales(const Layer &layer, int64_t n, int64_t groups, float *out) {
    int64_t place = scale_place(layer, n, 0), i = 0;
    switch (layer.scale_dtype) {
        case F32: __builtin_memcpy(out, layer.scales + 4 * place, 4 * groups); return;
        case F16: i = take_scales<F16>(layer, place, groups, out); break;
        case BF16: i = take_scales<BF16>(layer, place, groups, out); break;
        case E8M0: i = take_scales<E8M0>(layer, place, groups, out); break;
        case E4M3_SCALED: i = take_scales<E4M3_SCALED>(layer, place, groups, out); break;
    }
    for (; i < groups; i++) out[i] = scale_at(layer, place + i);
}

// Writes the offset of the codes of an output row's groups, 15 minus the zero point, in each of four bytes.
static void row_shifts(const Layer &layer, int64_t n, int64_t groups, uint32_t *out) {
    int64_t i = 0;
    vu shifts = (vu){} + (uint32_t)(n % 8 * 4);
    if (layer.row_zeros == GROUP_WORDS)
        for (int j = 0; j < W; j++) shifts[j] = (uint32_t)(j % 8 * 4);
    for (; i + W <= groups && layer.row_zeros == OUTPUT_WORDS; i += W)
        store(out + i,
              (15u - (load<vu>(layer.zeros + 4 * (n / 8 * layer.groups + i)) >> shifts & 15u)) * 0x01010101u);
    for (; i + W <= groups && W == 8; i += W)
        store(out + i,
              (15u - ((vu){} + load32(layer.zeros + 4 * (n * layer.zero_words + i / 8)) >> shifts & 15u)) *
                  0x01010101u);
    for (; i < groups; i++)
        out[i] =
            (uint32_t)((layer.row_zeros == OUTPUT_WORDS ? 7 : 15) - (int)row_zero(layer, n, i)) * 0x01010101u;
}

// Loads at least eight floats. AVX-512 loads exactly eight, since 16 could cross a cache line.
static HFQ_INLINE vf load_eight(const float *p) {
#if HFQ_ISA == 2 && !defined(HFQ_EMULATE)
    return (vf)_mm512_castps256_ps512(_mm256_loadu_ps(p));
#else
    return load<vf>(p);
#endif
}

// Conversion of nibbles to unsigned integers, and layout of their groups: the same for all output rows.
struct IntegerCodes {
    const Layer &layer;  // layer of the codes
    int64_t padded;      // input channels, rounded up to whole spans
    int64_t group_size;  // input channels per group
    int64_t groups;      // groups per output row
    int64_t step;        // groups per 8 * W codes; 0 if a group has more codes
    bool has_table;      // true: codes are looked up in `table`
    bool has_shifts;     // true: rows have zero points
    vb table;            // unsigned integer of each code, repeated in each 128 bits
    vi places;           // group of each element, among the groups of 8 * W codes
    explicit HFQ_INLINE IntegerCodes(const Layer &from) : layer(from) {
        padded = up(layer.in_features, SPAN), group_size = least(layer.block_in, padded);
        groups = (layer.in_features + group_size - 1) / group_size, step = 8 * W / group_size;
        has_shifts = layer.row_zeros != NONE, has_table = !has_shifts && layer.unit != 1;
        for (int lane = 0; lane < W / 4; lane++)
            __builtin_memcpy((char *)&table + 16 * lane, layer.integers, 16);
        for (int i = 0; i < W; i++) places[i] = (int)(8 * i / group_size);
    }
    HFQ_INLINE int64_t floats() const { return 2 * (groups + W); }  // of scratch per output row
};

// An output row of such codes.
struct IntegerRow {
    const char *codes;    // address of the row's first code
    const float *scales;  // scale of each group, then W zeros
    const float *shifts;  // per group, four bytes as float bits: 15 minus its zero point
    HFQ_INLINE void open(const IntegerCodes &of, int64_t n, float *scratch) {
        float *found = scratch + of.groups + W;
        codes = codes_of<NIBBLES>(of.layer, n), scales = scratch, shifts = found;
        row_scales(of.layer, n, of.groups, scratch);
        __builtin_memset(scratch + of.groups, 0, 4 * W);
        if (of.has_shifts) row_shifts(of.layer, n, of.groups, (uint32_t *)found);
    }
    // Reads 8 * W codes from a group on, and returns the scale of each element. The codes have up to eight
    // groups.
    template <bool TABLE, bool SHIFTS>
    HFQ_INLINE vf take(const IntegerCodes &of, const char *at, int64_t group, vb &first, vb &second) const {
        vu words = load<vu>(at);
        keep_here(words);
        first = (vb)(words & 0x0F0F0F0Fu), second = (vb)(words >> 4 & 0x0F0F0F0Fu);
        if (TABLE) first = pick_bytes(of.table, first), second = pick_bytes(of.table, second);
        if (SHIFTS) {
            vb shift = (vb)pick_floats(load_eight(shifts + group), of.places);
            first += shift, second += shift;
        }
        return pick_floats(load_eight(scales + group), of.places);
    }
};

// Returns the group of the next 8 * W codes.
static HFQ_INLINE int64_t next_group(const IntegerCodes &of, int64_t group, int64_t k) {
    return of.step ? group + of.step : group + (k + 8 * W == (group + 1) * of.group_size);
}

// Multiplies one output row by ROWS activation rows, all as integers.
template <int ROWS> static void dot_integers(const MatmulArgs &args, int64_t row, int64_t n, float *scratch) {
    const Layer &layer = *args.layer;
    const IntegerCodes of(layer);
    const int64_t each = limbs_nbytes(layer), padded = of.padded;
    IntegerRow from;
    from.open(of, n, scratch);
    vs ones = (vs){} + (int16_t)1, heavier = (vs){} + (int16_t)256;
    vf total[ROWS];
    for (int m = 0; m < ROWS; m++) total[m] = all(0.0f);
    for (int64_t k = 0, group = 0; k < layer.in_features; group = next_group(of, group, k), k += 8 * W) {
        char rest[4 * W];
        const char *at = from.codes + k / 2;
        __builtin_prefetch(at + AHEAD);
        if (layer.in_features - k < 8 * W) {
            __builtin_memset(rest, 0, sizeof(rest)),
                __builtin_memcpy(rest, at, (layer.in_features - k + 1) / 2);
            at = rest;
        }
        vb first, second;
        vf scale;
        if (of.has_table) scale = from.take<true, false>(of, at, group, first, second);
        else if (of.has_shifts) scale = from.take<false, true>(of, at, group, first, second);
        else scale = from.take<false, false>(of, at, group, first, second);
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++) {
            const char *limbs = args.limbs + (row + m) * each + LIMBS * k;
            const int32_t *totals = args.totals + (row + m) * (padded / 4) + k / 4;
            vs sum[LIMBS];
            HFQ_UNROLL
            for (int d = 0; d < LIMBS; d++)
                sum[d] = dot_bytes(first, load<vsb>(limbs + 8 * W * d)) +
                         dot_bytes(second, load<vsb>(limbs + 8 * W * d + 4 * W));
            vi high = dot_shorts(sum[0], ones) + load<vi>(totals);
            vi low = dot_shorts(sum[1], heavier) + dot_shorts(sum[2], ones) + load<vi>(totals + W);
            total[m] = fma(of_limbs(high, low) * all(args.units[(row + m) * (padded / SPAN) + k / SPAN]),
                           scale, total[m]);
        }
    }
    for (int m = 0; m < ROWS; m++) put(args, row + m, n, sum_of(total[m]));
}

// Adds w[r] . x[m] over a step of decoded weights to sums[r][m], for 4 output rows and ROWS activation rows.
template <int ROWS> static void multiply_step(const float *w, const float *x, int64_t stride, int64_t length,
                                              float *sums, int64_t sum_stride) {
    vf sum[4][ROWS];
    HFQ_UNROLL
    for (int r = 0; r < 4; r++)
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++) sum[r][m] = load<vf>(sums + r * sum_stride + m * W);
    for (int64_t k = 0; k < length; k += W) {
        vf weights[4];
        HFQ_UNROLL
        for (int r = 0; r < 4; r++) weights[r] = load<vf>(w + r * STEP + k);
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++) {
            vf value = load<vf>(x + m * stride + k);
            HFQ_UNROLL
            for (int r = 0; r < 4; r++) sum[r][m] = fma(weights[r], value, sum[r][m]);
        }
    }
    HFQ_UNROLL
    for (int r = 0; r < 4; r++)
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++) store(sums + r * sum_stride + m * W, sum[r][m]);
}

template <int KIND> static void rows_tile(const MatmulArgs &args, int64_t n, int64_t count, float *scratch) {
    const Layer &layer = *args.layer;
    float *w = scratch, *sums = scratch + TILE_ROWS * STEP;
    int64_t sum_stride = args.rows * W;
    __builtin_memset(scratch, 0, sizeof(float) * (TILE_ROWS * STEP + TILE_ROWS * sum_stride));
    for (int64_t k = 0; k < layer.in_features; k += STEP) {
        int64_t length = least(STEP, layer.in_features - k);
        if (length < STEP) __builtin_memset(w, 0, sizeof(float) * TILE_ROWS * STEP);
        for (int64_t r = 0; r < count; r++) decode_row<KIND>(layer, n + r, k, length, w + r * STEP);
        for (int64_t r = 0; r < count; r += 4)
            for (int64_t m = 0; m < args.rows; m += 3) {
                float *to = sums + r * sum_stride + m * W;
                const float *x = args.x32 + m * args.stride + k;
                if (args.rows - m >= 3)
                    multiply_step<3>(w + r * STEP, x, args.stride, length, to, sum_stride);
                else if (args.rows - m == 2)
                    multiply_step<2>(w + r * STEP, x, args.stride, length, to, sum_stride);
                else multiply_step<1>(w + r * STEP, x, args.stride, length, to, sum_stride);
            }
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t m = 0; m < args.rows; m++)
            put(args, m, n + r, sum_of(load<vf>(sums + r * sum_stride + m * W)));
}

template <int KIND> static void rows_of(const MatmulArgs &args, int64_t n, int64_t count, float *scratch) {
    bool direct = KIND != QUADS && !args.layer->index_nbytes;
    if (args.rows > 1 || !direct) return rows_tile<KIND>(args, n, count, scratch);
    if constexpr (KIND != QUADS)
        for (int64_t r = n; r < n + count; r++) put(args, 0, r, dot_row<KIND>(*args.layer, r, args.x32));
}

static void integers_of(const MatmulArgs &args, int64_t n, int64_t count, float *scratch) {
    for (int64_t row = 0; row < args.rows; row += 4)
        for (int64_t r = n; r < n + count; r++) switch (args.rows - row) {
            case 1: dot_integers<1>(args, row, r, scratch); break;
            case 2: dot_integers<2>(args, row, r, scratch); break;
            case 3: dot_integers<3>(args, row, r, scratch); break;
            default: dot_integers<4>(args, row, r, scratch);
        }
}

static void rows_part(const void *context, int64_t part, float *scratch) {
    const MatmulArgs &args = *(const MatmulArgs *)context;
    const int64_t n = args.outputs.first(part), count = args.outputs.count(part);
    if (args.limbs) return integers_of(args, n, count, scratch);
    if (args.ordered) return ordered_of(args, n, count, scratch);
    switch (args.layer->kind) {
        case E4M3: return rows_of<E4M3>(args, n, count, scratch);
        case E5M2: return rows_of<E5M2>(args, n, count, scratch);
        case INT8: return rows_of<INT8>(args, n, count, scratch);
        case BIASED: return rows_of<BIASED>(args, n, count, scratch);
        case UINT8: return rows_of<UINT8>(args, n, count, scratch);
        case QUADS: return rows_of<QUADS>(args, n, count, scratch);
        case BLOCKS: return block_reader(*args.layer).multiply(args, n, count, scratch);
        default: return rows_of<NIBBLES>(args, n, count, scratch);
    }
}

typedef void (*DecodeRow)(const Layer &layer, int64_t n, int64_t k, int64_t count, float *out);
static DecodeRow row_decoder(const Layer &layer) {
    switch (layer.kind) {
        case E4M3: return decode_row<E4M3>;
        case E5M2: return decode_row<E5M2>;
        case INT8: return decode_row<INT8>;
        case BIASED: return decode_row<BIASED>;
        case UINT8: return decode_row<UINT8>;
        case QUADS: return decode_row<QUADS>;
        case BLOCKS: return decode_row<BLOCKS>;
        default: return decode_row<NIBBLES>;
    }
}

// Converts W floats to bfloat16.
static HFQ_INLINE vuh to_short(vf values) {
    vu bits = (vu)values, rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
    vu is_nan = (vu)((bits & 0x7FFFFFFF) > 0x7F800000);
    return __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), vuh);
}

static void store_panel(char *out, int32_t dtype, int64_t place, const float *values, int64_t count) {
    if (dtype == F32) { __builtin_memcpy(out + 4 * place, values, 4 * count); return; }
    int64_t i = 0;
    for (; i + W <= count; i += W) store(out + 2 * (place + i), to_short(load<vf>(values + i)));
    for (; i < count; i++) {
        uint16_t value = float_to_bfloat(values[i]);
        __builtin_memcpy(out + 2 * (place + i), &value, 2);
    }
}

static void rows_panel(const void *context, int64_t part, float *scratch) {
    const Panel &panel = *(const Panel *)context;
    const Layer &layer = *panel.layer;
    int64_t first = part * PANEL_ROWS, stop = least(first + PANEL_ROWS, panel.count);
    for (int64_t r = first; r < stop; r++)
        for (int64_t k = 0; k < layer.in_features; k += 1024) {
            int64_t count = least(1024, layer.in_features - k);
            row_decoder(layer)(layer, panel.start + r, k, count, scratch);
            store_panel(panel.out, panel.dtype, r * layer.in_features + k, scratch, count);
        }
}
