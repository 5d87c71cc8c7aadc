// Choice of the instruction set and of the form of a product. Included by kernels.cpp.

namespace {

// True if the processor multiplies bfloat16.
bool has_short() {
#if defined(__x86_64__)
    return bfloat16::has_bfloats();
#else
    return false;
#endif
}

int detect() {
#if defined(HFQ_EMULATE)
    return 2;
#elif defined(__x86_64__)
    return cpu_features::found().avx512 ? 2 : cpu_features::found().avx2;
#else
    return 0;
#endif
}

int chosen = -1;  // level in use: 0 scalar, 1 AVX2, 2 AVX-512; -1 until it is detected

int level() { return chosen < 0 ? chosen = detect() : chosen; }

// True if products with subnormal floats take no longer than others, as on AMD's processors. On Intel's, they
// are far slower.
bool detect_subnormals() {
#if defined(__x86_64__)
    return cpu_features::found().is_amd;
#else
    return false;
#endif
}

int subnormals = -1;  // 1 if e4m3 codes are read as small floats, 0 if not; -1 until it is detected

int byte_dots = -1;  // 1 if dot products of bytes are used, 0 if not; -1 until it is detected

// True if dot products of bytes multiply integer activations.
bool uses_vnni() {
#if defined(__x86_64__)
    if (byte_dots < 0) byte_dots = vnni::detect();
    return byte_dots && level() == 2;
#else
    return false;
#endif
}

// True if e4m3 codes are read as small floats, which requires whole vectors in each block.
bool has_order(const Layer &layer, int64_t rows) {
    if (subnormals < 0) subnormals = detect_subnormals();
    if (layer.kind != E4M3 || rows > ORDERED_ROWS || !subnormals || level() < 1) return false;
    return layer.block_in % (32 << (level() - 1)) == 0 || layer.block_in >= layer.in_features;
}

const Work linear_works[][2] = {
    {scalar::rows_part, scalar::columns_part},
#if defined(__x86_64__)
    {avx2::rows_part, avx2::columns_part},
    {avx512::rows_part, avx512::columns_part},
    {vnni::rows_part, vnni::columns_part},
#endif
};
bool (*const widens[])(const Layer &, const char *, int32_t, int64_t, int64_t, int64_t, float *) = {
    scalar::widen,
#if defined(__x86_64__)
    avx2::widen,
    avx512::widen,
#endif
};
void (*const counts[])(const Layer &, const float *, int64_t, int64_t, char *, float *, int32_t *) = {
    scalar::count_activations,
#if defined(__x86_64__)
    avx2::count_activations,
    avx512::count_activations,
#endif
};
void (*const orders[])(const Layer &, const float *, int64_t, int64_t, float *) = {
    scalar::order_activations,
#if defined(__x86_64__)
    avx2::order_activations,
    avx512::order_activations,
#endif
};
void (*const block_sums[])(const float *, int64_t, float *) = {
    scalar::sum_parts,
#if defined(__x86_64__)
    avx2::sum_parts,
    avx512::sum_parts,
#endif
};
void (*const activation_sorts[])(const Layer &, int64_t, int64_t, float *, float *) = {
    scalar::sort_activations,
#if defined(__x86_64__)
    avx2::sort_activations,
    avx512::sort_activations,
#endif
};
const Work panel_works[][2] = {
    {scalar::rows_panel, scalar::columns_panel},
#if defined(__x86_64__)
    {avx2::rows_panel, avx2::columns_panel},
    {avx512::rows_panel, avx512::columns_panel},
#endif
};

Work linear_work(const Layer &layer) { return linear_works[uses_vnni() ? 3 : level()][has_columns(layer)]; }

// Output rows per part. All rows of a part share their scales, if any do. Scales are multiplied with the
// activations once per part, so longer parts need fewer multiplications.
int64_t ordered_width(const Layer &layer, int threads) {
    int64_t width = 128;
    while (width > TILE_ROWS && (layer.block_out % width || layer.out_features < 8 * width * threads))
        width /= 2;
    return width;
}

// Divides the outputs of a multiplication into parts.
OutputParts cut_product(const Layer &layer, int64_t rows, int threads, bool integers, bool ordered) {
    const bool columns = has_columns(layer), along = uses_vnni() && layer.scale_dtype <= F16;
    const int64_t width = columns   ? tile_columns(layer, rows, threads, integers, along)
                          : ordered ? ordered_width(layer, threads)
                                    : TILE_ROWS;
    // without VNNI, the other kinds read words across cache lines at no cost
    const bool by_lines = integers && columns && (layer.kind == AWQ || uses_vnni());
    return cut_outputs(layer, width, threads, by_lines);
}

// True if two layers take the same prepared activations.
bool is_alike(const Layer &a, const Layer &b) {
    return a.in_features == b.in_features && a.block_in == b.block_in && a.block_out == b.block_out &&
           a.kind == b.kind && a.block_type == b.block_type && a.bits == b.bits && a.groups == b.groups &&
           !a.index && !b.index && a.integers == b.integers && a.unit == b.unit && a.values == b.values &&
           a.row_zeros == b.row_zeros && a.scale_step == b.scale_step && a.high_first == b.high_first &&
           a.offset == b.offset;
}

// Prepares the activations for the kernels, in `scratch`.
MatmulArgs prepare(const Layer &layer, const char *x, int32_t x_dtype, int64_t rows, int64_t x_stride,
                   char *y, int32_t y_dtype, int64_t y_stride, float *scratch, int threads) {
    int64_t stride = padded_columns(layer);
    bool finite = widens[level()](layer, x, x_dtype, rows, x_stride, stride, scratch);
    if (is_sorted(layer))
        activation_sorts[level()](layer, rows, stride, scratch, (float *)layer.index + layer.in_features);
    bool integers = finite && level() > 0 && has_integers(layer, rows);
    float *units = scratch + padded_rows(layer, rows) * stride;
    int32_t *totals = (int32_t *)(units + rows * spans(layer));
    char *limbs = (char *)(totals + rows * ::totals(layer));
    if (integers) counts[level()](layer, scratch, rows, stride, limbs, units, totals);
    bool ordered = finite && has_order(layer, rows);
    if (ordered) orders[level()](layer, scratch, rows, stride, units);
    const bool sums = layer.kind == BLOCKS && rows == 1;
    if (sums) block_sums[level()](scratch, layer.in_features, units);
    const OutputParts outputs = cut_product(layer, rows, threads, integers, ordered);
    return {&layer, scratch, rows, stride, outputs, y, y_stride, y_dtype,
            integers ? limbs : nullptr, units, totals, ordered ? units : nullptr, sums ? units : nullptr};
}

// True if a layer's channels can be sorted, provided that its groups have equal sizes.
bool is_sortable(const Layer &layer) {
    if (level() < 1 || layer.kind != GPTQ || !layer.index_nbytes || layer.bits == 3) return false;
    if (layer.in_features * layer.bits % 32 || layer.block_in * layer.bits % 32) return false;
    return layer.in_features * MOST_STRIP * (8 + layer.bits) / 8 <= SORTED_SCRATCH;
}

// Writes the channels in the order of their groups. Returns false if a group has another size than in a layer
// without an index.
bool sort_channels(const Layer &layer, int32_t *order) {
    int64_t next[MOST_GROUPS];
    if (layer.groups > MOST_GROUPS) return false;
    for (int64_t group = 0; group < layer.groups; group++) next[group] = group * layer.block_in;
    for (int64_t k = 0; k < layer.in_features; k++) {
        const int64_t group = group_of(layer, k), place = next[group]++;
        if (place >= least((group + 1) * layer.block_in, layer.in_features)) return false;
        order[place] = (int32_t)k;
    }
    return true;
}

// One of several multiplications of a call.
struct Item {
    const Layer *layer;  // right factor
    int64_t rows;        // rows of activations
    const char *x;       // address of the first row of activations
    char *y;             // address of the first row of results
};

// Replaces layers that have an index by copies with a copied and checked index, since an index on disk can
// change after the check. With `sorts`, sorts the layers that can be sorted. Memory for a row of activations
// follows each order. Returns 0, -2 for an index out of range, or -3 if memory ran out.
int settle(Item *items, int64_t count, bool sorts = true) {
    int64_t channels = 0, indexed = 0;
    for (int64_t i = 0; i < count; i++)
        if (items[i].layer->index_nbytes) channels += items[i].layer->in_features, indexed++;
    if (!channels) return 0;
    Layer *copy = (Layer *)order_scratch.get(3 * channels + indexed * (int64_t)sizeof(Layer) / 4);
    if (!copy) return -3;
    int32_t *next = (int32_t *)(copy + indexed);
    for (int64_t i = 0; i < count; i++) {
        if (!items[i].layer->index_nbytes) continue;
        Layer &layer = *copy = *items[i].layer;
        items[i].layer = copy++;
        int32_t *order = next, *index = order + 2 * layer.in_features;
        for (int64_t k = 0; k < layer.in_features; k++) {
            const int64_t group = group_of(layer, k);
            if (group < 0 || group >= layer.groups) return -2;
            index[k] = (int32_t)group;
        }
        layer.index = (const char *)index, layer.index_nbytes = 4;
        if (sorts && is_sortable(layer) && sort_channels(layer, order))
            layer.index = (const char *)order, layer.index_nbytes = 0;
        next = index + layer.in_features;
    }
    return 0;
}

// The same for one layer.
int settle(const Layer *&layer, bool sorts = true) {
    Item item = {layer, 0, nullptr, nullptr};
    const int status = settle(&item, 1, sorts);
    layer = item.layer;
    return status;
}

bool any_sorted(const Item *items, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (is_sorted(*items[i].layer)) return true;
    return false;
}

// True if integers would be multiplied, were all activations finite. With integers, a row's bits do not
// depend on the other rows. A row that is not finite must not change them, so rows are then computed one by
// one.
bool has_faulty_rows(const MatmulArgs &args) {
    return args.rows > 1 && level() > 0 && !args.limbs && has_integers(*args.layer, args.rows);
}

// Several multiplications whose parts are numbered consecutively.
struct Group {
    const MatmulArgs *args;  // arguments of each multiplication
    const int64_t *ends;     // number of parts up to the end of each multiplication
};

void group_part(const void *context, int64_t part, float *scratch) {
    const Group &group = *(const Group *)context;
    int64_t i = 0;
    while (group.ends[i] <= part) i++;
    linear_work(*group.args[i].layer)(&group.args[i], part - (i ? group.ends[i - 1] : 0), scratch);
}

// Threads that each of `count` multiplications is cut for. Of many, each thread takes whole ones, which read
// long runs of memory.
int threads_of_each(int64_t count, int threads) { return count >= 4 * threads ? 1 : threads; }

int short_forms = 2;  // best form of products in bfloat16: 0 none, 1 by vectors, 2 by tiles

#if defined(__x86_64__)
bool uses_tiles() {
    static const bool found = bfloat16::detect();
    return short_forms > 1 && found;
}

// True if dot products of bfloat16 multiply the rows one by one. With tiles, only a single row is.
bool is_dotted(const Layer &layer, int64_t rows) {
    if (layer.kind == BLOCKS) return block_dots::reads(layer, rows);
    return bfloat16_dots::reads(layer) && rows <= (uses_tiles() ? 1 : bfloat16_dots::MOST);
}

// The fewest rows that are multiplied in bfloat16. Without tiles, integers are faster for few rows if they
// take less time to unpack.
int64_t least_short(const Layer &layer) {
    if (uses_tiles() || !has_integers(layer, 1)) return 2;
    if (!has_columns(layer)) return LIMB_ROWS + 1;
    return layer.kind == AWQ ? 6 : layer.bits == 3 ? 4 : 2;
}
#endif

// True if activations are multiplied in bfloat16, by tiles or vectors. This holds for bfloat16, and for
// enough rows of float16: each is the sum of two rows of bfloat16, which for few rows take longer than
// integers.
bool is_short(const Layer &layer, int64_t rows, int32_t dtype) {
#if defined(__x86_64__)
    if (!short_forms || level() < 2 || !has_short() || dtype == F32) return false;
    if (dtype == F16) return rows > LIMB_ROWS && bfloat16::reads(layer);
    if (is_dotted(layer, rows)) return true;
    return rows >= least_short(layer) && bfloat16::reads(layer);
#else
    return false;
#endif
}

#if defined(__x86_64__)
// Several jobs whose parts are numbered consecutively.
struct Jobs {
    const bfloat16::Job *jobs;  // each job
    const int64_t *ends;        // number of parts up to the end of each job
};

void job_part(const void *context, int64_t part, float *scratch) {
    const Jobs &all = *(const Jobs *)context;
    int64_t i = 0;
    while (all.ends[i] <= part) i++;
    const bfloat16::Job &job = all.jobs[i];
    const int64_t own = part - (i ? all.ends[i - 1] : 0), first = job.outputs.first(own),
                  width = job.outputs.count(own);
    if (job.apart && job.layer->kind == BLOCKS) block_dots::part(job, first, width);
    else if (job.apart) bfloat16_dots::part(job, first, width, scratch);
    else bfloat16::part(job, first, width, scratch);
}

// Floats of scratch that run_short keeps for a multiplication.
int64_t short_floats(const Item &item, int32_t dtype) {
    const int64_t rows = item.rows * bfloat16::rows_of(dtype);
    return up(bfloat16::packed_floats(*item.layer, rows) + bfloat16::sum_floats(*item.layer, rows), 16);
}

// Floats of scratch that run_short keeps for the descriptions of `count` multiplications.
int64_t jobs_floats(int64_t count) {
    return up(count * (int64_t)(sizeof(bfloat16::Job) + sizeof(int64_t)), 64) / 4;
}

// True if two multiplications take the same prepared activations.
bool has_same_activations(const Item &a, const Item &b) {
    return a.x == b.x && a.rows == b.rows && is_alike(*a.layer, *b.layer);
}

// Computes several multiplications together. Returns 0, or -3 if memory ran out.
int run_short(const Item *items, int64_t count, int32_t dtype, int64_t x_stride, int64_t y_stride,
              int threads) {
    int64_t floats = jobs_floats(count), own = own_floats(any_sorted(items, count)), products = 0, parts = 0;
    for (int64_t i = 0; i < count; i++) {
        const Layer &layer = *items[i].layer;
        floats += short_floats(items[i], dtype);
        own = most(own, bfloat16::brought_floats(layer, dtype));
        products += items[i].rows * layer.in_features * layer.out_features;
    }
    float *scratch = activation_scratch.get(floats);
    if (!scratch || !own_scratch.get(own)) return -3;
    const int wanted = worthwhile(threads, products), sharing = threads_of_each(count, wanted);
    bfloat16::Job *jobs = (bfloat16::Job *)scratch;
    int64_t *ends = (int64_t *)(jobs + count);
    scratch += jobs_floats(count);
    for (int64_t i = 0; i < count; i++) {
        const Layer &layer = *items[i].layer;
        const int64_t rows = items[i].rows, packed = rows * bfloat16::rows_of(dtype);
        const int64_t size = short_floats(items[i], dtype);
        float *factors = scratch + size - 2 * packed,
              *sums = bfloat16::has_least(layer) ? factors - bfloat16::sum_floats(layer, packed) : nullptr;
        jobs[i] = bfloat16::plan(layer, packed, dtype, items[i].y, y_stride, (const char *)scratch, factors,
                                 sharing, uses_tiles());
        jobs[i].sums = sums;
        if (is_dotted(layer, rows))
            jobs[i].apart = true,
            jobs[i].outputs = cut_outputs(layer, layer.kind == BLOCKS
                                                     ? block_dots::part_width(layer, sharing)
                                                     : bfloat16_dots::part_width(layer, rows, sharing));
        if (i && has_same_activations(items[i], items[i - 1])) {
            jobs[i].x = jobs[i - 1].x, jobs[i].factors = jobs[i - 1].factors, jobs[i].sums = jobs[i - 1].sums;
            ends[i] = parts += jobs[i].outputs.parts;
            continue;
        }
        bfloat16::Packing packing = {
            &layer, items[i].x, packed, x_stride, jobs[i].depth, dtype, jobs[i].apart, jobs[i].halved,
            (char *)scratch, factors, sums, {}};
        bfloat16::find_order(layer, packing.order);
        run_parts({bfloat16::pack_block, &packing, jobs[i].apart ? packed : bfloat16::blocks(packed), own},
                  threads, rows > MOST_ROWS ? wanted : 1);
        ends[i] = parts += jobs[i].outputs.parts;
        scratch += size;
    }
    const Jobs all = {jobs, ends};
    run_parts({job_part, &all, parts, own}, threads, wanted);
    return 0;
}

// Rows of the next multiplication of many rows; a short remainder might be multiplied in another form.
int64_t next_rows(int64_t left, int32_t dtype) {
    const int64_t together = bfloat16::MOST / bfloat16::rows_of(dtype);
    return left > together && left <= together + bfloat16::HALF ? together / 2 : least(together, left);
}

int run_all_short(const Layer &layer, int64_t rows, int32_t dtype, const char *x, int64_t x_stride, char *y,
                  int64_t y_stride, int threads) {
    for (int64_t first = 0, count; first < rows; first += count) {
        count = next_rows(rows - first, dtype);
        const Item item = {&layer, count, x + 2 * first * x_stride, y + 2 * first * y_stride};
        const int status = run_short(&item, 1, dtype, x_stride, y_stride, threads);
        if (status != 0) return status;
    }
    return 0;
}
#endif

}  // namespace
