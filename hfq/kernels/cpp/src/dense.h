// Products by weights of 16-bit floats. Included by kernels.cpp.

namespace {

// Arguments of hfq_dense.
struct DenseArguments {
    int64_t weight;    // address of the weight, of `dtype` [outputs, channels], contiguous, at any alignment
    int64_t x;         // address of the activations, of `dtype` [rows, channels], contiguous
    int64_t y;         // address of the results, of `dtype` [rows, outputs], contiguous
    int64_t rows;      // rows of activations, at most DENSE_ROWS
    int64_t channels;  // channels of a row
    int64_t outputs;   // outputs of a row
    int64_t dtype;     // BF16 or F16
    int64_t threads;   // the most threads to use
};

const Work dense_works[] = {
    scalar::dense_part,
#if defined(__x86_64__)
    avx2::dense_part,
    avx512::dense_part,
#endif
};
void (*const spreads[])(const char *, int32_t, int64_t, float *) = {
    scalar::spread_row,
#if defined(__x86_64__)
    avx2::spread_row,
    avx512::spread_row,
#endif
};

int multiply_dense(const DenseArguments &given) {
    const int64_t channels = given.channels, stride = up(channels, 16) + 16, rows = given.rows;
    const int32_t dtype = (int32_t)given.dtype;
    const int threads = (int)given.threads, wanted = worthwhile(threads, rows * channels * given.outputs);
    if (rows < 1 || rows > DENSE_ROWS || (dtype != BF16 && dtype != F16)) return -1;
    float *x = activation_scratch.get(rows * stride);
    if (!x || !own_scratch.get(own_floats(false))) return -3;
    for (int64_t m = 0; m < rows; m++)
        spreads[level()](at<const char>(given.x) + 2 * m * channels, dtype, channels, x + m * stride);
    const int64_t width = most(16, least(256, up(given.outputs / (4 * wanted), 16)));
    const DenseProduct product = {at<const char>(given.weight), x, at<char>(given.y), rows, channels,
                                  stride, given.outputs, width, dtype};
    run_parts({dense_works[level()], &product, (given.outputs + width - 1) / width, own_floats(false)},
              threads, wanted);
    return 0;
}

}  // namespace
