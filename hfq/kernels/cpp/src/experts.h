// All experts of a layer in two calls, before and after the model's own gating. Included by kernels.cpp.

namespace {

const int64_t MOST_FIRST = 2;  // layers that multiply an expert's input: gate and up, or both in one

// Arguments of hfq_experts_in. A pair is a token and one of its experts.
struct ExpertsIn {
    int64_t index;        // address of the expert of each pair, int64 [tokens, top_k]; others are ignored
    int64_t tokens;       // number of tokens
    int64_t top_k;        // pairs of a token
    int64_t experts;      // number of experts
    int64_t x;            // address of the tokens, [tokens, in_features] of `dtype`, contiguous
    int64_t dtype;        // Dtype of all activations
    int64_t first;        // number of layers that multiply an expert's input, at most MOST_FIRST
    int64_t layers[2];    // addresses of their Layers, one for each expert
    int64_t biases[2];    // addresses of their Biases, one for each expert; 0 if there are none
    int64_t y[2];         // addresses of their results, [pairs, out_features]
    int64_t y_stride;     // elements from one row of results to the next
    int64_t rows;         // address of memory for sorted tokens, [pairs, in_features] of `dtype`
    int64_t order;        // address of the result: the pair of each row, int64 [pairs]
    int64_t ends;         // address of the result: rows up to the end of each expert's, int64 [experts]
    int64_t most_rows;    // the most rows of an expert that are not in bfloat16
    int64_t threads;      // the most threads to use
};

// Arguments of hfq_experts_out.
struct ExpertsOut {
    int64_t tokens;         // as in ExpertsIn
    int64_t top_k;          // as in ExpertsIn
    int64_t experts;        // as in ExpertsIn
    int64_t x;              // address of the gated results, [pairs, in_features] of `dtype`, contiguous
    int64_t dtype;          // as in ExpertsIn
    int64_t layers;         // address of a Layer for each expert
    int64_t biases;         // address of a Bias for each expert; 0 if there are none
    int64_t rows;           // address of memory for results, [pairs, out_features] of `dtype`
    int64_t order;          // as hfq_experts_in returned it
    int64_t ends;           // as hfq_experts_in returned it
    int64_t weights;        // address of the weight of each pair, [tokens, top_k]
    int64_t weights_dtype;  // Dtype of the weights
    int64_t y;              // address of the sums, [tokens, out_features] of `dtype`
    int64_t most_rows;      // as in ExpertsIn
    int64_t threads;        // as in ExpertsIn
    int64_t adds;           // 1 to add to the sums that `y` has, 0 to write `y`
};

thread_local ThreadScratch place_scratch;  // rows of each token of a caller

template <class T> T *at(int64_t address) { return (T *)(uintptr_t)address; }

const Work sum_works[] = {
    scalar::sum_experts,
#if defined(__x86_64__)
    avx2::sum_experts,
    avx512::sum_experts,
#endif
};
const Work bias_works[] = {
    scalar::add_biases,
#if defined(__x86_64__)
    avx2::add_biases,
    avx512::add_biases,
#endif
};

// Tokens that are copied into the order of their experts.
struct SortedTokens {
    const char *x;         // address of the tokens
    char *rows;            // address of the copies
    const int64_t *order;  // pair of each copy
    int64_t top_k;         // pairs of a token
    int64_t nbytes;        // bytes of a token
    int64_t count;         // number of copies
};

const int64_t COPIED = 16;  // tokens that a thread copies at once

void copy_tokens(const void *context, int64_t part, float *) {
    const SortedTokens &of = *(const SortedTokens *)context;
    for (int64_t i = part * COPIED; i < least((part + 1) * COPIED, of.count); i++)
        memcpy(of.rows + i * of.nbytes, of.x + of.order[i] / of.top_k * of.nbytes, (size_t)of.nbytes);
}

// Writes the pairs in the order of their experts, and the rows up to the end of each expert's. Returns the
// number of pairs whose expert exists.
int64_t sort_pairs(const int64_t *index, int64_t pairs, int64_t experts, int64_t *order, int64_t *ends) {
    for (int64_t e = 0; e < experts; e++) ends[e] = 0;
    for (int64_t i = 0; i < pairs; i++)
        if (index[i] >= 0 && index[i] < experts) ends[index[i]]++;
    int64_t total = 0;
    for (int64_t e = 0; e < experts; e++) {
        const int64_t count = ends[e];
        ends[e] = total, total += count;
    }
    for (int64_t i = 0; i < pairs; i++)
        if (index[i] >= 0 && index[i] < experts) order[ends[index[i]]++] = i;
    return total;
}

// A projection of all experts.
struct Projection {
    const Layer *layers;  // a Layer for each expert
    char *y;              // address of the results
};

// Makes the multiplications of each expert that has rows. Returns their number, or -4 if hfq_linear has no
// form for a number of rows. With `shared`, all rows are the one at `x`.
int64_t make_items(Item *items, const Projection *projections, int64_t number, const int64_t *ends,
                   int64_t experts, const char *x, bool shared, int64_t y_stride, int32_t dtype,
                   int64_t most_rows) {
    const int64_t size = dtype == F32 ? 4 : 2;
    int64_t count = 0;
    for (int64_t e = 0, first = 0; e < experts; first = ends[e++]) {
        const int64_t rows = ends[e] - first;
        if (!rows) continue;
        for (int64_t p = 0; p < number; p++) {
            const Layer *layer = projections[p].layers + e;
            if (rows > most_rows && !is_tiled(layer, rows, dtype)) return -4;
            const char *from = shared ? x : x + first * layer->in_features * size;
            items[count++] = {layer, rows, from, projections[p].y + first * y_stride * size};
        }
    }
    return count;
}

// Finds the rows of each token in rising order: 2 * row, plus 1 if the next one is of the same expert. torch
// rounds the sum of an expert's results once, if a token chose it twice.
void find_places(const int64_t *order, const int64_t *ends, int64_t experts, int64_t tokens, int64_t top_k,
                 int64_t *places) {
    for (int64_t i = 0; i < tokens * top_k; i++) places[i] = -1;
    for (int64_t e = 0, row = 0; e < experts; e++)
        for (const int64_t first = row; row < ends[e]; row++) {
            int64_t *place = places + order[row] / top_k * top_k;
            const int64_t *begin = place;
            while (*place >= 0) place++;
            if (place > begin && place[-1] / 2 >= first) place[-1] |= 1;
            *place = 2 * row;
        }
}

void bias_rows(const Bias *biases, const int64_t *ends, int64_t experts, char *y, int64_t y_stride,
               int64_t features, int32_t dtype, int threads) {
    const BiasedRows rows = {ends, biases, y, y_stride, features, experts, dtype};
    run_parts({bias_works[level()], &rows, experts, own_floats(false)}, threads,
              worthwhile(threads, ends[experts - 1] * features));
}

int64_t experts_in(const ExpertsIn &given) {
    const int64_t pairs = given.tokens * given.top_k, experts = given.experts;
    int64_t *order = at<int64_t>(given.order), *ends = at<int64_t>(given.ends);
    const int64_t total = sort_pairs(at<const int64_t>(given.index), pairs, experts, order, ends);
    if (!total) return 0;
    const int32_t dtype = (int32_t)given.dtype;
    const int threads = (int)given.threads;
    Item *items = (Item *)item_scratch.get(given.first * least(experts, total) * (int64_t)sizeof(Item) / 4);
    if (!items || !own_scratch.get(own_floats(false))) return -3;
    Projection projections[MOST_FIRST];
    for (int64_t p = 0; p < given.first; p++)
        projections[p] = {at<const Layer>(given.layers[p]), at<char>(given.y[p])};
    // one token has at most a row of each expert, unless it chose one twice
    bool shared = given.tokens == 1;
    for (int64_t e = 0; e < experts && shared; e++) shared = ends[e] - (e ? ends[e - 1] : 0) <= 1;
    const char *x = at<const char>(shared ? given.x : given.rows);
    const int64_t count = make_items(items, projections, given.first, ends, experts, x, shared,
                                     given.y_stride, dtype, given.most_rows);
    if (count < 0) return count;
    const int64_t in_features = items[0].layer->in_features, nbytes = in_features * (dtype == F32 ? 4 : 2);
    const SortedTokens sorted = {
        at<const char>(given.x), at<char>(given.rows), order, given.top_k, nbytes, shared ? 0 : total};
    run_parts({copy_tokens, &sorted, (sorted.count + COPIED - 1) / COPIED, own_floats(false)}, threads,
              worthwhile(threads, sorted.count * in_features));
    const int status = run_items(items, count, dtype, in_features, given.y_stride, threads);
    if (status) return status;
    for (int64_t p = 0; p < given.first; p++)
        if (given.biases[p])
            bias_rows(at<const Bias>(given.biases[p]), ends, experts, at<char>(given.y[p]), given.y_stride,
                      at<const Layer>(given.layers[p])->out_features, dtype, threads);
    return total;
}

int64_t experts_out(const ExpertsOut &given) {
    const int64_t pairs = given.tokens * given.top_k, experts = given.experts;
    const int64_t *order = at<const int64_t>(given.order), *ends = at<const int64_t>(given.ends);
    const int64_t total = ends[experts - 1], features = at<const Layer>(given.layers)->out_features;
    const int32_t dtype = (int32_t)given.dtype;
    const int threads = (int)given.threads;
    Item *items = (Item *)item_scratch.get(least(experts, total) * (int64_t)sizeof(Item) / 4);
    int64_t *places = (int64_t *)place_scratch.get(2 * pairs);
    if (!items || !places || !own_scratch.get(own_floats(false))) return -3;
    const Projection down = {at<const Layer>(given.layers), at<char>(given.rows)};
    const int64_t count = make_items(items, &down, 1, ends, experts, at<const char>(given.x), false, features,
                                     dtype, given.most_rows);
    if (count < 0) return count;
    const int64_t in_features = at<const Layer>(given.layers)->in_features;
    const int status = run_items(items, count, dtype, in_features, features, threads);
    if (status) return status;
    if (given.biases)
        bias_rows(at<const Bias>(given.biases), ends, experts, at<char>(given.rows), features, features,
                  dtype, threads);
    find_places(order, ends, experts, given.tokens, given.top_k, places);
    const ExpertSums sums = {at<const char>(given.rows), at<const char>(given.weights), order, places,
                             at<char>(given.y), given.top_k, features, dtype, (int32_t)given.weights_dtype,
                             given.adds != 0};
    run_parts({sum_works[level()], &sums, given.tokens, own_floats(false)}, threads,
              worthwhile(threads, pairs * features));
    return total;
}

}  // namespace
