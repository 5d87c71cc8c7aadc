// Products by tiles and by dot products, and their division of work. Included by int8.cpp, in its namespace.

// Sizes of the work that is done together: pairs of blocks of rows, strips of 32 output features, and steps
// of channels whose activations stay in the second-level cache. If these are not all channels, the sums of
// several strips are kept, so that activations are read less often.
struct TilePlan {
    int64_t pairs;   // pairs of blocks of rows
    int64_t strips;  // strips of 32 output features
    int64_t steps;   // steps of 64 channels
    int64_t piece;   // steps per piece of the weight

    TilePlan(int64_t rows, int64_t in_features) {
        const int64_t all_pairs = (blocks_of(rows) + 1) / 2,
                      passes = (all_pairs + MOST_PAIRS - 1) / MOST_PAIRS;
        pairs = (all_pairs + passes - 1) / passes;
        steps = RESIDENT / (2 * amx::TILE * pairs) / PIECE * PIECE;
        if (steps > steps_of(in_features)) steps = steps_of(in_features);
        strips = steps < steps_of(in_features) ? MOST_STRIPS : 1;
        piece = pairs > FEW_PAIRS ? PIECE : SHORT_PIECE;
    }

    // words of a thread's sums: four tiles per strip and pair
    int64_t words() const { return strips * pairs * amx::TILE; }
};

// A piece of the weight that fits into the first-level cache: some steps of a strip.
struct Piece {
    alignas(64) int8_t tiles[PIECE][2][amx::TILE];  // codes of two tiles per step
};

// Copies `out` rows from `w` to a piece. Channels beyond the last are zero; rows beyond the last are
// unchanged.
AVX512 void copy_piece(const int8_t *w, int64_t pitch, int64_t out, int64_t channels, Piece &piece) {
    for (int64_t i = 0; i < out; i++, w += pitch) {
        int8_t *to = piece.tiles[0][i / SIDE] + i % SIDE * STEP;
        int64_t k = 0;
        for (; k + STEP <= channels; k += STEP, to += 2 * amx::TILE) memcpy(to, w + k, STEP);
        if (k < channels) memset(to, 0, STEP), memcpy(to, w + k, channels - k);
    }
}

// Multiplies a piece by 16 * ROWS rows, and adds to `sums`, or overwrites them if `is_first`. Meanwhile,
// prefetches rows from `ahead`, `pitch` bytes apart.
template <int ROWS> HFQ_AMX_TARGET void multiply_tiles(const Piece &piece, const int8_t *x, int64_t x_pitch,
                                                       int64_t steps, bool is_first,
                                                       int32_t (*sums)[SIDE * SIDE], const int8_t *ahead,
                                                       int64_t pitch, int64_t lines) {
    if (is_first) {
        amx::zero<0>(), amx::zero<1>();
        if (ROWS == 2) amx::zero<2>(), amx::zero<3>();
    } else {
        amx::load<0>(sums[0]), amx::load<1>(sums[1]);
        if (ROWS == 2) amx::load<2>(sums[2]), amx::load<3>(sums[3]);
    }
    for (int64_t step = 0; step < steps; step++, x += amx::TILE, ahead += STEP) {
        for (int64_t line = 0; line < lines; line++) fetch(ahead + line * pitch);
        amx::load<4>(piece.tiles[step][0]);
        amx::load<6>(x);
        amx::dot_bytes<0, 4, 6>();
        amx::load<5>(piece.tiles[step][1]);
        amx::dot_bytes<1, 5, 6>();
        if (ROWS == 2) amx::load<7>(x + x_pitch), amx::dot_bytes<2, 4, 7>(), amx::dot_bytes<3, 5, 7>();
    }
    amx::store<0>(sums[0]), amx::store<1>(sums[1]);
    if (ROWS == 2) amx::store<2>(sums[2]), amx::store<3>(sums[3]);
}

