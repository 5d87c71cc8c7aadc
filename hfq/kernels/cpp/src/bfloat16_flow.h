// Sums of one product, by tiles or by vectors. Included by bfloat16.h, in its namespace.

// One multiplication of packed activations by a layer.
struct Job {
    const Layer *layer;    // right factor
    const char *x;         // address of the packed activations, bfloat16
    const float *factors;  // two per packed row, factors of its results
    const float *sums;     // of activations, for blocks with minima (block_dots.h); or null
    int64_t rows;          // packed rows: two per row of float16
    int64_t depth;         // channels that are unpacked together
    int64_t lead;          // bytes from the codes being read to those prefetched
    OutputParts outputs;   // parts that threads compute
    char *y;               // address of the results, of `dtype`
    int64_t y_stride;      // elements from one row of `y` to the next
    int32_t dtype;         // Dtype of the activations before they were packed, and of `y`
    bool divides;          // true: sums are divided by their scales; false: multiplied
    bool by_tiles;         // true: tiles multiply; false: vectors
    bool halved;           // true: few rows, whose sums use two lanes each
    bool apart;            // true: rows are multiplied one by one (bfloat16_dots.h)
};

inline int64_t blocks(int64_t rows) { return (rows + BLOCK - 1) / BLOCK; }

// Adds sums * scales of a tile to `total`; scales are per row (LEFT) or per column.
template <bool LEFT>
static HFQ_INLINE void add_up(const float *sums, const float *scales, bool divides, float *total) {
#if defined(HFQ_AMX)
    const __m512 columns = _mm512_loadu_ps(scales);
    if (LEFT && divides) {
        for (int i = 0; i < 16; i++) {
            const __m512 value = _mm512_div_ps(_mm512_load_ps(sums + 16 * i), _mm512_set1_ps(scales[i]));
            _mm512_store_ps(total + 16 * i, _mm512_add_ps(_mm512_load_ps(total + 16 * i), value));
        }
        return;
    }
    HFQ_UNROLL
    for (int i = 0; i < 16; i++) {
        const __m512 scale = LEFT ? _mm512_set1_ps(scales[i]) : columns;
        _mm512_store_ps(total + 16 * i, _mm512_fmadd_ps(_mm512_load_ps(sums + 16 * i), scale,
                                                        _mm512_load_ps(total + 16 * i)));
    }
#else
    for (int i = 0; i < 256; i++) {
        const float scale = scales[LEFT ? i / 16 : i % 16];
        total[i] += divides ? sums[i] / scale : sums[i] * scale;
    }
#endif
}

// A block of activations that multiplies a pair of tiles of weights: one tile per 32 channels, or null.
struct Factor {
    const char *at;  // address of the first tile, or null
    int64_t pitch;   // bytes from one row of a tile to the next
    int64_t step;    // bytes from one tile to the tile of the next channels
    int64_t rows;    // activation rows of the block
};

