"""The struct `Layer` of src/layer.h and the values of its enums."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = [
    "ADDED",
    "AWQ",
    "BIASED",
    "BLOCKS",
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
    "OUTPUT_BYTES",
    "OUTPUT_WORDS",
    "PRODUCT",
    "QUADS",
    "SCALES",
    "UINT8",
    "ZERO_READINGS",
    "CppLayer",
    "LayerPattern",
]

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of activations that the C++ library reads: values of `Dtype` in src/layer.h."""

E4M3_SCALED, NESTED = 4, 5
SCALES = {**DTYPES, torch.float8_e8m0fnu: 3, torch.uint8: 3, torch.float8_e4m3fn: E4M3_SCALED}
"""Dtypes of scales that the C++ library reads: values of `Dtype` in src/layer.h."""

ZERO_READINGS = ("stored", "field_plus_one", "masked_plus_one", "word_plus_one")
E4M3, E5M2, NIBBLES, INT8, QUADS, BLOCKS, BIASED, UINT8, GPTQ, AWQ = range(10)
PRODUCT = struct.Struct("=7q")
"""The struct `Product` of src/kernels.cpp.

Fields: the addresses of the layer and of the activations, dtype, rows, stride, the address of the result, and
the number of threads.
"""

NONE, GROUP_WORDS, OUTPUT_WORDS, BYTES, ADDED, OUTPUT_BYTES = range(6)


class CppLayer(ctypes.Structure):
    """The struct `Layer` of src/layer.h, with the same fields in the same order."""

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
        *((name, ctypes.c_int64) for name in ("order_start", "order_first", "order_second", "order_inner")),
        *((name, ctypes.c_float) for name in ("shared", "unit")),
        *(
            (name, ctypes.c_int32)
            for name in ("kind", "bits", "scale_dtype", "divides", "zero_reading", "index_nbytes")
        ),
        *(
            (name, ctypes.c_int32)
            for name in ("row_zeros", "zero_dtype", "high_first", "offset", "block_type")
        ),
    )

    @functools.cached_property
    def sizes(self) -> tuple[int, int]:
        """The cached (out_features, in_features); reading the fields takes longer."""
        return self.out_features, self.in_features

    @functools.cached_property
    def here(self) -> int:
        """The address of the struct, as an argument of a call.

        A cached `ctypes.byref` would refer to the struct that holds it, so the struct would never be freed.
        """
        return ctypes.addressof(self)


_ADDRESS = struct.Struct("=Q")
_ADDRESSES = tuple(field[0] for field in CppLayer._fields_ if field[1] is ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """The struct of a layer without its addresses, which are put in for each layer of its kind.

    Attributes:
        image: The bytes of the struct.
        addresses: (offset in the struct, name of a tensor, bytes between its start and the address).
        sizes: `CppLayer.sizes`.
    """

    image: bytes
    addresses: tuple[tuple[int, str, int], ...]
    sizes: tuple[int, int]

    @classmethod
    def of(cls, layer: CppLayer, tensors: Mapping[str, torch.Tensor]) -> LayerPattern | None:
        """Returns the pattern of a layer; None if it has an address outside of its tensors."""
        found = []
        for field in _ADDRESSES:
            address = getattr(layer, field)
            for name, tensor in tensors.items() if address else ():
                if 0 <= address - tensor.data_ptr() < tensor.nbytes:
                    found.append((getattr(CppLayer, field).offset, name, address - tensor.data_ptr()))
                    break
            else:
                if address:
                    return None
        return cls(bytes(layer), tuple(found), layer.sizes)

    def layer_at(self, address: int, offsets: Mapping[str, int]) -> CppLayer:
        """Returns the struct of a layer.

        Args:
            address: The address of the buffer that holds its tensors.
            offsets: The offset of each tensor in the buffer, by name.
        """
        image = bytearray(self.image)
        for offset, name, first in self.addresses:
            _ADDRESS.pack_into(image, offset, address + offsets[name] + first)
        layer = CppLayer.from_buffer(image)
        vars(layer)["sizes"] = self.sizes
        return layer
