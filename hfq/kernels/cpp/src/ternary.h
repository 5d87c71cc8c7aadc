// Rows of QMoE: codes of a dictionary of ternary sequences.

#pragma once

#include <cstdint>

namespace {

// Arguments of hfq_ternary.
struct TernaryRows {
    int64_t dictionary;  // address of the entries, two words of 32 bits each, see codecs/pair_dictionary.py
    int64_t codes;       // address of the codes of the layer, 16 bits each
    int64_t count;       // number of codes
    int64_t offsets;     // address of the first row's offset, int32 [rows + 1]
    int64_t bounds;      // address of the first row's minimum and maximum, bfloat16 [rows, 2]
    int64_t out;         // address of the result, float32 [rows, columns], contiguous
    int64_t rows;        // rows to decode
    int64_t columns;     // columns of a row
    int64_t threads;     // the most threads to use
};

const int64_t TERNARY_ROWS = 8;  // rows of a part
const int64_t TERNARY_MOST = 32; // floats that one entry may write, of which 28 count

const char *bytes_at(int64_t address) { return (const char *)(uintptr_t)address; }

struct TernaryWork {
    const TernaryRows *rows;
    int *is_wrong;  // becomes 1 if a row has other columns than `columns`
};

}  // namespace
