// Products with columns, and panels of them. Included by instruction_set.h in the namespace of each
// instruction set.

// Returns a bit mask of the halves of a chunk with nonzero lowest limbs. Only bfloat16 activations below
// 2**-7 of a span's largest have such limbs, and such activations are often isolated.
static HFQ_INLINE int lowest_limbs(const char *limbs) {
    uint64_t words[4];
    __builtin_memcpy(words, limbs + (LIMBS - 1) * CHUNK, sizeof(words));
    return (words[0] | words[1] ? 1 : 0) | (words[2] | words[3] ? 2 : 0);
}

// Multiplies four vectors of a chunk's codes by one of their limbs. 8-bit codes are multiplied in two halves,
// since sums of whole products would overflow int16.
template <int BITS>
static HFQ_INLINE void add_half(const vb *codes, const char *limbs, vs &first, vs &second) {
    HFQ_UNROLL
    for (int v = 0; v < 4; v++) {
        vsb x = spread(limbs + 4 * v);
        first += dot_bytes(BITS == 8 ? (vb)((vu)codes[v] & 0x0F0F0F0Fu) : codes[v], x);
        keep_here(first);
        if (BITS == 8) { second += dot_bytes((vb)((vu)codes[v] >> 4 & 0x0F0F0F0Fu), x); keep_here(second); }
    }
}

// Multiplies a chunk of codes by the limbs of its activations; `lowest` marks the halves with lowest limbs.
template <int BITS> static HFQ_INLINE void add_chunk(const vb *codes, const char *limbs, int lowest,
                                                     int32_t *high, int32_t *low) {
    const vs ones = (vs){} + (int16_t)1;
    vi sum[LIMBS] = {};
    HFQ_UNROLL
    for (int d = 0; d < LIMBS; d++) {
        const bool is_last = d == LIMBS - 1;
        if (is_last && !lowest) break;
        vs weight = d == 1 ? ones * (int16_t)256 : ones, first = {}, second = {};
        HFQ_UNROLL
        for (int half = 0; half < 2; half++)
            if (!is_last || lowest >> half & 1)
                add_half<BITS>(codes + 4 * half, limbs + d * CHUNK + 16 * half, first, second);
        sum[d] = dot_shorts(first, weight);
        if (BITS == 8) sum[d] += dot_shorts(second, weight * (int16_t)16);
    }
    store(high, load<vi>(high) + sum[0]);
    store(low, load<vi>(low) + (sum[1] + sum[2]));
}

// The same as add_chunk for two column vectors, read from their words, and the first COUNT limbs.
template <int BITS, int COUNT> static HFQ_INLINE void add_two(const char *words, int64_t pitch,
                                                              const char *limbs, int32_t *high,
                                                              int32_t *low) {
    const int parts = 8 / BITS;
    const uint32_t mask = BITS == 4 ? 0x0F0F0F0Fu : 0x03030303u;
    const vs ones = (vs){} + (int16_t)1, heavier = (vs){} + (int16_t)256;
    vs a[LIMBS] = {}, b[LIMBS] = {};
    HFQ_UNROLL
    for (int r = 0; r < BITS; r++) {
        vu first = load<vu>(words + r * pitch), second = load<vu>(words + r * pitch + 4 * W);
        keep_here(first), keep_here(second);
        HFQ_UNROLL
        for (int part = 0; part < parts; part++)
            HFQ_UNROLL
            for (int d = 0; d < COUNT; d++) {
                vsb x = spread(limbs + d * CHUNK + 4 * (r * parts + part));
                a[d] += dot_bytes((vb)(first >> BITS * part & mask), x),
                    b[d] += dot_bytes((vb)(second >> BITS * part & mask), x);
                keep_here(a[d]), keep_here(b[d]);
            }
    }
    vi low_a = dot_shorts(a[1], heavier), low_b = dot_shorts(b[1], heavier);
    if (COUNT == LIMBS) low_a += dot_shorts(a[2], ones), low_b += dot_shorts(b[2], ones);
    store(high, load<vi>(high) + dot_shorts(a[0], ones)),
        store(high + W, load<vi>(high + W) + dot_shorts(b[0], ones));
    store(low, load<vi>(low) + low_a), store(low + W, load<vi>(low + W) + low_b);
}