// Pipeline of sums in tiles. Sums are stored when the next ones start, and added to totals when the next ones
// are stored. Tiles therefore multiply while codes are unpacked and sums are added.
template <bool LEFT> struct TileFlow {
    static const bool IS_TILED = true;
    const bool divides;   // true: sums are divided by their scales
    float (*sums)[256];   // stored sums of up to four tiles, 256 float32 each
    amx::Tiles tiles;     // configures the tiles of this thread
    struct Sums {
        int count = 0;                  // number of tiles
        const float *scales = nullptr;  // scales of a pair's outputs
        float *totals = nullptr;        // destination of the sums, 256 float32 per tile
    };
    Sums inside;   // sums in the tiles
    Sums outside;  // sums stored in `sums`
    TileFlow(const Job &job, TileScratch &work) : divides(job.divides), sums(work.sums) {}

    HFQ_INLINE void move() {
        for (int i = 0; i < outside.count; i++)
            add_up<LEFT>(sums[i], outside.scales + i % 2 * BLOCK, divides, outside.totals + 256 * i);
        outside = inside, inside.count = 0;
        if (outside.count > 0) amx::store<0>(sums[0]), amx::store<1>(sums[1]);
        if (outside.count > 2) amx::store<2>(sums[2]), amx::store<3>(sums[3]);
    }

    // Adds the products of a pair of weights, `count` times [32 channels][two tiles], and one or two blocks
    // of activations to `totals`, [block][two tiles].
    HFQ_INLINE void multiply(const char *codes, Factor x, Factor other, int64_t count, const float *scales,
                             float *totals) {
        move();
        amx::zero<0>(), amx::zero<1>();
        if (other.at) amx::zero<2>(), amx::zero<3>();
        for (int64_t s = 0; s < count; s++, codes += 2 * amx::TILE) {
            amx::load<4>(codes), amx::load<6>(x.at + s * x.step, x.pitch);
            if (LEFT) amx::dot_bfloats<0, 4, 6>(); else amx::dot_bfloats<0, 6, 4>();
            amx::load<5>(codes + amx::TILE);
            if (LEFT) amx::dot_bfloats<1, 5, 6>(); else amx::dot_bfloats<1, 6, 5>();
            if (!other.at) continue;
            amx::load<7>(other.at + s * other.step, other.pitch);
            if (LEFT) amx::dot_bfloats<2, 4, 7>(), amx::dot_bfloats<3, 5, 7>();
            else amx::dot_bfloats<2, 7, 4>(), amx::dot_bfloats<3, 7, 5>();
        }
        inside.count = other.at ? 4 : 2, inside.scales = scales, inside.totals = totals;
    }

    void finish() { move(), move(); }
};

#if defined(HFQ_AMX)
// Adds the products of the columns' pairs and one pair, in one instruction; compilers would use two.
static HFQ_INLINE void dot_pairs(__m512 &sums, __m512bh columns, const char *pair) {
    struct __attribute__((packed, may_alias)) Pair { uint32_t bits; /* two bfloat16 */ };
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(columns), "m"(*(const Pair *)pair));
}
#endif

// The same without tiles. Each row of the left factor has a vector of sums. Its pairs of channels are
// multiplied by those of the 16 columns of the right factor. The order of a row's sum does not depend on the
// other rows.
template <bool LEFT> struct VectorFlow {
    static const bool IS_TILED = false;
    const bool divides;  // true: sums are divided by their scales
    const bool halved;   // true: a row's sums use two lanes
    VectorFlow(const Job &job, TileScratch &) : divides(job.divides), halved(job.halved) {}

    // The same as `dot` for one tile and up to HALF rows.
    static HFQ_INLINE void dot_halves(const char *left, const Factor &x, int64_t count, const float *scales,
                                      bool divides, float *totals) {
#if defined(HFQ_AMX)
        const char *right = x.at;
        __m512 sums[16][1] = {};
        for (int64_t s = 0; s < count; s++, left += 2 * amx::TILE, right += x.step) {
            HFQ_UNROLL
            for (int four = 0; four < 8; four++) {
                const __m512bh columns = (__m512bh)_mm512_loadu_si512(right + four * x.pitch);
                HFQ_UNROLL
                for (int i = 0; i < 16; i++) {
                    int64_t row;
                    memcpy(&row, left + 64 * i + 8 * four, 8);
                    sums[i][0] = _mm512_dpbf16_ps(sums[i][0], columns, (__m512bh)_mm512_set1_epi64(row));
                }
            }
        }
        add_up<16, 1>(sums, scales, divides, totals);
#else
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 16; j++) {
                float sum = 0;
                for (int64_t k = 0; k < 32 * count; k++) {
                    if (k / 2 % 2 != j % 2) continue;
                    const char *a = left + k / 32 * 2 * amx::TILE + 64 * i + 2 * (k % 32),
                               *b = x.at + k / 32 * x.step + k % 32 / 4 * x.pitch + 8 * (j / 2) + 2 * (k % 4);
                    sum += float_at(a, BF16, 0) * float_at(b, BF16, 0);
                }
                totals[16 * i + j] += divides ? sum / scales[i] : sum * scales[i];
            }
#endif
    }

