// Rows of e4m3 codes as small floats. Included by instruction_set.h in the namespace of each instruction set.
//
// The bits of a code, moved to the sign, exponent, and mantissa of a float, are the code's value times
// 2**-120, also for subnormal codes. Nine instructions convert 4 * W codes. They require activations in the
// order of the bytes of W words, and scaled up by a power of two.

// Writes activations as [row][4 * W codes][byte of a word][word], scaled so that a row's largest magnitude is
// about 2**112. After all rows, writes two factors per row that undo the scaling and the 2**-120 of the
// codes.
static void order_activations(const Layer &layer, const float *x32, int64_t rows, int64_t stride,
                              float *out) {
    int64_t size = layer.in_features, wide = ordered_columns(layer);
    for (int64_t m = 0; m < rows; m++) {
        const float *x = x32 + m * stride;
        float *to = out + m * wide, *factors = out + rows * wide + 2 * m;
        uint32_t bits = largest_bits(x, size);
        int exponent = bits ? (int)most(bits >> 23, 1) - 127 : 112, power = 112 - exponent,
            back = 120 - power;
        float first = as_float((uint32_t)(127 + power / 2) << 23),
              second = as_float((uint32_t)(127 + power - power / 2) << 23);
        for (int64_t k = 0; k < up(size, 4 * W); k += 4 * W)
            for (int64_t i = 0; i < 4 * W; i++)
                to[k + i % 4 * W + i / 4] = k + i < size ? x[k + i] * first * second : 0;
        factors[0] = as_float((uint32_t)(127 + back / 2) << 23),
        factors[1] = as_float((uint32_t)(127 + back - back / 2) << 23);
    }
}

const int64_t ORDERED_STEP = 4096;  // activations of several rows that fit into the first-level cache
// activations of one row that fit into it next to the codes; longer rows are read once for two output rows
const int64_t ORDERED_ALONE = 6144;
// the most channels per partial sum, since rounding errors grow with the length of a sum
const int64_t ORDERED_PIECE = 8192;

// Multiplies 4 * W codes by the activations of ROWS rows. `worst` collects the largest code magnitudes.
template <int ROWS, int OUT> static HFQ_INLINE void dot_ordered(const char *codes, const float *x,
                                                                int64_t wide, vf (*sum)[ROWS], vb &worst) {
    const vu words = load<vu>(codes), odd = (vu)((vs)words >> 4), even = (vu)((vs)((vs)words << 8) >> 4),
             kept = (vu){} + 0x87F00000u;
    vf weights[4] = {(vf)(even << 16 & kept), (vf)(odd << 16 & kept), (vf)(even & kept), (vf)(odd & kept)};
    HFQ_UNROLL
    for (int m = 0; m < ROWS; m++)
        HFQ_UNROLL
        for (int j = 0; j < 4; j++) {
            vf &to = sum[ROWS * OUT == 1 ? j : j % 2][m];
            to = fma(weights[j], load<vf>(x + m * wide + j * W), to);
        }
    vb rest = (vb)words & 0x7F;
    worst = rest > worst ? rest : worst;
}

// Adds the products of channels [k, stop) of OUT output rows and ROWS activation rows to total[r][m]. With
// SCALED, the activations already contain the scales.
template <int ROWS, int OUT, bool SCALED>
static HFQ_INLINE void ordered_step(const Layer &layer, int64_t n, int64_t k, int64_t stop, int64_t lead,
                                    const float *x, vf (*total)[ROWS], vb *worst) {
    const char *row = layer.codes + n * layer.row_nbytes;
    const int64_t wide = ordered_columns(layer), nbytes = layer.row_nbytes,
                  length = SCALED ? stop : layer.block_in;
    int64_t places[OUT];
    vb found[OUT];
    for (int r = 0; r < OUT; r++) places[r] = scale_place(layer, n + r, 0), found[r] = worst[r];
    for (int64_t segment = k / length, end; k < stop; segment += k == (segment + 1) * length) {
        end = least(least(stop, k + ORDERED_PIECE), (segment + 1) * length);
        vf sum[OUT][4][ROWS] = {};
        for (; k + 64 <= end; k += 64) {
            HFQ_UNROLL
            for (int r = 0; r < OUT; r++) __builtin_prefetch(row + r * nbytes + k + lead);
            HFQ_UNROLL
            for (int64_t i = k; i < k + 64; i += 4 * W)
                HFQ_UNROLL
                for (int r = 0; r < OUT; r++)
                    dot_ordered<ROWS, OUT>(row + r * nbytes + i, x + i, wide, sum[r], found[r]);
        }
        for (; k < end; k += 4 * W)
            for (int r = 0; r < OUT; r++) {
                char rest[4 * W];
                __builtin_memset(rest, 0, sizeof(rest)),
                    __builtin_memcpy(rest, row + r * nbytes + k, least(4 * W, end - k));
                dot_ordered<ROWS, OUT>(rest, x + k, wide, sum[r], found[r]);
            }
        k = end;
        HFQ_UNROLL
        for (int r = 0; r < OUT; r++) {
            float scale = SCALED ? 1.0f : scale_at(layer, places[r] + segment * layer.scale_step);
            HFQ_UNROLL
            for (int m = 0; m < ROWS; m++) {
                vf piece = sum[r][0][m] + sum[r][1][m], &to = total[r][m];
                if (ROWS * OUT == 1) piece += sum[r][2][m] + sum[r][3][m];
                if (SCALED) to += piece;
                else to = layer.divides ? to + piece / scale : fma(piece, all(scale), to);
            }
        }
    }
    for (int r = 0; r < OUT; r++) worst[r] = found[r];
}

