// Products of few rows by a weight of 16-bit floats. Included by instruction_set.h in the namespace of each
// instruction set. The order of a sum depends on the number of channels only.

// Writes a row of activations as floats: of each 2 W channels, the even ones, then the odd ones. float16 and
// the channels left over keep their order.
void spread_row(const char *x, int32_t dtype, int64_t channels, float *to) {
    const int64_t whole = dtype == BF16 ? channels / (2 * W) * (2 * W) : 0;
    for (int64_t k = 0; k < channels; k++) {
        const int64_t place = k % (2 * W) / 2 + k % 2 * W;
        to[k < whole ? k / (2 * W) * (2 * W) + place : k] = float_at(x, dtype, k);
    }
}

// Multiplies ROWS rows of activations by one row of a weight.
template <int ROWS>
static HFQ_INLINE void dense_row(const DenseProduct &of, const char *weight, vf (*sums)[2], float *rest) {
    const int64_t whole = of.channels / (2 * W) * (2 * W);
    for (int64_t k = 0; k < whole; k += 2 * W) {
        vf even, odd;
        __builtin_prefetch(weight + 2 * k + AHEAD);
        if (of.dtype == BF16) {
            const vu words = load<vu>(weight + 2 * k);
            even = (vf)(words << 16), odd = (vf)(words & 0xFFFF0000);
        } else {
            even = from_half(load<vuh>(weight + 2 * k)), odd = from_half(load<vuh>(weight + 2 * (k + W)));
        }
        HFQ_UNROLL
        for (int m = 0; m < ROWS; m++) {
            const float *x = of.x + m * of.stride + k;
            sums[m][0] = fma(even, load<vf>(x), sums[m][0]);
            sums[m][1] = fma(odd, load<vf>(x + W), sums[m][1]);
        }
    }
    for (int64_t k = whole; k < of.channels; k++)
        for (int m = 0; m < ROWS; m++) rest[m] += of.x[m * of.stride + k] * float_at(weight, of.dtype, k);
}

template <int ROWS> static void dense_rows(const DenseProduct &of, int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n++) {
        vf sums[ROWS][2] = {};
        float rest[ROWS] = {};
        dense_row<ROWS>(of, of.weight + 2 * n * of.channels, sums, rest);
        for (int m = 0; m < ROWS; m++) {
            const vf both = sums[m][0] + sums[m][1];
            float sum = rest[m];
            for (int i = 0; i < W; i++) sum += both[i];
            const uint16_t half = of.dtype == BF16 ? float_to_bfloat(sum) : float_to_half(sum);
            memcpy(of.y + 2 * (m * of.outputs + n), &half, 2);
        }
    }
}

void dense_part(const void *context, int64_t part, float *) {
    const DenseProduct &of = *(const DenseProduct *)context;
    const int64_t first = part * of.width, last = least(first + of.width, of.outputs);
    static void (*const forms[])(const DenseProduct &, int64_t, int64_t) = {
        dense_rows<1>, dense_rows<2>, dense_rows<3>, dense_rows<4>,
        dense_rows<5>, dense_rows<6>, dense_rows<7>, dense_rows<8>};
    forms[of.rows - 1](of, first, last);
}
