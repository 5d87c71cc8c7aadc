// Products of packed activations and unpacked codes. Included by bfloat16.h, in its namespace.

// Unpacked codes of a pair of tiles, in pieces of channels. Each output has one scale per piece.
struct Step {
    const char *codes;  // address of the unpacked codes, bfloat16
    int64_t k;          // first channel
    int64_t count;      // number of pieces
    struct {
        int64_t first;        // first channel
        int64_t stop;         // channel after the last one
        const float *scales;  // one per output of the pair
        const float *least;   // minima of ggml's blocks, one per output; or null
    } pieces[2 * MOST_DEPTH / CHANNELS];  // in the order of channels
    float *totals;  // destination of the sums, 256 float32 per tile
};
// Multiplies a step's codes by all activations, block by block, so that totals stay in the cache.
template <bool LEFT, class Flow> static void add_step(const Job &job, Flow &flow, const Step &step) {
    float *totals = step.totals;
    for (int64_t b = 0; b < blocks(job.rows); b += 2, totals += 4 * 256) {
        const int64_t rows = least(BLOCK, job.rows - b * BLOCK),
                      others = least(BLOCK, job.rows - (b + 1) * BLOCK);
        const char *x = job.x + place_of(*job.layer, job.rows, job.depth, b, step.k);
        const char *other =
            others > 0 ? job.x + place_of(*job.layer, job.rows, job.depth, b + 1, step.k) : nullptr;
        for (int64_t i = 0; i < step.count; i++) {
            const int64_t start = step.pieces[i].first - step.k,
                          length = step.pieces[i].stop - step.pieces[i].first;
            const Factor first = {x + 2 * start * rows, LEFT ? (job.halved ? 8 : 4) * rows : 64, 64 * rows,
                                  rows};
            const Factor second = {other ? other + 2 * start * others : nullptr, LEFT ? 4 * others : 64,
                                   64 * others, others};
            if constexpr (LEFT && !Flow::IS_TILED)
                if (job.layer->kind == BLOCKS) {
                    const int64_t parts = job.layer->in_features / 32,
                                  part = b * parts + step.pieces[i].first / 32;
                    const float *sums = step.pieces[i].least ? job.sums + part * BLOCK : nullptr;
                    flow.multiply_part(step.codes + start / CHANNELS * 2 * amx::TILE + start % CHANNELS * 2,
                                       first, second, length / 2, step.pieces[i].scales,
                                       step.pieces[i].least, sums, parts * BLOCK, totals);
                    continue;
                }
            const int64_t tiles = up(length, LEFT ? 2 * CHANNELS : CHANNELS) / CHANNELS;
            flow.multiply(step.codes + start / CHANNELS * 2 * amx::TILE, first, second, tiles,
                          step.pieces[i].scales, totals);
        }
    }
}

// Writes the results of one block of rows and of a pair's outputs, except the first `skipped`, from `totals`,
// in the activations' dtype.
template <bool LEFT> static void write_pair(const Job &job, int64_t n, int64_t skipped, int64_t columns,
                                            int64_t row, int64_t rows, const float *totals) {
    const float shared = is_integer(job.layer->kind) ? job.layer->shared : 1.0f;
    const bool is_two = job.halved || job.dtype == F16;  // each result is a sum of two
#if defined(HFQ_AMX)
    __m512i tiles[2][16];
    for (int t = 0; t < 2; t++) {
        HFQ_UNROLL
        for (int i = 0; i < 16; i++) tiles[t][i] = _mm512_load_si512(totals + 256 * t + 16 * i);
        if (LEFT) amx::transpose(tiles[t]);
    }
    for (int64_t m = 0; m < rows; m++) {
        const float *factors = job.factors + 2 * (row + m) * rows_of(job.dtype);
        __m256i halves[2];
        HFQ_UNROLL
        for (int t = 0; t < 2; t++) {
            __m512 value = _mm512_castsi512_ps(tiles[t][is_two ? 2 * m : m]);
            if (is_two) value = _mm512_add_ps(value, _mm512_castsi512_ps(tiles[t][2 * m + 1]));
            value = _mm512_mul_ps(value, _mm512_set1_ps(shared));
            if (job.dtype == F16) {  // the range of float16 never requires normalization
                halves[t] = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
                continue;
            }
            value =
                _mm512_mul_ps(_mm512_mul_ps(value, _mm512_set1_ps(factors[0])), _mm512_set1_ps(factors[1]));
            const __m512i bits = _mm512_castps_si512(value),
                          odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
            __m512i rounded = _mm512_srli_epi32(
                _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
            rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q),
                                            _mm512_set1_epi32(0x7FC0));
            halves[t] = _mm512_cvtepi32_epi16(rounded);
        }
        const __m512i line = _mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1);
        _mm512_mask_storeu_epi16(job.y + 2 * ((row + m) * job.y_stride + n),
                                 (columns < PAIR ? (1u << columns) - 1 : ~0u) & ~0u << skipped, line);
    }
