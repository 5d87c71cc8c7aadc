// Several multiplications together. Included by kernels.cpp.

namespace {

thread_local ThreadScratch item_scratch;  // multiplications of a caller

// True if this many rows are multiplied in bfloat16 by tiles or vectors, which support any number of rows.
bool is_tiled(const Layer *layer, int64_t rows, int32_t dtype) {
#if defined(__x86_64__)
    if (settle(layer) != 0) return false;
    return is_short(*layer, rows, dtype) && !(dtype == BF16 && is_dotted(*layer, rows));
#else
    return false;
#endif
}

// Floats of scratch that a multiplication keeps for the next call. They depend on the activations' size only.
int64_t linear_floats(const Layer &layer, int64_t rows) {
    int64_t floats = padded_rows(layer, rows) * padded_columns(layer);
    if (has_integers(layer, rows))
        floats += rows * (up(limbs_nbytes(layer), 4) / 4 + spans(layer) + totals(layer));
    if (layer.kind == E4M3 && rows <= ORDERED_ROWS) floats += rows * (ordered_columns(layer) + 2);
    if (layer.kind == BLOCKS && rows == 1) floats += part_sums(layer);
    return floats;
}

// The same for a multiplication and its description.
int64_t item_floats(const Item &item) {
    return linear_floats(*item.layer, item.rows) + (int64_t)(sizeof(MatmulArgs) + sizeof(int64_t)) / 4;
}

// Computes multiplications that are not in bfloat16. Returns 0, -3, or -4, as run_items.
int run_long(const Item *items, int64_t count, int64_t floats, int32_t dtype, int64_t x_stride,
             int64_t y_stride, int threads) {
    int64_t products = 0, parts = 0;
    for (int64_t i = 0; i < count; i++)
        products += items[i].rows * items[i].layer->in_features * items[i].layer->out_features;
    float *scratch = activation_scratch.get(floats);
    const int64_t own = own_floats(any_sorted(items, count));
    if (!scratch || !own_scratch.get(own)) return -3;
    const int wanted = worthwhile(threads, products), sharing = threads_of_each(count, wanted);
    MatmulArgs *args = (MatmulArgs *)scratch;
    int64_t *ends = (int64_t *)(args + count);
    scratch = (float *)(ends + count);
    for (int64_t i = 0; i < count; i++) {
        const Layer &layer = *items[i].layer;
        const int64_t rows = items[i].rows;
        if (i && has_same_activations(items[i], items[i - 1])) {
            args[i] = args[i - 1];
            args[i].layer = &layer, args[i].y = items[i].y;
            args[i].outputs = cut_product(layer, rows, sharing, args[i].limbs, args[i].ordered);
        } else {
            args[i] = prepare(layer, items[i].x, dtype, rows, x_stride, items[i].y, dtype, y_stride, scratch,
                              sharing);
            scratch += linear_floats(layer, rows);
        }
        if (has_faulty_rows(args[i])) return -4;
        ends[i] = parts += args[i].outputs.parts;
    }
    Group group = {args, ends};
    run_parts({group_part, &group, parts, own}, threads, wanted);
    return 0;
}

// Computes hfq_linear for each item; results are bit-identical. Items are computed together, as many as
// GROUPED_FLOATS of activations allow. Returns as hfq_linear, or -4 if rows must be computed one by one,
// which only hfq_linear does.
int run_items(Item *items, int64_t count, int32_t dtype, int64_t x_stride, int64_t y_stride, int threads) {
    if (const int status = settle(items, count)) return status;
    for (int64_t i = 0; i < count; i++) {
        const bool is_many = items[i].rows > MOST_ROWS;
        if (items[i].rows < 1 || (is_many && !is_short(*items[i].layer, items[i].rows, dtype))) return -1;
    }
    KeptSubnormals here;
    for (int64_t first = 0, next; first < count; first = next) {
        const bool in_short = is_short(*items[first].layer, items[first].rows, dtype);
        int64_t floats = 0;
#if defined(__x86_64__)
        if (in_short && items[first].rows > next_rows(items[first].rows, dtype)) {
            const Item &item = items[first];
            if (run_all_short(*item.layer, item.rows, dtype, item.x, x_stride, item.y, y_stride, threads))
                return -3;
            next = first + 1;
            continue;
        }
#endif
        for (next = first; next < count; next++) {
            const Item &item = items[next];
            if (is_short(*item.layer, item.rows, dtype) != in_short) break;
#if defined(__x86_64__)
            if (in_short && item.rows > next_rows(item.rows, dtype)) break;
            const int64_t more = in_short ? short_floats(item, dtype) : item_floats(item);
#else
            const int64_t more = item_floats(item);
#endif
            if (next > first && floats + more > GROUPED_FLOATS) break;
            floats += more;
        }
        int status;
#if defined(__x86_64__)
        if (in_short)
            status = run_short(items + first, next - first, dtype, x_stride, y_stride, threads);
        else
#endif
            status = run_long(items + first, next - first, floats, dtype, x_stride, y_stride, threads);
        if (status) return status;
    }
    return 0;
}

}  // namespace
