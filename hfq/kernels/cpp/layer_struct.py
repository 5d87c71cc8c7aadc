"""`Layer` of src/layer.h, and the numbers that stand for its kinds."""

from __future__ import annotations

import ctypes
import functools
import struct

import torch

__all__ = [
    "ADDED",
    "AWQ",
    "BYTES",
    "DTYPES",
    "E4M3",
    "E4M3_SCALED",
    "E5M2",
    "GPTQ",
    "GROUP_WORDS",
    "INT8",
    "NESTED",
    "NIBBLES",
    "NONE",
    "OUTPUT_WORDS",
    "PRODUCT",
    "QUADS",
    "SCALES",
    "ZERO_READINGS",
    "CppLayer",
]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Activations that the compiled part reads, by the numbers it knows them by."""

E4M3_SCALED, NESTED = 4, 5
SCALES = {**DTYPES, torch.float8_e8m0fnu: 3, torch.uint8: 3, torch.float8_e4m3fn: E4M3_SCALED}
"""Scales that it reads."""

ZERO_READINGS = ("stored", "field_plus_one", "masked_plus_one", "word_plus_one")
E4M3, E5M2, NIBBLES, INT8, QUADS, GPTQ, AWQ = range(7)
PRODUCT = struct.Struct("=7q")
"""`Product` of src/kernels.cpp: addresses of layer and activations, dtype, rows, stride, result's address,
threads.
"""

NONE, GROUP_WORDS, OUTPUT_WORDS, BYTES, ADDED = range(5)


class CppLayer(ctypes.Structure):
    """`Layer` of src/layer.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "zeros", "index", "values", "integers")),
        *((name, ctypes.c_void_p) for name in ("nested_scales", "nested_values")),
        *(
            (name, ctypes.c_int64)
            for name in ("in_features", "out_features", "block_out", "block_in", "scale_stride")
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("scale_step", "nested_size", "groups", "zero_words", "row_nbytes")
        ),
        *((name, ctypes.c_float) for name in ("shared", "unit")),
        *(
            (name, ctypes.c_int32)
            for name in ("kind", "bits", "scale_dtype", "divides", "zero_reading", "index_nbytes")
        ),
        *((name, ctypes.c_int32) for name in ("row_zeros", "zero_dtype", "high_first", "offset")),
    )

    @functools.cached_property
    def sizes(self) -> tuple[int, int]:
        """(out_features, in_features), which take longer to read where they are."""
        return self.out_features, self.in_features

    @functools.cached_property
    def here(self) -> int:
        """The address, as an argument of a call; a reference, `ctypes.byref`, kept in what it refers to would
        never be freed.
        """
        return ctypes.addressof(self)
