"""The library of int8.cpp, built on first use and loaded once per process."""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
import struct
from pathlib import Path

import torch

from hfq.kernels.cpp.build import BuildError, load_built
from hfq.kernels.cpp.layer_struct import DTYPES
from hfq.kernels.cpp.library import is_wanted
from hfq.kernels.cpp.openmp_team import team

__all__ = [
    "SOURCE",
    "Engine",
    "RoundedWeight",
    "best_engine",
    "integer_product",
    "is_built",
    "rounded_linear",
    "takes_any_rows",
]

SOURCE = Path(__file__).parent / "src" / "int8.cpp"

_WEIGHT, _PRODUCT = struct.Struct("=6q3f"), struct.Struct("=7q")
"""The structs `Weight` and `Product` of src/int8.cpp."""

logger = logging.getLogger(__name__)


class Engine(enum.IntEnum):
    """Instructions that the C++ library multiplies with, slowest first."""

    PLAIN = 0
    AVX2 = 1
    DOTS = 2
    """Dot products of bytes (AVX-512 VNNI)."""
    TILES = 3
    """Intel's AMX."""


@functools.cache
def is_built() -> bool:
    """Returns True if the C++ library is available; waits for the build, once."""
    return is_wanted() and _library() is not None


@functools.cache
def best_engine() -> Engine:
    """Returns the best engine of the processor; requires `is_built`."""
    return Engine(_library().hfq_int8_engine())  # type: ignore[union-attr]


@functools.cache
def takes_any_rows() -> bool:
    """Returns True if `rounded_linear` supports any number of rows; requires `is_built`."""
    return best_engine() >= Engine.DOTS


def integer_product(codes: torch.Tensor, weight: torch.Tensor, most: Engine = Engine.TILES) -> torch.Tensor:
    """Computes `codes @ weight.T` exactly; requires `is_built`.

    Args:
        codes: int16 [rows, in_features], contiguous, within the range of int8; fewer than 2**17 inputs.
        weight: int8 [out_features, in_features], contiguous, at any address.
        most: The best engine to use, if the processor has it.

    Returns:
        int32 [rows, out_features].

    Raises:
        MemoryError: The codes of the activations do not fit in memory.
    """
    (rows, in_features), out_features = codes.shape, weight.shape[0]
    result = torch.empty(rows, out_features, dtype=torch.int32)
    status = _library().hfq_int8_product(  # type: ignore[union-attr]
        weight.data_ptr(),
        codes.data_ptr(),
        result.data_ptr(),
        rows,
        in_features,
        out_features,
        torch.get_num_threads(),
        most,
    )
    _check(status)
    return result


class RoundedWeight:
    """A weight for `rounded_linear`, and the rounding of its activations.

    Args:
        weight: int8 [out_features, in_features], contiguous, at any address; fewer than 2**17 inputs.
        steps: The scales of the weight, without `multiplier`: float32, bfloat16, or float16 [out_features] or
            [1], contiguous.
        multiplier: A factor of all scales.
        top: The scale of a row of activations is its amplitude divided by this.
        bound: Upper bound of amplitudes.
    """

    __slots__ = ("_tensors", "in_features", "out_features", "packed")

    def __init__(
        self, weight: torch.Tensor, steps: torch.Tensor, multiplier: float, top: float, bound: float
    ) -> None:
        self._tensors = weight, steps
        self.out_features, self.in_features = weight.shape
        self.packed = _WEIGHT.pack(
            weight.data_ptr(),
            steps.data_ptr(),
            steps.numel(),
            DTYPES[steps.dtype],
            *reversed(weight.shape),
            multiplier,
            top,
            bound,
        )


def rounded_linear(
    rows: torch.Tensor, weight: RoundedWeight, result: torch.Tensor, most: Engine = Engine.TILES
) -> None:
    """Rounds rows to int8 and multiplies by a weight; requires `is_built`.

    Each row has its own scale. The result is bit-identical to torch's.

    Args:
        rows: float32 or bfloat16 [rows, in_features], each row contiguous.
        weight: The weight.
        result: The output, [..., out_features], contiguous, in the dtype of `rows`.
        most: The best engine to use, if the processor has it.

    Raises:
        MemoryError: The codes of the activations do not fit in memory. Nothing was written.
    """
    status = _library().hfq_int8_linear(  # type: ignore[union-attr]
        weight.packed,
        _PRODUCT.pack(
            rows.data_ptr(),
            rows.stride(0),
            result.data_ptr(),
            rows.dtype == torch.bfloat16,
            rows.shape[0],
            torch.get_num_threads(),
            most,
        ),
    )
    _check(status)


def _check(status: int) -> None:
    if status != 0:
        raise MemoryError("The quantized activations of a matrix product do not fit in memory.")


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return _declared(load_built(SOURCE))
    except (BuildError, OSError) as error:
        logger.warning("hfq multiplies int8 activations with plain torch, which is slower: %s.", error)
        return None


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    loaded.hfq_int8_product.argtypes = [
        pointer,
        pointer,
        pointer,
        size,
        size,
        size,
        ctypes.c_int,
        ctypes.c_int,
    ]
    loaded.hfq_int8_linear.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    loaded.hfq_int8_use_team.argtypes = [pointer]
    loaded.hfq_int8_use_team(team())
    return loaded