#else
    for (int64_t m = 0; m < rows; m++)
        for (int64_t j = skipped; j < columns; j++) {
            const float *factors = job.factors + 2 * (row + m) * rows_of(job.dtype),
                        *tile = totals + j / BLOCK * 256;
            const int64_t i = is_two ? 2 * m : m, place = LEFT ? 16 * (j % BLOCK) + i : 16 * i + j % BLOCK;
            float value = tile[place];
            if (is_two) value += tile[place + (LEFT ? 1 : 16)];
            const uint16_t half = job.dtype == F16
                                      ? float_to_half(value * shared)
                                      : float_to_bfloat(value * shared * factors[0] * factors[1]);
            memcpy(job.y + 2 * ((row + m) * job.y_stride + n + j), &half, 2);
        }
#endif
}

// Reads the scales of an output row.
static void find_row_scales(const Layer &layer, int64_t n, float *scales) {
    const int64_t groups = row_groups(layer);
    if (layer.scale_step == 1 && groups > 1) return avx512::row_scales(layer, n, groups, scales);
    for (int64_t g = 0; g < groups; g++) scales[g] = scale_at(layer, scale_place(layer, n, g));
}

// Reads the scales of a part's rows that do not share scales: [pair][group][32].
static void find_scales(const Layer &layer, int64_t first, int64_t width, float *scales, float *loose) {
    const int64_t groups = row_groups(layer);
    for (int64_t r = 0; r < up(width, PAIR); r++) {
        const int64_t n = first + least(r, width - 1);
        float *to = scales + r / PAIR * groups * PAIR + r % PAIR;
        find_row_scales(layer, n, loose);
        for (int64_t g = 0; g < groups; g++) to[g * PAIR] = loose[g];
    }
}

typedef void (*UnpackRows)(const Layer &, int64_t, int64_t, int64_t, int64_t, int64_t, char *);
inline UnpackRows row_unpacker(const Layer &layer) {
    if (folds(layer)) return unpack_folded;
    if (layer.kind == BLOCKS) return block_unpacker(layer).codes;
    switch (layer.kind) {
        case E4M3: return unpack_rows<E4M3>;
        case E5M2: return unpack_rows<E5M2>;
        case INT8: return unpack_rows<INT8>;
        case BIASED: return unpack_rows<BIASED>;
        default: return takes_zeros(layer) ? unpack_rows<ZEROED> : unpack_rows<NIBBLES>;
    }
}
typedef void (*UnpackColumns)(const Layer &, int64_t, int64_t, int64_t, int64_t, int64_t, const float *,
                              const char *, char *);
inline UnpackColumns column_unpacker(const Layer &layer) {
    const int bits = layer.kind == AWQ ? 0 : layer.bits;
    return bits == 0   ? unpack_columns<0>
           : bits == 2 ? unpack_columns<2>
           : bits == 3 ? unpack_columns<3>
           : bits == 4 ? unpack_columns<4>
                       : unpack_columns<8>;
}