#if defined(HFQ_AMX)
    template <int COUNT, int TILES> static
        HFQ_INLINE void add_up(const __m512 (*sums)[TILES], const float *scales, bool divides,
                               float *totals) {
        HFQ_UNROLL
        for (int t = 0; t < TILES; t++) {
            const __m512 all = LEFT ? _mm512_setzero_ps() : _mm512_loadu_ps(scales + BLOCK * t);
            HFQ_UNROLL
            for (int i = 0; i < COUNT; i++) {
                float *total = totals + 256 * t + 16 * i;
                const __m512 scale = LEFT ? _mm512_set1_ps(scales[i]) : all, before = _mm512_load_ps(total);
                const __m512 after = LEFT && divides ? _mm512_add_ps(before, _mm512_div_ps(sums[i][t], scale))
                                                     : _mm512_fmadd_ps(sums[i][t], scale, before);
                _mm512_store_ps(total, after);
            }
        }
    }
#endif

    // Adds the products of COUNT rows of the left factor and 16 columns of TILES right factors to `totals`.
    template <int COUNT, int TILES>
    static HFQ_INLINE void dot(const char *left, int64_t left_pitch, int64_t left_step, const char *right,
                               int64_t right_pitch, int64_t right_step, int64_t count, const float *scales,
                               bool divides, float *totals) {
#if defined(HFQ_AMX)
        __m512 sums[COUNT][TILES] = {};
        for (int64_t s = 0; s < count; s++, left += left_step, right += right_step) {
            HFQ_UNROLL
            for (int pair = 0; pair < 16; pair++) {
                __m512bh columns[TILES];
                HFQ_UNROLL
                for (int t = 0; t < TILES; t++)
                    columns[t] = (__m512bh)_mm512_loadu_si512(right + pair * right_pitch + t * amx::TILE);
                if (TILES == 1) {
                    HFQ_UNROLL
                    for (int i = 0; i < COUNT; i++)
                        dot_pairs(sums[i][0], columns[0], left + i * left_pitch + 4 * pair);
                    continue;
                }
                HFQ_UNROLL
                for (int i = 0; i < COUNT; i++) {
                    const __m512bh row =
                        (__m512bh)_mm512_set1_epi32((int)load32(left + i * left_pitch + 4 * pair));
                    HFQ_UNROLL
                    for (int t = 0; t < TILES; t++)
                        sums[i][t] = _mm512_dpbf16_ps(sums[i][t], columns[t], row);
                }
            }
        }
        add_up<COUNT, TILES>(sums, scales, divides, totals);
#else
        for (int t = 0; t < TILES; t++)
            for (int i = 0; i < COUNT; i++)
                for (int j = 0; j < 16; j++) {
                    float sum = 0, scale = scales[LEFT ? i : BLOCK * t + j],
                          &total = totals[256 * t + 16 * i + j];
                    for (int64_t k = 0; k < 32 * count; k++) {
                        const char *a = left + k / 32 * left_step + i * left_pitch + 2 * (k % 32);
                        const char *b = right + k / 32 * right_step + k % 32 / 2 * right_pitch +
                                        t * amx::TILE + 4 * j + 2 * (k % 2);
                        sum += float_at(a, BF16, 0) * float_at(b, BF16, 0);
                    }
                    total += divides ? sum / scale : sum * scale;
                }
#endif
    }

    void multiply(const char *codes, Factor x, int64_t count, const float *scales, float *totals) {
        if (LEFT) {
            for (int64_t t = 0; t < 2; t++)
                if (halved)
                    dot_halves(codes + t * amx::TILE, x, count, scales + BLOCK * t, divides,
                               totals + 256 * t);
                else
                    dot<16, 1>(codes + t * amx::TILE, 64, 2 * amx::TILE, x.at, x.pitch, x.step, count,
                               scales + BLOCK * t, divides, totals + 256 * t);
        } else if (x.rows <= 4) {
            dot<4, 2>(x.at, x.pitch, x.step, codes, 64, 2 * amx::TILE, count, scales, divides, totals);
        } else if (x.rows <= 8) {
            dot<8, 2>(x.at, x.pitch, x.step, codes, 64, 2 * amx::TILE, count, scales, divides, totals);
        } else if (x.rows <= 12) {
            dot<12, 2>(x.at, x.pitch, x.step, codes, 64, 2 * amx::TILE, count, scales, divides, totals);
        } else {
            for (int64_t t = 0; t < 2; t++)
                dot<16, 1>(x.at, x.pitch, x.step, codes + t * amx::TILE, 64, 2 * amx::TILE, count,
                           scales + BLOCK * t, divides, totals + 256 * t);
        }
    }

    HFQ_INLINE void multiply(const char *codes, Factor x, Factor other, int64_t count, const float *scales,
                             float *totals) {
        multiply(codes, x, count, scales, totals);
        if (other.at) multiply(codes, other, count, scales, totals + 2 * 256);
    }

    // Adds the products of a part of ggml's blocks of 16 outputs, of `pairs` pairs of channels, to `totals`,
    // and those of their minima and the sums of the activations.
    static HFQ_INLINE void dot_part(const char *left, const Factor &x, int64_t pairs, const float *scales,
                                    const float *least, const float *sums_of_rows, float *totals) {
#if defined(HFQ_AMX)
        __m512 sums[16] = {};
        const char *right = x.at;
        for (int64_t pair = 0; pair < pairs; pair += 8, left += 32, right += 8 * x.pitch) {
            HFQ_UNROLL
            for (int j = 0; j < 8; j++) {
                const __m512bh columns = (__m512bh)_mm512_loadu_si512(right + j * x.pitch);
                HFQ_UNROLL
                for (int i = 0; i < 16; i++) dot_pairs(sums[i], columns, left + 64 * i + 4 * j);
            }
        }
        HFQ_UNROLL
        for (int i = 0; i < 16; i++) {
            const __m512 before = _mm512_load_ps(totals + 16 * i);
            __m512 total = _mm512_fmadd_ps(sums[i], _mm512_set1_ps(scales[i]), before);
            if (least)
                total = _mm512_fmadd_ps(_mm512_set1_ps(least[i]), _mm512_loadu_ps(sums_of_rows), total);
            _mm512_store_ps(totals + 16 * i, total);
        }
#else
        for (int i = 0; i < 16; i++)
            for (int64_t j = 0; j < x.rows; j++) {
                float sum = 0;
                for (int64_t k = 0; k < 2 * pairs; k++)
                    sum += float_at(left + 64 * i, BF16, k) *
                           float_at(x.at + k / 2 * x.pitch + 4 * j, BF16, k % 2);
                totals[16 * i + j] += sum * scales[i] + (least ? least[i] * sums_of_rows[j] : 0);
            }
#endif
    }

    // The same for a pair of outputs and one or two blocks of activations, whose sums are `apart` floats
    // apart.
    HFQ_INLINE void multiply_part(const char *codes, Factor x, Factor other, int64_t pairs,
                                  const float *scales, const float *least, const float *sums, int64_t apart,
                                  float *totals) {
        for (int64_t t = 0; t < 2; t++) {
            const float *own = least ? least + BLOCK * t : nullptr;
            dot_part(codes + t * amx::TILE, x, pairs, scales + BLOCK * t, own, sums, totals + 256 * t);
            if (other.at)
                dot_part(codes + t * amx::TILE, other, pairs, scales + BLOCK * t, own, sums + apart,
                         totals + 256 * (2 + t));
        }
    }

    void finish() {}
};
