// Weighted sums of experts' results, and biases. Included by instruction_set.h in the namespace of each
// instruction set. Each product and each sum is rounded to the dtype of the results, as by torch.

static HFQ_INLINE vf read_values(const char *p, int64_t dtype) {
    if (dtype == F32) return load<vf>(p);
    if (dtype == F16) return from_half(load<vuh>(p));
    return (vf)(__builtin_convertvector(load<vuh>(p), vu) << 16);
}

// Rounds to bfloat16; NaN stays NaN.
static HFQ_INLINE vf round_bfloats(vf v) {
    const vu bits = (vu)v, up = bits + 0x7FFF + (bits >> 16 & 1);
    const vu is_nan = (vu)((bits & 0x7FFFFFFF) > 0x7F800000);
    return (vf)(((up & ~is_nan) | ((bits | 0x400000) & is_nan)) & 0xFFFF0000);
}

static HFQ_INLINE float round_value(float value, int32_t dtype) {
    if (dtype == F32) return value;
    if (dtype == F16) return half_to_float(float_to_half(value));
    return as_float((uint32_t)float_to_bfloat(value) << 16);
}

static HFQ_INLINE vf round_values(vf v, int32_t dtype) {
    if (dtype == F32) return v;
    if (dtype == BF16) return round_bfloats(v);
    for (int i = 0; i < W; i++) v[i] = round_value(v[i], F16);
    return v;
}

// Writes values that are rounded already.
static HFQ_INLINE void write_values(char *p, vf v, int32_t dtype) {
    if (dtype == F32) return store(p, v);
    if (dtype == BF16) return store(p, __builtin_convertvector((vu)v >> 16, vuh));
    for (int i = 0; i < W; i++) {
        const uint16_t half = float_to_half(v[i]);
        __builtin_memcpy(p + 2 * i, &half, 2);
    }
}

static HFQ_INLINE void write_value(char *p, float value, int32_t dtype) {
    if (dtype == F32) { __builtin_memcpy(p, &value, 4); return; }
    const uint16_t half = dtype == BF16 ? float_to_bfloat(value) : float_to_half(value);
    __builtin_memcpy(p, &half, 2);
}

static HFQ_INLINE vf read_some(const char *p, int32_t dtype, int64_t count) {
    if (count >= W) return read_values(p, dtype);
    vf values = {};
    for (int64_t i = 0; i < count; i++) values[i] = float_at(p, dtype, i);
    return values;
}

// Adds up the rows of one token.
void sum_experts(const void *context, int64_t token, float *) {
    const ExpertSums &of = *(const ExpertSums *)context;
    const int64_t size = of.dtype == F32 ? 4 : 2, *places = of.places + token * of.top_k;
    char *result = of.result + token * of.features * size;
    for (int64_t n = 0; n < of.features; n += W) {
        const int64_t count = of.features - n;
        vf sum = {};
        if (of.adds) sum = read_some(result + n * size, of.dtype, count);
        for (int64_t i = 0; i < of.top_k && places[i] >= 0; i++) {
            const int64_t place = places[i] / 2;
            const float weight = float_at(of.weights, of.weights_dtype, of.order[place]);
            const vf values = read_some(of.rows + (place * of.features + n) * size, of.dtype, count);
            sum = sum + round_values(values * weight, of.dtype);
            if (places[i] % 2 == 0) sum = round_values(sum, of.dtype);
        }
        if (count >= W) write_values(result + n * size, sum, of.dtype);
        else
            for (int64_t j = 0; j < count; j++) write_value(result + (n + j) * size, sum[j], of.dtype);
    }
}

// Adds the biases of one expert to its rows.
void add_biases(const void *context, int64_t expert, float *) {
    const BiasedRows &of = *(const BiasedRows *)context;
    const Bias &bias = of.biases[expert];
    const int64_t size = of.dtype == F32 ? 4 : 2, first = expert ? of.ends[expert - 1] : 0;
    for (int64_t row = first; row < of.ends[expert]; row++)
        for (int64_t n = 0; n < of.features; n++) {
            char *place = of.y + (row * of.y_stride + n) * size;
            const float added = round_value(float_at(bias.values, (int32_t)bias.dtype, n), of.dtype);
            write_value(place, float_at(place, of.dtype, 0) + added, of.dtype);
        }
}