// Multiplies blocks of rows by a strip's rows from `w`, for some steps of channels, in pieces of `length`.
// `later` is the address of the weight that is multiplied next.
void multiply_strip(const MatmulArgs &args, int64_t length, int64_t from, int64_t to, const int8_t *w,
                    int64_t out, int64_t first_step, int64_t last_step, const int8_t *later,
                    int32_t (*sums)[SIDE * SIDE]) {
    const int64_t in = args.in_features, all_steps = steps_of(in), pairs = (to - from + 1) / 2;
    Piece piece;
    for (int64_t step = first_step; step < last_step; step += length) {
        const int64_t steps = std::min(last_step - step, length);
        const int8_t *next = step + length < last_step ? w + (step + length) * STEP : later;
        copy_piece(w + step * STEP, in, out, std::min(in - step * STEP, steps * STEP), piece);
        for (int64_t pair = 0; pair < pairs; pair++) {
            const int8_t *x = args.packed + ((from + 2 * pair) * all_steps + step) * amx::TILE;
            const int64_t fetched = WIDTH * pair / pairs, lines = WIDTH * (pair + 1) / pairs - fetched;
            (from + 2 * pair + 1 < to ? multiply_tiles<2>
                                      : multiply_tiles<1>)(piece, x, all_steps * amx::TILE, steps, step == 0,
                                                           sums + 4 * pair, next + fetched * in, in, lines);
        }
    }
}

// Multiplies output features from `first`, a multiple of 32, to `last` by all rows. `sums` has plan.words()
// words.
HFQ_AMX_TARGET void multiply_by_tiles(const MatmulArgs &args, const Scaling &scaling, const TilePlan &plan,
                                      int64_t first, int64_t last, int32_t (*sums)[SIDE * SIDE]) {
    amx::Tiles tiles;
    const int64_t in = args.in_features, all_steps = steps_of(in), blocks = blocks_of(args.rows),
                  stride = plan.pairs * 4;
    for (int64_t from = 0; from < blocks; from += 2 * plan.pairs)
        for (int64_t n = first; n < last; n += plan.strips * WIDTH) {
            const int64_t to = std::min(from + 2 * plan.pairs, blocks),
                          end = std::min(n + plan.strips * WIDTH, last);
            for (int64_t step = 0; step < all_steps; step += plan.steps) {
                const int64_t next = std::min(step + plan.steps, all_steps);
                for (int64_t i = n; i < end; i += WIDTH) {
                    const int8_t *w = args.weight + i * in;
                    const bool is_last = i + WIDTH >= end && next < all_steps;
                    const int8_t *later =
                        is_last ? args.weight + n * in + next * STEP : w + WIDTH * in + step * STEP;
                    const int64_t out = std::min(end - i, WIDTH);
                    multiply_strip(args, plan.piece, from, to, w, out, step, next, later,
                                   sums + (i - n) / WIDTH * stride);
                }
            }
            for (int64_t i = n; i < end; i += WIDTH) {
                float scales[WIDTH] = {};
                for (int64_t j = 0; j < std::min(end - i, WIDTH) && scaling.y; j++)
                    scales[j] = scaling.step(i + j);
                for (int64_t block = from; block < to; block++)
                    finish(args, scaling, sums + (i - n) / WIDTH * stride + (block - from) * 2, scales,
                           block * SIDE, i);
            }
        }
}

// Division into groups of rows and chunks of channels. All groups of a pass are multiplied per reading of the
// weight.
struct DotPlan {
    int64_t rows;    // rows of activations
    int64_t groups;  // groups of up to GROUP rows
    int64_t passes;  // passes of groups
    int64_t steps;   // steps of 64 channels
    int64_t chunks;  // chunks of steps
    int64_t strips;  // runs of 16 output features whose sums are kept together

    DotPlan(int64_t rows, int64_t in_features) : rows(rows), steps(steps_of(in_features)) {
        groups = (rows + GROUP - 1) / GROUP;
        chunks = (steps + CHUNK_STEPS - 1) / CHUNK_STEPS;
        passes =
            std::max((rows * (steps / chunks) * STEP + PASS - 1) / PASS, (rows + MOST_ROWS - 1) / MOST_ROWS);
        strips = chunks > 1 ? MOST_STRIPS : 1;
    }