// Calls add_two along a row of words. Returns the number of columns multiplied.
template <int BITS, int COUNT> static HFQ_INLINE int64_t add_pairs(const char *words, int64_t pitch,
                                                                   const char *limbs, int64_t count,
                                                                   int32_t *high, int32_t *low) {
    int64_t i = 0;
    for (; i + 2 * W <= count; i += 2 * W) {
        HFQ_UNROLL
        for (int r = 0; r < BITS; r++)
            for (int64_t line = 0; line < 8 * W; line += 64)
                __builtin_prefetch(words + (BITS + r) * pitch + 4 * i + line);
        add_two<BITS, COUNT>(words + 4 * i, pitch, limbs, high + i, low + i);
    }
    return i;
}

// The same as add_chunk for four codes of 8 * W columns of AWQ, vector by vector.
template <int COUNT>
static HFQ_INLINE void add_awq_limbs(const vb *codes, const char *limbs, int32_t *high, int32_t *low) {
    const vs ones = (vs){} + (int16_t)1, heavier = (vs){} + (int16_t)256;
    vsb x[COUNT];
    HFQ_UNROLL
    for (int d = 0; d < COUNT; d++) x[d] = spread(limbs + d * CHUNK);
    HFQ_UNROLL
    for (int v = 0; v < 8; v++) {
        store(high + v * W, load<vi>(high + v * W) + dot_shorts(dot_bytes(codes[v], x[0]), ones));
        vi rest = dot_shorts(dot_bytes(codes[v], x[1]), heavier);
        if (COUNT == LIMBS) rest += dot_shorts(dot_bytes(codes[v], x[COUNT - 1]), ones);
        store(low + v * W, load<vi>(low + v * W) + rest);
    }
}
static HFQ_INLINE void add_awq(const vb *codes, const char *limbs, int32_t *high, int32_t *low) {
    if (load32(limbs + (LIMBS - 1) * CHUNK)) add_awq_limbs<LIMBS>(codes, limbs, high, low);
    else add_awq_limbs<LIMBS - 1>(codes, limbs, high, low);
}

// The order of AWQ's sums, which is that of unpacking: the column of each of 8 * W sums.
struct AwqOrder {
    uint8_t column[8 * W];  // column of each sum, among 8 * W
    constexpr AwqOrder() : column() {
        const int first[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}};
        for (int i = 0; i < 8 * W; i++) {
            const int lane = i % W, vector = i / W;
            column[i] = (uint8_t)(8 * (lane / 4 * 4 + vector % 4) + first[vector / 4][lane % 4]);
        }
    }
};
static constexpr AwqOrder awq_order;

// Adds the products of a span of a group for all columns of a tile.
template <int BITS> static void add_span(const MatmulArgs &args, int64_t row, int64_t rows, int64_t n,
                                         int64_t count, int64_t k, int64_t stop, const char *limbs,
                                         int32_t *high, int32_t *low, int64_t wide) {
    const Layer &layer = *args.layer;
    const int64_t step = BITS == 0 ? 8 * W : W, each = limbs_nbytes(layer);
    for (; k < stop; k += CHUNK, limbs += LIMBS * CHUNK) {
        int64_t i = 0;
        int lowest[PASS];
        for (int64_t m = 0; m < rows; m++) lowest[m] = lowest_limbs(limbs + (row + m) * each);
        if constexpr (BITS == 2 || BITS == 4)
            if (rows == 1 && stop - k >= CHUNK) {
                const int64_t pitch = layer.row_nbytes;
                const char *words = layer.codes + k * BITS / 32 * pitch + 4 * n, *x = limbs + row * each;
                i = lowest[0] ? add_pairs<BITS, LIMBS>(words, pitch, x, count, high, low)
                              : add_pairs<BITS, LIMBS - 1>(words, pitch, x, count, high, low);
            }
        for (; i < count; i += step) {
            Words words;
            vb codes[8];
            words.take(layer, k, least(CHUNK, stop - k), n + i, count - i, step, CHUNK);
            if constexpr (BITS == 0) {
                for (int set = 0; set < 8; set++) {
                    HFQ_UNROLL
                    for (int r = 0; r < 4; r++)
                        __builtin_prefetch(words.at + (4 * set + CHUNK + r) * words.pitch);
                    unpack<0>(words.at + 4 * set * words.pitch, words.pitch, codes);
                    for (int64_t m = 0; m < rows; m++)
                        add_awq(codes, limbs + (row + m) * each + 4 * set, high + m * wide + i,
                                low + m * wide + i);
                }
            } else {
                unpack<BITS>(words.at, words.pitch, codes);
                for (int64_t m = 0; m < rows; m++)
                    add_chunk<BITS>(codes, limbs + (row + m) * each, lowest[m], high + m * wide + i,
                                    low + m * wide + i);
            }
        }
    }
}