// Unpacks a step: the pair of outputs from `first` + n in a part of `width`, and the channels from step.k.
// `slots` counts the pieces, whose scales reuse work.scales cyclically.
template <bool LEFT> static void unpack_step(const Job &job, TileScratch &work, int64_t first, int64_t width,
                                             int64_t n, int64_t &slots, char *codes, Step &step) {
    const Layer &layer = *job.layer;
    const int64_t size = group_size(layer), stop = least(layer.in_features, step.k + job.depth),
                  count = least(PAIR, width - n);
    if (layer.kind == AWQ && n == 0)
        copy_words(layer, first, width, step.k, stop - step.k, job.lead, work.words);
    if (LEFT) row_unpacker(layer)(layer, first + n, count, step.k, stop - step.k, job.lead, codes);
    step.count = 0, step.codes = codes;
    if (LEFT && layer.kind == BLOCKS) {
        const BlockUnpacker unpacker = block_unpacker(layer);
        float *scales = work.scales + slots++ % (MOST_SCALES / MOST_PARTS) * MOST_PARTS * PAIR;
        unpacker.scales(layer, first + n, count, step.k, stop - step.k, scales);
        for (int64_t at = step.k; at < stop; at += unpacker.part, step.count++)
            step.pieces[step.count] = {at, at + unpacker.part, scales + step.count * PAIR,
                                       has_least(layer) ? scales + (8 + step.count) * PAIR : nullptr};
        return;
    }
    for (int64_t at = step.k, end; at < stop; at = end) {
        const int64_t group = at / size;
        end = least(least(stop, (group + 1) * size), at + PIECE);
        float *scales = work.scales + slots++ % MOST_SCALES * PAIR;
        if (!LEFT) {
            find_group(layer, group, first + n, count, scales, work.zeros);
            column_unpacker(layer)(layer, first + n, count, at, end - at, job.lead, work.zeros,
                                   work.words + (at - step.k) * (MOST_FEW / 2) + n / 2,
                                   codes + (at - step.k) / CHANNELS * 2 * amx::TILE);
        } else if (folds(layer)) {
            find_unfolded(layer, first + n, count, step.k, stop - step.k, scales);
        } else if (shares_rows(layer)) {
            const float scale = scale_at(layer, scale_place(layer, first + n, group));
            for (int64_t r = 0; r < PAIR; r++) scales[r] = scale;
        } else {
            scales = work.scales + (n / PAIR * row_groups(layer) + group) * PAIR;
        }
        step.pieces[step.count++] = {at, end, scales, nullptr};
    }
}

// True if codes of columns are multiplied in the registers that they are unpacked to, for one block of
// activations. Sums are bit-identical to those of VectorFlow.
inline bool is_unstored(const Layer &layer, int64_t rows, bool by_tiles) {
#if defined(HFQ_AMX)
    return !by_tiles && rows <= BLOCK && has_columns(layer) && reads(layer);
#else
    return false;
#endif
}

#if defined(HFQ_AMX)
// Adds the products of ROWS activation rows and `rows` words of each column of TILES tiles to `totals`.
// Columns from `skipped` to `count` exist.
template <int BITS, int ROWS, int TILES>
static HFQ_INLINE void dot_words(const char *words, int64_t pitch, int64_t rows, int64_t skipped,
                                 int64_t count, int64_t lead, const float *zeros, const char *x,
                                 int64_t x_step, const float *scales, float *totals) {
    const __m512i table = all_integers();
    __mmask16 there[TILES];
    __m512i shifts[TILES];
    __m512 sums[ROWS][TILES] = {};
    HFQ_UNROLL
    for (int t = 0; t < TILES; t++) {
        const int64_t columns = most(0, least(BLOCK, count - BLOCK * t));
        there[t] = (__mmask16)(((1u << columns) - 1) & (t ? ~0u : ~0u << skipped)),
        shifts[t] = shifts_of<BITS>(zeros + BLOCK * t);
    }
    for (int64_t row = 0; row < rows; row += UNIT<BITS>, words += UNIT<BITS> * pitch) {
        const char *left = x + row / BITS * x_step + row % BITS * (64 / BITS);
        avx512::keep_place(left);
        HFQ_UNROLL
        for (int t = 0; t < TILES; t++) {
            const Columns from = {words + 64 * t, pitch, rows - row, there[t]};
            __m512i unit[UNIT<BITS>], pairs[PAIRS<BITS>];
            HFQ_UNROLL
            for (int i = 0; i < UNIT<BITS>; i++) {
                __builtin_prefetch(from.words + i * pitch + lead, 0, 2);
                unit[i] = from.word(i);
            }
            unpack_pairs<BITS>(unit, shifts[t], table, pairs);
            HFQ_UNROLL
            for (int i = 0; i < PAIRS<BITS>; i++)
                HFQ_UNROLL
                for (int m = 0; m < ROWS; m++)
                    dot_pairs(sums[m][t], (__m512bh)pairs[i], left + 64 * m + 4 * i);
        }
    }
    VectorFlow<false>::add_up<ROWS, TILES>(sums, scales, false, totals);
}