// True if all rows of a tile share their scales, which are then multiplied with the activations.
static bool shares_scales(const Layer &layer, int64_t rows) {
    return layer.block_out % TILE_ROWS == 0 && layer.block_in < layer.in_features &&
           rows * ordered_columns(layer) <= SCRATCH;
}

// Multiplies activations by the scales of a tile, normalized to below 2. Returns the remaining factor.
static float scale_ordered(const Layer &layer, int64_t n, int64_t rows, const float *x, float *out) {
    const int64_t first = scale_place(layer, n, 0),
                  segments = (layer.in_features + layer.block_in - 1) / layer.block_in;
    uint32_t largest = 0;
    for (int64_t i = 0; i < segments; i++) {
        float scale = scale_at(layer, first + i * layer.scale_step);
        largest = most(largest, as_bits(layer.divides ? 1 / scale : scale) & 0x7FFFFFFF);
    }
    int power = (int)least(most(largest >> 23, 1), 253) - 127;
    float shift = as_float((uint32_t)(127 - power) << 23);
    for (int64_t i = 0; i < segments; i++) {
        float scale = scale_at(layer, first + i * layer.scale_step);
        scale = layer.divides ? shift / scale : scale * shift;
        for (int64_t m = 0; m < rows; m++) {
            const int64_t start = m * ordered_columns(layer),
                          stop = start + least(up(layer.in_features, 4 * W), (i + 1) * layer.block_in);
            for (int64_t k = start + i * layer.block_in; k < stop; k += W)
                store(out + k, load<vf>(x + k) * scale);
        }
    }
    return as_float((uint32_t)(127 + power) << 23);
}

template <int ROWS, int OUT, bool SCALED> static void ordered_tile(const MatmulArgs &args, int64_t row,
                                                                   int64_t n, int64_t count, const float *x,
                                                                   float unit) {
    const Layer &layer = *args.layer;
    const int64_t size = layer.in_features, step = ROWS == 1 ? size : ORDERED_STEP / ROWS / 64 * 64;
    const int64_t lead = up(AHEAD, OUT * layer.row_nbytes);  // prefetches the same channels of a later row
    const float *factors = args.ordered + args.rows * ordered_columns(layer) + 2 * row;
    vf total[TILE_ROWS][ROWS] = {};
    vb worst[TILE_ROWS] = {};
    for (int64_t k = 0; k < size; k += step)
        for (int64_t r = 0; r < count; r += OUT) {
            const int64_t stop = least(k + step, size);
            if (r + OUT <= count)
                ordered_step<ROWS, OUT, SCALED>(layer, n + r, k, stop, lead, x, total + r, worst + r);
            else ordered_step<ROWS, 1, SCALED>(layer, n + r, k, stop, lead, x, total + r, worst + r);
        }
    for (int64_t r = 0; r < count; r++) {
        uint8_t magnitudes[4 * W], found = 0;
        store(magnitudes, worst[r]);
        for (int i = 0; i < 4 * W; i++) found = found > magnitudes[i] ? found : magnitudes[i];
        for (int m = 0; m < ROWS; m++) {
            float sum = sum_of(total[r][m]) * unit * factors[2 * m] * factors[2 * m + 1];
            put(args, row + m, n + r, found == 0x7F ? as_float(0x7FC00000) : sum);
        }
    }
}

// Multiplies output rows [n, stop) of a part, which share their scales or have their own.
template <int ROWS, int OUT>
static void ordered_pass(const MatmulArgs &args, int64_t row, int64_t n, int64_t stop, float *scratch) {
    const Layer &layer = *args.layer;
    const float *x = args.ordered + row * ordered_columns(layer);
    const bool shared = shares_scales(layer, ROWS);
    const float unit = shared ? scale_ordered(layer, n, ROWS, x, scratch) : 1.0f;
    for (; n < stop; n += TILE_ROWS) {
        const int64_t count = least(TILE_ROWS, stop - n);
        if (shared) ordered_tile<ROWS, OUT, true>(args, row, n, count, scratch, unit);
        else ordered_tile<ROWS, OUT, false>(args, row, n, count, x, 1.0f);
    }
}

static void ordered_of(const MatmulArgs &args, int64_t n, int64_t count, float *scratch) {
    const bool alone = args.layer->in_features <= ORDERED_ALONE;
    for (int64_t row = 0; row < args.rows; row += 4) switch (args.rows - row) {
        case 1: (alone ? ordered_pass<1, 1> : ordered_pass<1, 2>)(args, row, n, n + count, scratch); break;
        case 2: ordered_pass<2, 1>(args, row, n, n + count, scratch); break;
        case 3: ordered_pass<3, 1>(args, row, n, n + count, scratch); break;
        default: ordered_pass<4, 1>(args, row, n, n + count, scratch);
    }
}