// Writes the results of a tile's columns, except the first `skipped`. AWQ's are in awq_order.
static void put_columns(const MatmulArgs &args, int64_t row, int64_t rows, int64_t n, int64_t skipped,
                        int64_t count, const float *y, int64_t wide, bool is_awq) {
    for (int64_t m = 0; m < rows; m++, y += wide)
        for (int64_t i = 0; i < count; i += 8 * W) {
            float ordered[8 * W];
            const float *from = y + i;
            for (int j = 0; is_awq && j < 8 * W; j++) ordered[awq_order.column[j]] = from[j];
            if (is_awq) from = ordered;
            int64_t j = i ? 0 : skipped, there = least(8 * W, count - i);
            char *to = args.y + 2 * ((row + m) * args.y_stride + n + i);
            for (; args.y_dtype == BF16 && j + W <= there; j += W)
                store(to + 2 * j, to_short(load<vf>(from + j)));
            for (; j < there; j++) put(args, row + m, n + i + j, from[j]);
        }
}

// Multiplies a pass of activation rows by the columns of a tile, as integers. Scales are applied and zero
// points subtracted span by span.
template <int BITS> static void integer_tile(const MatmulArgs &args, int64_t row, int64_t rows, int64_t n,
                                             int64_t count, float *scratch) {
    const Layer &layer = *args.layer;
    const int64_t wide = up(count, BITS == 0 ? 8 * W : W), size = layer.in_features;
    float *y = scratch, *scales = y + rows * wide, *loose = scales + wide;
    int32_t *zeros = (int32_t *)(loose + wide), *high = zeros + wide, *low = high + rows * wide;
    const char *limbs = args.limbs;
    const uint8_t *column = awq_order.column;
    __builtin_memset(y, 0, 4 * rows * wide);
    for (int64_t group = 0, span = 0; group < layer.groups; group++) {
        int64_t start = group * layer.block_in, stop = least(start + layer.block_in, size);
        group_scales(layer, group, n, count, BITS == 0 ? loose : scales, wide);
        if (BITS == 0) {
            for (int64_t i = 0; i < wide; i++) scales[i] = loose[i / (8 * W) * 8 * W + column[i % (8 * W)]];
            group_zeros(layer, group, n, count, loose, wide);
            for (int64_t i = 0; i < wide; i++)
                zeros[i] = (int32_t)loose[i / (8 * W) * 8 * W + column[i % (8 * W)]];
        } else {
            integer_zeros(layer, group, n, count, zeros, wide);
        }
        for (int64_t s = 0; s < group_spans(layer); s++, span++) {
            int64_t k = start + s * SPAN,
                    chunks = least(SPAN / CHUNK, group_chunks(layer) - s * (SPAN / CHUNK));
            for (int64_t m = 0; m < rows; m++) {  // sums start with the contribution of zero points
                const int32_t *sums = args.totals + (row + m) * totals(layer) + 2 * span;
                vu high_sum = (vu){} - (uint32_t)sums[0], low_sum = (vu){} - (uint32_t)sums[1];
                for (int64_t i = 0; i < wide; i += W) {
                    vu zero = load<vu>(zeros + i);
                    store(high + m * wide + i, zero * high_sum), store(low + m * wide + i, zero * low_sum);
                }
            }
            add_span<BITS>(args, row, rows, n, count, k, least(k + SPAN, stop), limbs, high, low, wide);
            limbs += chunks * LIMBS * CHUNK;
            for (int64_t m = 0; m < rows; m++) {
                vf unit = all(args.units[(row + m) * spans(layer) + span]);
                for (int64_t i = 0; i < wide; i += W) {
                    vf value = of_limbs(load<vi>(high + m * wide + i), load<vi>(low + m * wide + i));
                    store(y + m * wide + i,
                          fma(load<vf>(scales + i), value * unit, load<vf>(y + m * wide + i)));
                }
            }
        }
    }
    put_columns(args, row, rows, n, 0, count, y, wide, BITS == 0);
}

