// Activations as integers. Included by instruction_set.h in the namespace of each instruction set.
//
// Up to SPAN activations share a unit of 2**-22 of the largest magnitude, or slightly more. Each activation
// is an integer of three limbs, signed bytes. Products with codes of up to eight bits, their sums, and a zero
// point times the sum of activations are then exact integers. Two things are rounded: each activation, by at
// most half a unit, and each span's sum, once. bfloat16 has eight significant bits, so the lowest limb of
// most bfloat16 activations is zero, and columns skip the products of such limbs.

// Up to SPAN floats as integers, zero from `count` on.
struct Integers {
    int32_t values[SPAN];   // each activation divided by `unit`, rounded
    int32_t highs[SPAN];    // highest limb of each value
    uint32_t limbs[SPAN];   // three limbs of each value, signed bytes; the highest byte is unused
    float unit;             // float value of an integer 1
};
static void to_integers(const float *x, int64_t count, Integers &out) {
    float padded[SPAN];
    if (count < SPAN)
        __builtin_memset(padded, 0, sizeof(padded)), __builtin_memcpy(padded, x, 4 * count), x = padded;
    uint32_t bits = largest_bits(x, SPAN);
    // the largest integer is below 127.5 * 2**16
    int power = 149 - (int)(bits >> 23) - ((bits & 0x7FFFFF) >= 0x7E0000);
    if (power > 140) power = 140;  // keeps the unit times the codes' unit in the range of floats
    const vf factor = all(as_float((uint32_t)(127 + power / 2) << 23)),
             other = all(as_float((uint32_t)(127 + power - power / 2) << 23));
    for (int64_t k = 0; k < SPAN; k += W) {
        vf scaled = load<vf>(x + k) * factor * other, half = (vf)((vu)all(0.5f) | ((vu)scaled & 0x80000000u));
        vi value = __builtin_convertvector(scaled + half, vi);
        store(out.values + k, value), store(out.highs + k, (value + 0x8080) >> 16);
        store(out.limbs + k, ((vu)value + 0x808080u) ^ 0x808080u);
    }
    out.unit = as_float(power > 126 ? 1u << (149 - power) : (uint32_t)(127 - power) << 23);
}

// Writes the three limbs of 32 integers, the highest limbs first, `apart` bytes from one limb to the next.
// Each four consecutive bytes are the limbs of four integers that are eight entries of `order` apart.
typedef uint32_t Eight __attribute__((vector_size(32)));
static HFQ_INLINE void put_limbs(const uint32_t *limbs, const uint8_t *order, char *to, int64_t apart) {
    uint32_t found[32];
    for (int i = 0; i < 32; i++) found[i] = limbs[order[i]];
    const Eight a = load<Eight>(found), b = load<Eight>(found + 8), c = load<Eight>(found + 16),
                d = load<Eight>(found + 24);
    HFQ_UNROLL
    for (int i = 0, shift = 16; i < 3; i++, shift -= 8, to += apart)
        store(to,
              (a >> shift & 255u) | (b >> shift & 255u) << 8 | (c >> shift & 255u) << 16 | d >> shift << 24);
}

// Sums the highest limbs, and the values of the two lower limbs.
static HFQ_INLINE void add_up(const Integers &of, int64_t first, int64_t count, int32_t &high, int32_t &low) {
    int32_t sum = high = 0;
    if (count % W == 0) {
        vi highs = {}, sums = {};
        for (int64_t i = first; i < first + count; i += W)
            highs += load<vi>(of.highs + i), sums += load<vi>(of.values + i);
        for (int i = 0; i < W; i++) high += highs[i], sum += sums[i];
    } else {
        for (int64_t i = first; i < first + count; i++) high += of.highs[i], sum += of.values[i];
    }
    low = sum - 65536 * high;
}

// Position of code k of a column among 32 that are unpacked together: the vector, of eight, and the byte. A
// element has four codes.
static HFQ_INLINE int vector_of(const Layer &layer, int k) {
    if (layer.kind == AWQ || layer.bits == 8) return k / 4;
    return layer.bits == 4 ? k / 8 * 2 + k % 2 : layer.bits == 2 ? k / 16 * 4 + k % 4 : k % 8;
}
static HFQ_INLINE int byte_of(const Layer &layer, int k) {
    if (layer.kind == AWQ || layer.bits == 8) return k % 4;
    return layer.bits == 4 ? k % 8 / 2 : layer.bits == 2 ? k % 16 / 4 : k / 8;
}

// Limbs per chunk: [limb][vector][byte]. Totals per span: the sums of the highest limbs, and of the two
// others.
static void count_columns(const Layer &layer, const float *x, char *limbs, float *units, int32_t *sums) {
    int64_t size = layer.in_features;
    uint8_t order[CHUNK];
    for (int k = 0; k < CHUNK; k++) order[8 * byte_of(layer, k) + vector_of(layer, k)] = (uint8_t)k;
    for (int64_t group = 0; group < layer.groups; group++) {
        int64_t start = group * layer.block_in, stop = least(start + layer.block_in, size);
        for (int64_t s = 0; s < group_spans(layer); s++, units++, sums += 2) {
            int64_t k = start + s * SPAN, count = most(0, least(SPAN, stop - k)),
                    left = group_chunks(layer) - s * (SPAN / CHUNK);
            Integers found;
            to_integers(x + least(k, size), count, found);
            *units = found.unit;
            add_up(found, 0, SPAN, sums[0], sums[1]);
            for (int64_t i = 0; i < least(SPAN, left * CHUNK); i += CHUNK)
                put_limbs(found.limbs + i, order, limbs + i * LIMBS, CHUNK);
            limbs += least(SPAN, left * CHUNK) * LIMBS;
        }
    }
}

// Limbs per 8 * W codes: [limb][first or second code of a byte][bytes]. Totals per eight codes: the sums of
// the highest limbs, and of the two others, times -offset, which removes the codes' offset from a sum.
static void count_rows(const Layer &layer, const float *x, char *limbs, float *units, int32_t *sums) {
    uint8_t order[2][32];  // order of 64 codes
    for (int i = 0; i < 64; i++)
        order[i / 32][i % 32] = (uint8_t)(2 * (i % 8 * 4 + i % 32 / 8) + (i / 32 != (layer.high_first != 0)));
    for (int64_t k = 0; k < up(layer.in_features, SPAN); k += SPAN, units++) {
        Integers found;
        to_integers(x + k, least(SPAN, layer.in_features - k), found);
        *units = found.unit * layer.unit;
        for (int64_t i = 0; i < SPAN; i += 8 * W, limbs += LIMBS * 8 * W, sums += 2 * W) {
            for (int64_t lane = 0; lane < W; lane++) {
                int32_t high, low;
                add_up(found, i + 8 * lane, 8, high, low);
                sums[lane] = -layer.offset * high, sums[W + lane] = -layer.offset * low;
            }
            for (int64_t j = 0; j < 8 * W; j += 64)
                for (int half = 0; half < 2; half++)
                    put_limbs(found.limbs + i + j, order[half], limbs + j / 2 + half * 4 * W, 8 * W);
        }
    }
}

static void count_activations(const Layer &layer, const float *x32, int64_t rows, int64_t stride, char *limbs,
                              float *units, int32_t *sums) {
    for (int64_t m = 0; m < rows; m++)
        (has_columns(layer) ? count_columns : count_rows)(layer, x32 + m * stride,
                                                          limbs + m * limbs_nbytes(layer),
                                                          units + m * spans(layer), sums + m * totals(layer));
}
