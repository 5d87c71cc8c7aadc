"""The cpp kernel, which reads the checkpoint's bytes in any CPU memory and at any alignment.

Few activation rows are multiplied while the codes are decoded, in float32 or as integers, so that no decoded
weight is written to memory. Processors that multiply bfloat16 multiply any number of bfloat16 rows by parts
of the weight that fit into the first-level cache. They also multiply more than 8 rows of float16, each as
the sum of two bfloat16 rows. In all other cases, torch multiplies many rows by panels that the C++ library
dequantizes, bit-identical to the reference kernel's.

Results depend on the values, the sizes, and the processor only. They do not depend on the memory that stores
the bytes, their alignment, or the number of threads. torch's own products of panels are as deterministic as
torch makes them.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from typing import NoReturn

import torch

from hfq.errors import CheckpointError
from hfq.formats import Format
from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.kernels.cpp.layer_struct import AWQ, GPTQ, PRODUCT
from hfq.kernels.cpp.layers import DTYPES, CppLayer, describe_layer
from hfq.kernels.cpp.library import library
from hfq.kernels.cpu import panels

__all__ = ["FUSED_ROWS", "linear", "linear_grad", "most_fused", "panel_linear"]

FUSED_ROWS = {torch.float32: 64, torch.bfloat16: 8}
"""The most activation rows multiplied while decoding, by the dtype of products of panels."""

_ALWAYS_FUSED = min(FUSED_ROWS.values())


def linear(
    activations: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format
) -> torch.Tensor:
    """Computes `reference.linear` with the weight in float32.

    Calls `panels.linear` for layers that the C++ library cannot read.
    """
    compiled, layer = library(), _layer(activations, tensors, weight_format)
    *leading, width = activations.shape
    if compiled is None or layer is None or width != layer.sizes[1]:
        return panels.linear(activations, tensors, weight_format)
    count = math.prod(leading)
    dtype = DTYPES[activations.dtype]
    out_features = layer.sizes[0]
    stride = width
    if (
        count > _ALWAYS_FUSED
        and count > most_fused(activations.dtype)
        and not compiled.hfq_is_tiled(layer.here, count, dtype)
    ):
        fill = _filler(compiled, layer, tensors, weight_format)
        return panels.multiply(activations, tensors, weight_format, fill)
    rows = activations
    if not rows.is_contiguous():
        rows = rows.reshape(-1, width)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        stride = rows.stride(0)
    result = activations.new_empty(*leading, out_features)  # no view, as in panels.multiply
    product = PRODUCT.pack(
        layer.here, rows.data_ptr(), dtype, count, stride, result.data_ptr(), torch.get_num_threads()
    )
    status = compiled.hfq_linear(product)
    if status != 0:
        _refuse(status, layer, tensors)
    bias = tensors.get("bias")
    if bias is not None:
        result += bias.to(result.dtype)
    return result


def linear_grad(
    grad: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format
) -> torch.Tensor:
    """Computes `reference.linear_grad` by panels that the C++ library dequantizes."""
    compiled, layer = library(), _layer(grad, tensors, weight_format)
    if compiled is None or layer is None:
        return panels.linear_grad(grad, tensors, weight_format)
    return panels.multiply_grad(
        grad, tensors, weight_format, _filler(compiled, layer, tensors, weight_format)
    )


def panel_linear(
    activations: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format, panel_nbytes: int
) -> torch.Tensor:
    """Computes `panels.linear`, and dequantizes in the C++ library if it reads the layer.

    Args:
        activations: [..., in_features].
        tensors: The module's tensors by local name.
        weight_format: The format of the tensors.
        panel_nbytes: The most bytes of a panel.

    Returns:
        [..., out_features] in the activations' dtype.
    """
    compiled, layer = library(), _layer(activations, tensors, weight_format)
    if compiled is None or layer is None or panels.scales_sums(weight_format, activations.dtype):
        return panels.linear(activations, tensors, weight_format, panel_nbytes)
    fill = _filler(compiled, layer, tensors, weight_format)
    return panels.multiply(activations, tensors, weight_format, fill, panel_nbytes)


@functools.cache
def most_fused(dtype: torch.dtype) -> int:
    """Returns the most rows that `linear` decodes for, except in products of bfloat16."""
    return FUSED_ROWS[panels.product_dtype(dtype)]


def _layer(
    values: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format
) -> CppLayer | None:
    """Returns the layer for the C++ library; None if it is unsupported or empty."""
    if not values.is_cpu or values.dtype not in DTYPES or not values.data_ptr():  # no values, or a FakeTensor
        return None
    return describe_layer(weight_format, tensors)


def _filler(
    compiled: ctypes.CDLL, layer: CppLayer, tensors: Mapping[str, torch.Tensor], weight_format: Format
) -> panels.Fill:
    """Returns a function that fills panels in the order of the codes.

    Rows of a panel are outputs, or, for GPTQ and AWQ, inputs.
    """
    is_transposed = layer.kind in (GPTQ, AWQ)

    def fill(start: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (layer.in_features, rows) if is_transposed else (rows, layer.in_features)
        panel = thread_buffer("panel", dtype, torch.device("cpu"), rows * layer.in_features).view(shape)
        threads = torch.get_num_threads()
        status = compiled.hfq_dequantize(layer.here, start, rows, panel.data_ptr(), DTYPES[dtype], threads)
        if status != 0:
            _refuse(status, layer, tensors)
        return panel.t() if is_transposed else panel

    return fill


def _refuse(status: int, layer: CppLayer, tensors: Mapping[str, torch.Tensor]) -> NoReturn:
    """Raises the error of a failed call.

    Either memory ran out, or an index points outside the layer's memory because its file changed.
    """
    if status == -3:
        raise MemoryError("The activations of a matrix product do not fit in memory.")
    name = "g_idx" if "g_idx" in tensors else "weight_g_idx"
    index = tensors[name]
    raise CheckpointError(
        "A checkpoint file changed while the model was using it.",
        tensor=name,
        expected=f"groups from 0 to {layer.groups - 1}",
        found=f"groups from {int(index.min())} to {int(index.max())}",
        fix="Restore the file and load the model again.",
    )