// Unpacks scales and zero points of all groups for the columns of a tile, [groups, wide] each.
static void all_groups(const Layer &layer, int64_t n, int64_t count, int64_t wide, float *scales,
                       float *zeros) {
    for (int64_t group = 0; group < layer.groups; group++) {
        group_scales(layer, group, n, count, scales + group * wide, wide);
        group_zeros(layer, group, n, count, zeros + group * wide, wide);
    }
}

// Operands of a tile with scattered groups.
struct Scattered {
    int64_t wide;        // columns of the tile, rounded up to whole vectors
    int64_t codes;       // codes per column, up to 32
    int64_t places[32];  // offset in `scales` and `zeros` of each code's group
    float *scales;       // scales, float32 [groups, wide]
    float *zeros;        // zero points, float32 [groups, wide]
    float *decoded;      // codes of each vector of columns, float32 [32, W]
};

// Multiplies up to 32 codes of VECTORS column vectors, from column i of the tile, by ROWS activation rows,
// and adds to sums.
template <int ROWS, int VECTORS> static HFQ_INLINE void add_scattered(const Scattered &of, int64_t i,
                                                                      const float *x, int64_t stride,
                                                                      float *sums) {
    vf sum[ROWS][VECTORS];
    HFQ_UNROLL
    for (int m = 0; m < ROWS; m++)
        HFQ_UNROLL
        for (int v = 0; v < VECTORS; v++) sum[m][v] = load<vf>(sums + m * of.wide + v * W);
    for (int64_t c = 0; c < of.codes; c++) {
        const int64_t place = of.places[c] + i;
        HFQ_UNROLL
        for (int v = 0; v < VECTORS; v++) {
            vf code = load<vf>(of.decoded + (v * 32 + c) * W), zero = load<vf>(of.zeros + place + v * W);
            vf weight = (code - zero) * load<vf>(of.scales + place + v * W);
            HFQ_UNROLL
            for (int m = 0; m < ROWS; m++) sum[m][v] = fma(weight, all(x[m * stride + c]), sum[m][v]);
        }
    }
    HFQ_UNROLL
    for (int m = 0; m < ROWS; m++)
        HFQ_UNROLL
        for (int v = 0; v < VECTORS; v++) store(sums + m * of.wide + v * W, sum[m][v]);
}

// Multiplies a tile with the scale and zero point of each code's group. For one activation row, several
// vectors are multiplied together, so that independent sums hide latency.
template <int ROWS>
static void scattered_tile(const MatmulArgs &args, int64_t row, int64_t n, int64_t count, float *scratch) {
    const Layer &layer = *args.layer;
    const Decode decode_block = decoder(layer);
    const int64_t wide = up(count, W), size = layer.in_features;
    const int VECTORS = ROWS == 1 ? 4 : 1;
    Scattered of = {
        wide, 0, {}, scratch, scratch + layer.groups * wide, scratch + (2 * layer.groups + ROWS) * wide};
    float *y = of.zeros + layer.groups * wide;
    all_groups(layer, n, count, wide, of.scales, of.zeros);
    __builtin_memset(y, 0, sizeof(float) * ROWS * wide);
    for (int64_t k = 0; k < size; k += 32) {
        const float *x = args.x32 + row * args.stride + k;
        of.codes = least(32, size - k);
        for (int64_t c = 0; c < of.codes; c++) of.places[c] = group_of(layer, k + c) * wide;
        for (int64_t i = 0, vectors; i < wide; i += vectors * W) {
            vectors = wide - i >= VECTORS * W ? VECTORS : 1;
            for (int64_t v = 0; v < vectors; v++) {
                Words words;
                words.take(layer, k, of.codes, n + i + v * W, count - i - v * W, W, 0);
                for (int64_t r = 0; r < layer.bits && words.at != words.copy; r++)
                    __builtin_prefetch(words.at + (layer.bits + r) * words.pitch);
                decode_block(words.at, words.pitch, of.codes, of.decoded + v * 32 * W);
            }
            if (vectors > 1) add_scattered<ROWS, VECTORS>(of, i, x, args.stride, y + i);
            else add_scattered<ROWS, 1>(of, i, x, args.stride, y + i);
        }
    }
    for (int64_t m = 0; m < least(ROWS, args.rows - row); m++)
        for (int64_t i = 0; i < count; i++) put(args, row + m, n + i, y[m * wide + i]);
}