// The same for `rows` of AWQ's words, each of 8 columns: two channels at a time.
template <int ROWS, int TILES> static HFQ_INLINE void dot_awq(const char *words, int64_t pitch, int64_t rows,
                                                              int64_t count, int64_t lead, const float *zeros,
                                                              const char *x, int64_t x_step,
                                                              const float *scales, float *totals) {
    const __m512i table = all_integers();
    __mmask8 there[TILES / 2];
    __m512i added[TILES];
    __m512 sums[ROWS][TILES] = {};
    HFQ_UNROLL
    for (int t = 0; t < TILES; t++) added[t] = awq_shifts(zeros + BLOCK * t);
    HFQ_UNROLL
    for (int p = 0; p < TILES / 2; p++)
        there[p] = (__mmask8)((1u << most(0, least(PAIR, count - PAIR * p)) / 8) - 1);
    for (int64_t row = 0; row < rows; row += 2, words += 2 * pitch) {
        const char *left = x + row / CHANNELS * x_step + row % CHANNELS * 2;
        avx512::keep_place(left);
        __builtin_prefetch(words + lead, 0, 2), __builtin_prefetch(words + lead + pitch, 0, 2);
        HFQ_UNROLL
        for (int p = 0; p < TILES / 2; p++) {
            __m512i pairs[2];
            unpack_awq_pairs(words + PAIR / 2 * p, pitch, row + 1 < rows, there[p], added + 2 * p, table,
                             pairs);
            HFQ_UNROLL
            for (int t = 0; t < 2; t++)
                HFQ_UNROLL
                for (int m = 0; m < ROWS; m++)
                    dot_pairs(sums[m][2 * p + t], (__m512bh)pairs[t], left + 64 * m);
        }
    }
    VectorFlow<false>::add_up<ROWS, TILES>(sums, scales, false, totals);
}

// Multiplies the columns of a part in place. With fewer rows, more columns are multiplied together: enough
// independent sums hide latency, and longer runs of a row of words are read.
template <int BITS, int ROWS> static void dot_columns(const Job &job, TileScratch &work, int64_t first,
                                                      int64_t skipped, int64_t width, int64_t k,
                                                      int64_t m = 0) {
    const int TILES = ROWS == 2 || (BITS == 0 && ROWS == 4) ? 4 : ROWS <= HALF ? 2 : 1;
    const Layer &layer = *job.layer;
    const int64_t size = group_size(layer), stop = least(layer.in_features, k + job.depth),
                  pitch = layer.row_nbytes;
    const int64_t column = first + skipped, there = width - skipped, before = column % 8,
                  wide = up(width, 2 * PAIR) - skipped;
    // zero points are read from whole words
    const int64_t known = least(up(before + there, BLOCK), layer.out_features - column + before);
    for (int64_t at = k, end; at < stop; at = end) {
        const int64_t group = at / size;
        const char *words =
            layer.codes + (BITS == 0 ? at * pitch + first / 2 : at * BITS / 32 * pitch + 4 * first);
        const char *x = job.x + place_of(layer, job.rows, job.depth, 0, at) + 64 * m;
        end = least(least(stop, (group + 1) * size), at + PIECE);
        avx512::group_scales(layer, group, column, there, work.scales + skipped, wide);
        avx512::group_zeros(layer, group, column - before, known, work.zeros + 8 + skipped - before,
                            before + wide);
        for (int64_t n = 0; n < width; n += BLOCK * TILES) {
            const int64_t count = least(BLOCK * TILES, width - n);
            float *totals = work.totals + 16 * (n + m);
            if constexpr (BITS == 0)
                dot_awq<ROWS, TILES>(words + n / 2, pitch, end - at, count, job.lead, work.zeros + 8 + n, x,
                                     64 * job.rows, work.scales + n, totals);
            else
                dot_words<BITS, ROWS, TILES>(words + 4 * n, pitch, (end - at) * BITS / 32, n ? 0 : skipped,
                                             count, job.lead, work.zeros + 8 + n, x, 64 * job.rows,
                                             work.scales + n, totals);
        }
    }
}