    int64_t first_row(int64_t group) const { return rows * group / groups; }
    int64_t first_group(int64_t pass) const { return groups * pass / passes; }
    int64_t first_step(int64_t chunk) const { return steps * chunk / chunks; }
    int64_t stride() const { return SIDE * (rows / passes + 2 * GROUP); }  // sums per 16 output features
    int64_t words() const { return strips * stride(); }                   // words of a thread's sums
};

typedef void (*MultiplyDots)(const int8_t *const *, const int8_t *, int64_t, bool, int32_t *, const int8_t *,
                             int64_t, int64_t);
const MultiplyDots BY_ROWS[GROUP] = {multiply_dots<1>, multiply_dots<2>, multiply_dots<3>,
                                     multiply_dots<4>, multiply_dots<5>, multiply_dots<6>};

// Multiplies groups of rows by at most four output features from `n`, for some steps of channels. `later` is
// the address of the weight that is multiplied next.
void multiply_four(const MatmulArgs &args, const DotPlan &plan, int64_t from, int64_t to, int64_t n,
                   int64_t out, int64_t first_step, int64_t last_step, const int8_t *later, int32_t *sums) {
    const int64_t in = args.in_features, channels = std::min(in, last_step * STEP) - first_step * STEP;
    const int8_t *w[FOUR];
    for (int64_t i = 0; i < FOUR; i++)
        w[i] = args.weight + (n + std::min(i, out - 1)) * in + first_step * STEP;
    for (int64_t group = from; group < to; group++) {
        const int64_t first = plan.first_row(group), rows = plan.first_row(group + 1) - first;
        const int8_t *x = args.packed + (first * plan.steps + rows * first_step) * STEP;
        const int64_t fetched = FOUR * (group - from) / (to - from),
                      lines = FOUR * (group - from + 1) / (to - from) - fetched;
        BY_ROWS[rows - 1](w, x, channels, first_step == 0, sums + (first - plan.first_row(from)) * SIDE,
                          later + fetched * in, in, lines);
    }
}

// Multiplies output features from `first` to `last` by all rows. `sums` has plan.words() words.
void multiply_by_dots(const MatmulArgs &args, const Scaling &scaling, const DotPlan &plan, int64_t first,
                      int64_t last, int32_t *sums) {
    const int64_t in = args.in_features;
    for (int64_t pass = 0; pass < plan.passes; pass++) {
        const int64_t from = plan.first_group(pass), until = plan.first_group(pass + 1);
        for (int64_t n = first; n < last; n += plan.strips * SIDE) {
            const int64_t end = std::min(n + plan.strips * SIDE, last);
            for (int64_t chunk = 0; chunk < plan.chunks; chunk++) {
                const int64_t step = plan.first_step(chunk), next = plan.first_step(chunk + 1);
                for (int64_t i = n; i < end; i += FOUR) {
                    const bool is_last = i + FOUR >= end && next < plan.steps;
                    const int8_t *later =
                        args.weight + (is_last ? n * in + next * STEP : (i + FOUR) * in + step * STEP);
                    int32_t *to = sums + (i - n) / SIDE * plan.stride() + (i - n) % SIDE;
                    multiply_four(args, plan, from, until, i, std::min(end - i, FOUR), step, next, later, to);
                }
            }
            for (int64_t i = n; i < end; i += SIDE) {
                const int64_t count = std::min(end - i, SIDE);
                float scales[SIDE] = {};
                for (int64_t j = 0; j < count && scaling.y; j++) scales[j] = scaling.step(i + j);
                const int32_t *done = sums + (i - n) / SIDE * plan.stride();
                finish_dots(args, scaling, done, scales, plan.first_row(from), plan.first_row(until), i,
                            count);
            }
        }
    }
}
