"""ggml's products on a CPU through its public C API (ggml.h, ggml-backend.h, ggml-cpu.h).

The libraries come from an installed Python package.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import weakref
from contextlib import ExitStack
from ctypes import POINTER, byref, c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import torch

__all__ = ["PACKAGES", "TYPES", "GgmlLinear", "compiled_for", "find_package", "quantized_rows"]

PACKAGES = ("libggml", "llama_cpp")
"""Packages with ggml's libraries in a folder lib or lib64.

The distributions libggml-python and llama-cpp-python install them.
"""

TYPES = {
    "Q4_0": 2,
    "Q8_0": 8,
    "MXFP4": 39,
    "IQ4_NL": 20,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_XS": 23,
}
"""`enum ggml_type`."""

_FLOAT32 = 0
_REPACK = b"CPU_REPACK"
_MAX_THREADS = 512


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _ThreadpoolParams(ctypes.Structure):
    _fields_ = (
        ("cpumask", c_bool * _MAX_THREADS),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, [c_void_p, c_void_p]),
    "ggml_backend_buffer_free": (None, [c_void_p]),
    "ggml_backend_buft_name": (c_char_p, [c_void_p]),
    "ggml_backend_cpu_buffer_type": (c_void_p, []),
    "ggml_backend_cpu_init": (c_void_p, []),
    "ggml_backend_cpu_reg": (c_void_p, []),
    "ggml_backend_cpu_set_n_threads": (None, [c_void_p, c_int]),
    "ggml_backend_cpu_set_threadpool": (None, [c_void_p, c_void_p]),
    "ggml_backend_free": (None, [c_void_p]),
    "ggml_backend_graph_compute": (c_int, [c_void_p, c_void_p]),
    "ggml_backend_reg_dev_get": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_supports_op": (c_bool, [c_void_p, c_void_p]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_blck_size": (c_int64, [c_int]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_cpu_has_avx2": (c_int, []),
    "ggml_cpu_has_avx512": (c_int, []),
    "ggml_free": (None, [c_void_p]),
    "ggml_get_data": (c_void_p, [c_void_p]),
    "ggml_graph_overhead": (c_size_t, []),
    "ggml_init": (c_void_p, [_InitParams]),
    "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_quantize_chunk": (c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "ggml_row_size": (c_size_t, [c_int, c_int64]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_threadpool_free": (None, [c_void_p]),
    "ggml_threadpool_new": (c_void_p, [POINTER(_ThreadpoolParams)]),
    "ggml_threadpool_params_init": (None, [POINTER(_ThreadpoolParams), c_int]),
    "ggml_threadpool_pause": (None, [c_void_p]),
}


class GgmlLinear:
    """A weight quantized by ggml to one of its types, and its products.

    ggml's memory is freed with the object.

    Args:
        dense: The weight, float [out_features, in_features].
        name: One of `TYPES`.
        repack: True to rearrange the weight for this processor ("CPU_REPACK"). False keeps the layout of
            files.

    Raises:
        RuntimeError: No package contains the library, the library does not support this layout of the weight,
            or it requires instructions that the processor lacks.
        AttributeError: The library lacks a function.
        OSError: The library cannot be loaded.
    """

    def __init__(self, dense: torch.Tensor, name: str, repack: bool) -> None:
        out_features, in_features = dense.shape
        kind, self._ggml, self._loaded = TYPES[name], _library(), ExitStack()
        weakref.finalize(self, self._loaded.close)
        self._backend = self._hold(self._ggml.ggml_backend_cpu_init(), self._ggml.ggml_backend_free)
        self._threads = 0
        self._pool: int | None = None
        self._graphs: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
        if in_features % self._ggml.ggml_blck_size(kind):
            raise RuntimeError(
                f"{name} divides rows into blocks of {self._ggml.ggml_blck_size(kind)}, found rows of "
                f"{in_features}"
            )
        packed = quantized_rows(dense, name)
        self.nbytes = packed.nbytes
        self.shape = out_features, in_features
        context = self._context()
        self._weight = self._ggml.ggml_new_tensor_2d(context, kind, in_features, out_features)
        self._allocate(
            context, _repack_buffers(self._ggml) if repack else self._ggml.ggml_backend_cpu_buffer_type()
        )
        self._require_support(name)
        self._ggml.ggml_backend_tensor_set(self._weight, packed.data_ptr(), 0, packed.nbytes)

    def __call__(self, activations: torch.Tensor) -> torch.Tensor:
        """Multiplies activations [rows, in_features] → [rows, out_features], in their dtype.

        Uses torch's number of threads. Inputs and outputs are converted from and to ggml's float32. ggml
        rounds activations to 8 bits itself.
        """
        rows = activations.shape[0]
        self._follow_torch()
        if rows not in self._graphs:
            self._graphs[rows] = self._build(rows)
        graph, inputs, outputs = self._graphs[rows]
        inputs.copy_(activations)
        status = self._ggml.ggml_backend_graph_compute(self._backend, graph)
        self._ggml.ggml_threadpool_pause(self._pool)  # waiting threads would spin during the next measurement
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
        return outputs.to(activations.dtype, copy=True)

    def _build(self, rows: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Returns the graph for this many rows, and torch's views of its float32 input and output."""
        out_features, in_features = self.shape
        context = self._context()
        inputs = self._ggml.ggml_new_tensor_2d(context, _FLOAT32, in_features, rows)
        outputs = self._ggml.ggml_mul_mat(context, self._weight, inputs)
        graph = self._ggml.ggml_new_graph(context)
        self._ggml.ggml_build_forward_expand(graph, outputs)
        self._allocate(context, self._ggml.ggml_backend_cpu_buffer_type())
        return graph, self._view(inputs, rows, in_features), self._view(outputs, rows, out_features)

    def _view(self, tensor: int, rows: int, columns: int) -> torch.Tensor:
        memory = (ctypes.c_float * (rows * columns)).from_address(self._ggml.ggml_get_data(tensor))
        return torch.frombuffer(memory, dtype=torch.float32).view(rows, columns)

    def _require_support(self, name: str) -> None:
        context = self._context()
        product = self._ggml.ggml_mul_mat(
            context, self._weight, self._ggml.ggml_new_tensor_2d(context, _FLOAT32, self.shape[1], 1)
        )
        if not self._ggml.ggml_backend_supports_op(self._backend, product):
            raise RuntimeError(
                f"ggml does not multiply {name} {self.shape} in this arrangement on this processor"
            )

    def _follow_torch(self) -> None:
        """Keeps a pool with torch's number of threads, as llama.cpp does.

        Without a pool, ggml starts threads for every graph.
        """
        count = torch.get_num_threads()
        if count == self._threads:
            return
        params = _ThreadpoolParams()
        self._ggml.ggml_threadpool_params_init(byref(params), count)
        self._pool = self._hold(
            self._ggml.ggml_threadpool_new(byref(params)), self._ggml.ggml_threadpool_free
        )
        self._threads = count
        self._ggml.ggml_backend_cpu_set_threadpool(self._backend, self._pool)
        self._ggml.ggml_backend_cpu_set_n_threads(self._backend, count)

    def _context(self) -> int:
        """Returns a context for the description of a graph of a few tensors, without their data."""
        size = 8 * self._ggml.ggml_tensor_overhead() + self._ggml.ggml_graph_overhead()
        return self._hold(self._ggml.ggml_init(_InitParams(size, None, True)), self._ggml.ggml_free)

    def _allocate(self, context: int, buffer_type: int) -> None:
        self._hold(
            self._ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type),
            self._ggml.ggml_backend_buffer_free,
        )

    def _hold(self, made: int | None, free: Any) -> int:
        if made is None:
            raise RuntimeError(f"ggml returned no object that {free.__name__} can free")
        self._loaded.callback(free, made)
        return made