static void multiply_columns(const MatmulArgs &args, int64_t n, int64_t count, float *scratch) {
    const int bits = args.layer->kind == AWQ ? 0 : args.layer->bits;
    for (int64_t row = 0, rows; row < args.rows; row += PASS) {
        rows = least(PASS, args.rows - row);
        if (!args.limbs) {
            if (rows == 1) scattered_tile<1>(args, row, n, count, scratch);
            else if (rows <= PASS / 2) scattered_tile<PASS / 2>(args, row, n, count, scratch);
            else scattered_tile<PASS>(args, row, n, count, scratch);
        } else if (bits == 0) integer_tile<0>(args, row, rows, n, count, scratch);
        else if (bits == 2) integer_tile<2>(args, row, rows, n, count, scratch);
        else if (bits == 3) integer_tile<3>(args, row, rows, n, count, scratch);
        else if (bits == 4) integer_tile<4>(args, row, rows, n, count, scratch);
        else integer_tile<8>(args, row, rows, n, count, scratch);
    }
}

// Multiplies the columns of a part; sorted layers strip by strip.
template <void (*MULTIPLY)(const MatmulArgs &, int64_t, int64_t, float *)>
static void multiply_strips(const MatmulArgs &args, int64_t part, float *scratch) {
    const Layer &layer = *args.layer;
    const int64_t first = args.outputs.first(part), stop = first + args.outputs.count(part);
    if (!is_sorted(layer)) return MULTIPLY(args, first, stop - first, scratch);
    MatmulArgs of = args;
    for (int64_t n = first, count; n < stop; n += count) {
        count = least(STRIP_COLUMNS - skipped_before(layer, args.outputs, n), stop - n);
        const Layer strip = sort_strip(layer, n, count, scratch);
        of.layer = &strip;
        MULTIPLY(of, n, count, scratch);
    }
}

static void columns_part(const void *context, int64_t part, float *scratch) {
    multiply_strips<multiply_columns>(*(const MatmulArgs *)context, part, scratch);
}

static void columns_panel(const void *context, int64_t part, float *scratch) {
    const Panel &panel = *(const Panel *)context;
    const Layer &layer = *panel.layer;
    const Decode decode_block = decoder(layer);
    int64_t first = part * panel_columns(layer), count = least(panel_columns(layer), panel.count - first),
            size = layer.in_features, wide = (count + W - 1) / W * W;
    float *scales = scratch, *zeros = scales + layer.groups * wide, *decoded = zeros + layer.groups * wide;
    all_groups(layer, panel.start + first, count, wide, scales, zeros);
    for (int64_t k = 0; k < size; k += 32) {
        int64_t codes = least(32, size - k), places[32];
        for (int64_t c = 0; c < codes; c++) places[c] = group_of(layer, k + c) * wide;
        for (int64_t i = 0; i < count; i += W) {
            Words words;
            words.take(layer, k, codes, panel.start + first + i, count - i, W, 0);
            decode_block(words.at, words.pitch, codes, decoded);
            if (panel.dtype == F32 && count - i >= W && places[0] == places[codes - 1] &&
                !layer.index_nbytes) {
                vf scale = load<vf>(scales + places[0] + i), zero = load<vf>(zeros + places[0] + i);
                float *to = (float *)panel.out + k * panel.count + first + i;
                for (int64_t c = 0; c < codes; c++, to += panel.count)
                    store(to, (load<vf>(decoded + c * W) - zero) * scale);
                continue;
            }
            if (panel.dtype == BF16 && count - i >= W) {
                char *to = panel.out + 2 * (k * panel.count + first + i);
                for (int64_t c = 0; c < codes; c++, to += 2 * panel.count) {
                    vf zero = load<vf>(zeros + places[c] + i), scale = load<vf>(scales + places[c] + i);
                    store(to, to_short((load<vf>(decoded + c * W) - zero) * scale));
                }
                continue;
            }
            for (int64_t c = 0; c < codes; c++) {
                float *code = decoded + c * W;
                store(code,
                      (load<vf>(code) - load<vf>(zeros + places[c] + i)) * load<vf>(scales + places[c] + i));
                store_panel(panel.out, panel.dtype, (k + c) * panel.count + first + i, code,
                            least(W, count - i));
            }
        }
    }
}
