// Rows of codes. Included by vnni.h, in its namespace.

// Multiplies 8 * W codes of each of OUT output rows by ROWS activation rows.
template <int ROWS, int OUT, bool TABLE, bool SHIFTS>
static HFQ_INLINE void add_codes(const IntegerCodes &of, const IntegerRow *from, const char *const *at,
                                 int64_t group, const char *limbs, int64_t each, const int32_t *totals,
                                 int64_t totals_apart, const float *units, int64_t units_apart,
                                 vf (*total)[ROWS]) {
    vb codes[OUT][2];
    vf scale[OUT];
    HFQ_UNROLL
    for (int r = 0; r < OUT; r++)
        scale[r] = from[r].take<TABLE, SHIFTS>(of, at[r], group, codes[r][0], codes[r][1]);
    HFQ_UNROLL
    for (int m = 0; m < ROWS; m++) {
        vi sum[OUT][LIMBS];
        HFQ_UNROLL
        for (int r = 0; r < OUT; r++)
            sum[r][0] = load<vi>(totals + m * totals_apart), sum[r][1] = (vi){},
            sum[r][2] = load<vi>(totals + m * totals_apart + W);
        HFQ_UNROLL
        for (int i = 0; i < 2; i++)
            HFQ_UNROLL
            for (int d = 0; d < LIMBS; d++) {
                vsb x = load<vsb>(limbs + m * each + 8 * W * d + 4 * W * i);
                if (OUT > 1) keep_here(x);
                HFQ_UNROLL
                for (int r = 0; r < OUT; r++) sum[r][d] = dot_four(sum[r][d], codes[r][i], x);
            }
        const vf unit = all(units[m * units_apart]);
        HFQ_UNROLL
        for (int r = 0; r < OUT; r++)
            total[r][m] =
                fma(of_limbs(sum[r][0], sum[r][2] + (vi)((vu)sum[r][1] << 8)) * unit, scale[r], total[r][m]);
    }
}

// Multiplies OUT output rows by ROWS activation rows; the same as dot_integers.
template <int ROWS, int OUT, bool TABLE, bool SHIFTS>
static void dot_rows(const MatmulArgs &args, const IntegerCodes &of, const IntegerRow *from, int64_t row,
                     int64_t n) {
    const int64_t size = of.layer.in_features, each = limbs_nbytes(of.layer), totals_apart = of.padded / 4,
                  units_apart = of.padded / SPAN;
    const char *limbs = args.limbs + row * each, *at[OUT];
    const int32_t *totals = args.totals + row * totals_apart;
    const float *units = args.units + row * units_apart;
    vf total[OUT][ROWS];
    for (int r = 0; r < OUT; r++) {
        at[r] = from[r].codes;
        for (int m = 0; m < ROWS; m++) total[r][m] = all(0.0f);
    }
    int64_t k = 0, group = 0;
    for (; k + 8 * W <= size;
         group = next_group(of, group, k), k += 8 * W, limbs += LIMBS * 8 * W, totals += 2 * W, units++) {
        HFQ_UNROLL
        for (int r = 0; r < OUT; r++) ask_for(at[r] + FAR);
        add_codes<ROWS, OUT, TABLE, SHIFTS>(of, from, at, group, limbs, each, totals, totals_apart, units,
                                            units_apart, total);
        HFQ_UNROLL
        for (int r = 0; r < OUT; r++) at[r] += 4 * W;
    }
    if (k < size) {
        char rest[OUT][4 * W];
        __builtin_memset(rest, 0, sizeof(rest));
        for (int r = 0; r < OUT; r++) __builtin_memcpy(rest[r], at[r], (size - k + 1) / 2), at[r] = rest[r];
        add_codes<ROWS, OUT, TABLE, SHIFTS>(of, from, at, group, limbs, each, totals, totals_apart, units,
                                            units_apart, total);
    }
    for (int r = 0; r < OUT; r++)
        for (int m = 0; m < ROWS; m++) put(args, row + m, n + r, sum_of(total[r][m]));
}

// Multiplies output rows [n, stop). The scales of the next rows are stored before the current rows are
// multiplied. By the time they are loaded, they have left the processor's store queue, which would otherwise
// delay the loads.
template <int OUT, bool TABLE, bool SHIFTS>
static void rows_of(const MatmulArgs &args, const IntegerCodes &of, int64_t n, int64_t stop, float *scratch) {
    IntegerRow rows[2][OUT];
    const auto open = [&](int64_t first) {
        const int64_t turn = first / OUT % 2;
        for (int r = 0; r < OUT; r++)
            rows[turn][r].open(of, first + r, scratch + (turn * OUT + r) * of.floats());
    };
    open(n);
    for (; n < stop; n += OUT) {
        const IntegerRow *from = rows[n / OUT % 2];
        if (n + OUT < stop) open(n + OUT);
        for (int64_t row = 0, taken; row < args.rows; row += taken) {
            taken = at_once(args.rows - row);
            (taken == 4   ? dot_rows<4, OUT, TABLE, SHIFTS>
             : taken == 2 ? dot_rows<2, OUT, TABLE, SHIFTS>
                          : dot_rows<1, OUT, TABLE, SHIFTS>)(args, of, from, row, n);
        }
    }
}

template <bool TABLE, bool SHIFTS>
static void rows_of(const MatmulArgs &args, const IntegerCodes &of, int64_t n, int64_t stop, float *scratch) {
    const int64_t pairs = 2 * TOGETHER * of.floats() <= SCRATCH ? n + (stop - n) / TOGETHER * TOGETHER : n;
    if (pairs > n) rows_of<TOGETHER, TABLE, SHIFTS>(args, of, n, pairs, scratch);
    if (pairs < stop) rows_of<1, TABLE, SHIFTS>(args, of, pairs, stop, scratch);
}

static void rows_part(const void *context, int64_t part, float *scratch) {
    const MatmulArgs &args = *(const MatmulArgs *)context;
    if (!args.limbs) return avx512::rows_part(context, part, scratch);
    const IntegerCodes of(*args.layer);
    if (2 * of.floats() > SCRATCH) return avx512::rows_part(context, part, scratch);
    const int64_t n = args.outputs.first(part), stop = n + args.outputs.count(part);
    (of.has_table    ? rows_of<true, false>
     : of.has_shifts ? rows_of<false, true>
                     : rows_of<false, false>)(args, of, n, stop, scratch);
}