def quantized_rows(dense: torch.Tensor, name: str) -> torch.Tensor:
    """Returns rows of ggml's blocks of a type, uint8 [out_features, bytes of a row].

    Args:
        dense: The weight, float [out_features, in_features].
        name: One of `TYPES`.
    """
    ggml, kind, (out_features, in_features) = _library(), TYPES[name], dense.shape
    packed = torch.empty(out_features, ggml.ggml_row_size(kind, in_features), dtype=torch.uint8)
    wide = dense.to(torch.float32).contiguous()
    ggml.ggml_quantize_chunk(kind, wide.data_ptr(), packed.data_ptr(), 0, out_features, in_features, None)
    return packed


def find_package() -> str:
    """Returns the first installed package of `PACKAGES`, or the first of all."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), PACKAGES[0])


def compiled_for() -> str:
    """Returns the widest instructions, of those in the report, that the library was compiled for."""
    library = _library()
    return (
        "AVX-512"
        if library.ggml_cpu_has_avx512()
        else "AVX2"
        if library.ggml_cpu_has_avx2()
        else "neither AVX2 nor AVX-512"
    )


def _repack_buffers(ggml: Any) -> int:
    """Returns the buffer type in which ggml rearranges weights for this processor."""
    registry = ggml.ggml_backend_cpu_reg()
    address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if address is None:
        raise RuntimeError("ggml has no buffer types other than the plain one")
    kinds = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(ggml.ggml_backend_reg_dev_get(registry, 0))
    for kind in iter(kinds):
        if kind is None:
            break
        if ggml.ggml_backend_buft_name(kind) == _REPACK:
            return kind
    raise RuntimeError("ggml was built without repacking")


@functools.cache
def _library() -> Any:
    """Returns libggml-cpu with typed functions. It also loads libggml-base."""
    library = ctypes.CDLL(str(_library_path(find_package())))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    for instructions in ("avx2", "avx512"):
        if (
            getattr(library, f"ggml_cpu_has_{instructions}")()
            and not getattr(torch.cpu, f"_is_{instructions}_supported")()
        ):
            raise RuntimeError(f"ggml was compiled for {instructions}, which this processor lacks")
    return library


def _library_path(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    paths = [path for folder in folders for path in sorted(Path(folder).glob("lib*/libggml-cpu.so"))]
    if not paths:
        raise RuntimeError(f"{package} holds no libggml-cpu.so")
    return paths[0]
