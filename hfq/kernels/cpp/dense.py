"""Products of few rows by unquantized weights of 16-bit floats, for output heads.

The library reads the weight once, at the speed of memory, and sums in float32. A row's result depends neither
on the other rows nor on the number of threads.
"""

from __future__ import annotations

import math
import struct

import torch

from hfq.kernels.cpp.layer_struct import DTYPES
from hfq.kernels.cpp.library import library

__all__ = ["MOST_ROWS", "linear"]

MOST_ROWS = 8
"""`DENSE_ROWS` of src/layer.h."""

_ARGUMENTS = struct.Struct("=8q")
"""The struct `DenseArguments` of src/dense.h."""


def linear(activations: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Computes `activations @ weight.T`.

    Args:
        activations: [..., in_features], bfloat16 or float16.
        weight: [out_features, in_features] of the same dtype.

    Returns:
        [..., out_features] in the same dtype. None if the library is unavailable, there are no or more than
        `MOST_ROWS` rows, or a tensor has another dtype or device.
    """
    *leading, channels = activations.shape
    rows = math.prod(leading)
    if not 1 <= rows <= MOST_ROWS or activations.dtype not in (torch.bfloat16, torch.float16):
        return None
    if weight.dtype != activations.dtype or weight.shape[1] != channels or not weight.is_contiguous():
        return None
    if not activations.is_cpu or not weight.is_cpu or not weight.numel() or not activations.data_ptr():
        return None
    compiled = library()
    if compiled is None or not weight.data_ptr():
        return None
    dense = activations.contiguous()
    result = dense.new_empty(*leading, weight.shape[0])
    addresses = weight.data_ptr(), dense.data_ptr(), result.data_ptr()
    sizes = rows, channels, weight.shape[0], DTYPES[dense.dtype], torch.get_num_threads()
    return None if compiled.hfq_dense(_ARGUMENTS.pack(*addresses, *sizes)) else result