template <int BITS> static void dot_unstored(const Job &job, TileScratch &work, int64_t first,
                                             int64_t skipped, int64_t width, int64_t k) {
    switch ((job.rows + 1) / 2) {
        case 1: return dot_columns<BITS, 2>(job, work, first, skipped, width, k);
        case 2: return dot_columns<BITS, 4>(job, work, first, skipped, width, k);
        case 3: return dot_columns<BITS, 6>(job, work, first, skipped, width, k);
        case 4: return dot_columns<BITS, 8>(job, work, first, skipped, width, k);
        case 5: case 6: return dot_columns<BITS, 12>(job, work, first, skipped, width, k);
        default: return dot_columns<BITS, 16>(job, work, first, skipped, width, k);
    }
}

// AWQ: up to eight rows at a time. Its codes are unpacked for two tiles together, whose sums fill the
// registers.
template <> void dot_unstored<0>(const Job &job, TileScratch &work, int64_t first, int64_t skipped,
                                 int64_t width, int64_t k) {
    for (int64_t m = 0; m < job.rows; m += HALF)
        switch ((least(HALF, job.rows - m) + 1) / 2) {
            case 1: dot_columns<0, 2>(job, work, first, skipped, width, k, m); break;
            case 2: dot_columns<0, 4>(job, work, first, skipped, width, k, m); break;
            case 3: dot_columns<0, 6>(job, work, first, skipped, width, k, m); break;
            default: dot_columns<0, 8>(job, work, first, skipped, width, k, m);
        }
}
#endif

static void dot_step(const Job &job, TileScratch &work, int64_t first, int64_t skipped, int64_t width,
                     int64_t k) {
#if defined(HFQ_AMX)
    if (job.layer->kind == AWQ) return dot_unstored<0>(job, work, first, skipped, width, k);
    (job.layer->bits == 2   ? dot_unstored<2>
     : job.layer->bits == 3 ? dot_unstored<3>
     : job.layer->bits == 4 ? dot_unstored<4>
                            : dot_unstored<8>)(job, work, first, skipped, width, k);
#endif
}

// Multiplies one part. Codes are multiplied one step after they are unpacked. By then they have left the
// processor's store queue, for which tiles would otherwise wait.
template <bool LEFT, class Flow>
static void part_of(const Job &job, int64_t first, int64_t width, float *scratch) {
    const Layer &layer = *job.layer;
    TileScratch &work = *(TileScratch *)scratch;
    Flow flow(job, work);
    const bool stores = LEFT || !is_unstored(layer, job.rows, job.by_tiles);
    const int64_t skipped = stores ? 0 : skipped_before(layer, job.outputs, first);
    first -= skipped, width += skipped;
    const int64_t each = blocks(job.rows) * 2 * 256;
    int64_t slots = 0, turn = 0;
    Step steps[2];
    memset(work.totals, 0, sizeof(float) * (up(width, PAIR) / PAIR * each));
    if (LEFT && !shares_rows(layer) && !folds(layer) && layer.kind != BLOCKS)
        find_scales(layer, first, width, work.scales, work.zeros);
    for (int64_t k = 0; k < layer.in_features; k += job.depth) {
        if (!stores) dot_step(job, work, first, skipped, width, k);
        for (int64_t n = 0; stores && n < width; n += PAIR, turn++) {
            Step &step = steps[turn % 2];
            step.k = k, step.totals = work.totals + n / PAIR * each;
            unpack_step<LEFT>(job, work, first, width, n, slots, work.codes[turn % 2], step);
            if (turn > 0) add_step<LEFT, Flow>(job, flow, steps[(turn - 1) % 2]);
        }
    }
    if (stores) add_step<LEFT, Flow>(job, flow, steps[(turn - 1) % 2]);
    flow.finish();
    for (int64_t b = 0; b < blocks(job.rows); b++)
        for (int64_t n = 0; n < width; n += PAIR)
            write_pair<LEFT>(job, first + n, n ? 0 : skipped, least(PAIR, width - n),
                             b * BLOCK / rows_of(job.dtype),
                             least(BLOCK, job.rows - b * BLOCK) / rows_of(job.dtype),
                             work.totals + n / PAIR * each + 2 * b * 256);
}

