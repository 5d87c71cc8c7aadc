// Features of the processor, and registers that the system saves per thread, detected once. The compiler's
// __builtin_cpu_supports is not used, since some runtimes answer wrongly (zig's does not know AVX-512).
// Included by the other sources in this folder.
//
// Positions of the bits: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2A, CPUID.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>

namespace {
namespace cpu_features {

// Detected features; false if the system does not save their registers.
struct Found {
    bool avx2 = false;     // AVX2 with FMA and F16C
    bool avx512 = false;   // AVX-512's F, BW, DQ, and VL
    bool vnni = false;     // AVX-512's dot products of bytes
    bool bfloats = false;  // AVX-512's bfloat16, and byte permutations (VBMI)
    bool tiles = false;    // AMX-TILE, AMX-BF16, and AMX-INT8; Linux must still grant them (amx_tiles.h)
    bool is_amd = false;   // made by AMD
};

inline Found ask() {
    Found found;
    unsigned a, b, c, d;
    const auto has = [](unsigned word, int bit) { return (word >> bit & 1) != 0; };
    if (!__get_cpuid(0, &a, &b, &c, &d)) return found;
    found.is_amd = b == 0x68747541 && d == 0x69746E65 && c == 0x444D4163;  // AuthenticAMD
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27)) return found;  // OSXSAVE
    const bool halves_and_fma = has(c, 12) && has(c, 29);
    uint32_t kept, high;
    __asm__ volatile("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    const bool keeps_256 = (kept & 0x6) == 0x6, keeps_512 = (kept & 0xE6) == 0xE6,
               keeps_tiles = (kept & 0x600E6) == 0x600E6;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    found.avx2 = keeps_256 && halves_and_fma && has(b, 5);
    found.avx512 = found.avx2 && keeps_512 && has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);
    found.vnni = found.avx512 && has(c, 11);
    found.tiles = keeps_tiles && has(d, 22) && has(d, 24) && has(d, 25);
    const bool looks_up = has(c, 1);
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) found.bfloats = found.avx512 && looks_up && has(a, 5);
    return found;
}

inline const Found &found() {
    static const Found asked = ask();
    return asked;
}

}  // namespace cpu_features
}  // namespace
#endif
