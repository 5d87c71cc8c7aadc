"""ggml's own reader of files, quantizers, and dequantizers, by the C interface of its base library."""

import ctypes
import functools
import importlib.util
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import numpy as np

from benchmarks.kernels.ggml import find_package
from hfq.checkpoint.gguf.block_types import block_type
from tests.support.gguf_files import IDS

__all__ = ["dequantize", "is_installed", "quantize", "read_tensors"]

_TO_FLOAT = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)
_LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_SILENT = _LOG(lambda level, text, data: None)


class _TypeTraits(ctypes.Structure):
    _fields_ = (
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", _TO_FLOAT),
        ("from_float_ref", c_void_p),
    )


class _InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", c_bool), ("ctx", c_void_p))


def is_installed():
    """Returns True if a package holds the library."""
    return importlib.util.find_spec(find_package()) is not None


@functools.cache
def library():
    root = Path(importlib.util.find_spec(find_package()).submodule_search_locations[0])
    path = next(path for folder in ("lib", "lib64") if (path := root / folder / "libggml-base.so").exists())
    found = ctypes.CDLL(str(path))
    found.ggml_get_type_traits.restype = POINTER(_TypeTraits)
    found.ggml_quantize_chunk.restype = c_size_t
    found.ggml_quantize_chunk.argtypes = [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]
    found.ggml_log_set.argtypes = [_LOG, c_void_p]
    found.gguf_init_from_file.restype = c_void_p
    found.gguf_init_from_file.argtypes = [c_char_p, _InitParams]
    found.gguf_free.argtypes = [c_void_p]
    found.gguf_get_n_tensors.restype = c_int64
    found.gguf_get_n_tensors.argtypes = [c_void_p]
    for name, result in (("name", c_char_p), ("offset", c_size_t), ("size", c_size_t), ("type", c_int)):
        function = getattr(found, f"gguf_get_tensor_{name}")
        function.restype, function.argtypes = result, [c_void_p, c_int64]
    found.ggml_log_set(_SILENT, None)
    return found


def dequantize(name, raw):
    """Returns the float32 values of blocks of a type."""
    kind, raw = block_type(name), np.ascontiguousarray(raw, np.uint8).reshape(-1)
    library().ggml_quantize_init(IDS[name])  # makes the grids of some types
    values = np.empty(raw.nbytes // kind.nbytes * kind.size, np.float32)
    traits = library().ggml_get_type_traits(IDS[name]).contents
    traits.to_float(raw.ctypes.data, values.ctypes.data, values.size)
    return values


def quantize(name, values):
    """Returns the blocks of float32 values [rows, columns], uint8 [rows, bytes of a row]."""
    kind, values = block_type(name), np.ascontiguousarray(values, np.float32)
    rows, columns = values.shape
    raw = np.empty((rows, columns // kind.size * kind.nbytes), np.uint8)
    weights = np.ones(columns, np.float32)
    library().ggml_quantize_init(IDS[name])
    library().ggml_quantize_chunk(
        IDS[name], values.ctypes.data, raw.ctypes.data, 0, rows, columns, weights.ctypes.data
    )
    return raw


def read_tensors(path):
    """Returns {name: (number of the type, offset in the data, bytes)} of a file, or None if it is refused."""
    found = library().gguf_init_from_file(str(path).encode(), _InitParams(True, None))
    if not found:
        return None
    get, count = library(), library().gguf_get_n_tensors(found)
    tensors = {
        get.gguf_get_tensor_name(found, index).decode(errors="replace"): (
            get.gguf_get_tensor_type(found, index),
            get.gguf_get_tensor_offset(found, index),
            get.gguf_get_tensor_size(found, index),
        )
        for index in range(count)
    }
    get.gguf_free(found)
    return tensors