void part_of_layer(const Job &job, int64_t first, int64_t width, float *scratch) {
    const bool columns = has_columns(*job.layer);
    if (job.by_tiles)
        (columns ? part_of<false, TileFlow<false>> : part_of<true, TileFlow<true>>)(job, first, width,
                                                                                    scratch);
    else
        (columns ? part_of<false, VectorFlow<false>> : part_of<true, VectorFlow<true>>)(job, first, width,
                                                                                        scratch);
}

// Multiplies one part. Sorted layers are multiplied strip by strip; more rows use wider strips, since each
// strip reads all activations again.
void part(const Job &job, int64_t first, int64_t width, float *scratch) {
    if (!is_sorted(*job.layer)) return part_of_layer(job, first, width, scratch);
    const int64_t strip_width = avx512::strip_columns(*job.layer, job.rows > 4 * BLOCK ? width : 1);
    Job of = job;
    for (int64_t i = 0, count; i < width; i += count) {
        count = least(strip_width - skipped_before(*job.layer, job.outputs, first + i), width - i);
        const Layer strip = avx512::sort_strip(*job.layer, first + i, count, scratch);
        of.layer = &strip, of.lead = 0;  // sort_strip has prefetched already
        part_of_layer(of, first + i, count, scratch);
    }
}

// Returns the job of up to MOST rows, whose activations are packed at `packed`. With few activation rows and
// rows of codes, parts are as narrow as possible, and the next part is prefetched. Otherwise, the next
// channels are.
Job plan(const Layer &layer, int64_t rows, int32_t dtype, char *y, int64_t y_stride, const char *packed,
         const float *factors, int threads, bool by_tiles) {
    by_tiles &= layer.kind != BLOCKS;  // tiles would be stored after each part
    const bool columns = has_columns(layer), is_few = rows <= 2 * BLOCK;
    const int64_t size = group_size(layer), share = up(layer.out_features / (4 * most(threads, 1)), PAIR);
    int64_t width = is_few && !columns ? PAIR : most(PAIR, least(is_few ? MOST_FEW : MOST_WIDTH, share));
    if (!columns && !shares_rows(layer) && !folds(layer) && layer.kind != BLOCKS)
        width = most(PAIR, least(width, MOST_SCALES / row_groups(layer) * PAIR));
    // vectors multiply many rows faster if the codes fit into the first-level cache
    const bool is_deep = layer.kind == BLOCKS || (is_few ? !by_tiles && !columns : by_tiles);
    const int64_t deep = is_deep ? MOST_DEPTH : PIECE, depth = size % PIECE == 0 || size == layer.in_features
                                                                   ? deep
                                                                   : most(size, deep / size * size);
    const int64_t below = (layer.kind == AWQ ? depth : depth * layer.bits / 32) * layer.row_nbytes;
    const int64_t lead = columns ? below : is_few ? layer.row_nbytes * PAIR * threads : depth;
    const bool halved = !by_tiles && !columns && rows <= HALF && layer.kind != BLOCKS;
    // other products read words across cache lines at no cost
    const bool by_lines = layer.kind == GPTQ && rows <= HALF && is_unstored(layer, rows, by_tiles);
    const OutputParts outputs = cut_outputs(layer, width, threads, by_lines);
    return {&layer, packed, factors, nullptr, rows, depth, lead, outputs, y, y_stride, dtype,
            layer.kind <= E5M2 && layer.divides, by_tiles, halved, false};
}
