// Intel's AMX: eight tiles of 16 rows of 64 bytes, and their products. Included by the other sources in this
// folder.
//
// With -DHFQ_EMULATE, plain arrays replace the tiles, so that the code that uses them can be tested anywhere.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu_features.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__has_include) && !defined(HFQ_EMULATE)
#if __has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>)  // GCC 11, clang 11
#define HFQ_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace {

// Enables subnormal floats during its lifetime. The caller may treat them as zeros
// (torch.set_flush_denormal).
struct KeptSubnormals {
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();  // MXCSR of the caller
    KeptSubnormals() { _mm_setcsr(before & ~0x8040u); }
    ~KeptSubnormals() { _mm_setcsr(before); }
#endif
};

namespace amx {

const int64_t TILE = 1024;  // bytes per tile

#if defined(HFQ_AMX)

#ifdef __clang__
#define HFQ_AMX_TARGET __attribute__((target("amx-tile,amx-bf16,amx-int8")))
#else
#define HFQ_AMX_TARGET
#endif
#define HFQ_AMX_INLINE inline __attribute__((always_inline)) HFQ_AMX_TARGET

// Returns true if the processor has tiles of bfloat16 and int8, and the system grants them to this process.
// Called once, before the first use.
inline bool detect() {
    if (!cpu_features::found().tiles) return false;
    const long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// Configures eight full tiles for this thread during its lifetime.
struct Tiles {
    HFQ_AMX_TARGET Tiles() {
        struct __attribute__((packed)) {
            uint8_t palette;       // 1: eight tiles
            uint8_t start;         // row at which an interrupted instruction resumes
            uint8_t reserved[14];  // zeros
            uint16_t nbytes[16];   // bytes per row of each tile
            uint8_t rows[16];      // rows of each tile
        } shape;
        memset(&shape, 0, sizeof(shape));
        shape.palette = 1;
        for (int i = 0; i < 8; i++) shape.nbytes[i] = 64, shape.rows[i] = 16;
        __asm__ volatile("ldtilecfg %0" ::"m"(shape));
    }
    HFQ_AMX_TARGET ~Tiles() { __asm__ volatile("tilerelease" ::: "memory"); }
};

template <int T> HFQ_AMX_INLINE void zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> HFQ_AMX_INLINE void load(const void *p, int64_t pitch = 64) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(pitch) : "memory");
}
template <int T> HFQ_AMX_INLINE void store(void *p, int64_t pitch = 64) {
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(pitch) : "memory");
}
// C[i][j] += the sum over 16 pairs k of A[i][2k] B[k][2j] + A[i][2k + 1] B[k][2j + 1]. Factors are bfloat16,
// sums float32. Subnormal numbers count as zeros.
template <int C, int A, int B> HFQ_AMX_INLINE void dot_bfloats() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// The same for 16 fours of int8, summed in int32.
template <int C, int A, int B> HFQ_AMX_INLINE void dot_bytes() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// Transposes a matrix of 16 by 16 words.
inline __attribute__((always_inline, target("avx512f"))) void transpose(__m512i *r) {
    __m512i t[16];
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]),
              r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 4; i++) {  // r[4 * j + i] holds columns i, i + 4, i + 8 and
                                                            // i + 12 of rows 4 * j to 4 * j + 3
        const __m512i low = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x44),
                      high = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xEE);
        const __m512i below = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x44),
                      above = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xEE);
        t[i] = _mm512_shuffle_i32x4(low, below, 0x88), t[i + 4] = _mm512_shuffle_i32x4(low, below, 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(high, above, 0x88),
              t[i + 12] = _mm512_shuffle_i32x4(high, above, 0xDD);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) r[i] = t[i];
}

#else

#define HFQ_AMX_TARGET

#if defined(HFQ_EMULATE)
inline bool detect() { return true; }
#else
inline bool detect() { return false; }
#endif

inline thread_local char tiles[8][TILE];

struct Tiles {
    Tiles() {}
    ~Tiles() {}
};

template <int T> inline void zero() { memset(tiles[T], 0, TILE); }
template <int T> inline void load(const void *p, int64_t pitch = 64) {
    for (int i = 0; i < 16; i++) memcpy(tiles[T] + 64 * i, (const char *)p + pitch * i, 64);
}
template <int T> inline void store(void *p, int64_t pitch = 64) {
    for (int i = 0; i < 16; i++) memcpy((char *)p + pitch * i, tiles[T] + 64 * i, 64);
}
inline float bfloat_at(const char *tile, int place) {
    uint16_t half;
    memcpy(&half, tile + 2 * place, 2);
    uint32_t bits = half & 0x7F80 ? (uint32_t)half << 16 : 0;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
template <int C, int A, int B> inline void dot_bfloats() {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            float sum;
            memcpy(&sum, tiles[C] + 64 * i + 4 * j, 4);
            for (int k = 0; k < 32; k++)
                sum += bfloat_at(tiles[A], 32 * i + k) * bfloat_at(tiles[B], 32 * (k / 2) + 2 * j + k % 2);
            memcpy(tiles[C] + 64 * i + 4 * j, &sum, 4);
        }
}
template <int C, int A, int B> inline void dot_bytes() {
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            int32_t sum;
            memcpy(&sum, tiles[C] + 64 * i + 4 * j, 4);
            for (int k = 0; k < 64; k++)
                sum += (int8_t)tiles[A][64 * i + k] * (int8_t)tiles[B][64 * (k / 4) + 4 * j + k % 4];
            memcpy(tiles[C] + 64 * i + 4 * j, &sum, 4);
        }
}

#endif

}  // namespace amx
}  // namespace
