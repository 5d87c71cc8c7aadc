"""The compiled kernel: multiplies on a CPU straight from the checkpoint's bytes, wherever and however they
lie.

Few activation rows are multiplied as the codes are decoded, in float32 or as integers: nothing of the weight
is written to memory. Where a processor multiplies bfloat16, any number of rows in it are, by parts of the
weight that the first cache keeps, and more than 8 rows of float16, each as the sum of two.
Other many rows are multiplied by torch with panels that the compiled part dequantizes, bit for bit as the
reference does. The result is a function of the values, the sizes and the processor alone: not of the memory
that the bytes rest in, their alignment, or the number of threads (torch's own product of panels is as
deterministic as torch makes it).
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from hfq.errors import CheckpointError
from hfq.formats import Format
from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.kernels.cpp.layer_struct import AWQ, GPTQ, PRODUCT
from hfq.kernels.cpp.layers import DTYPES, CppLayer, describe_layer
from hfq.kernels.cpp.library import library
from hfq.kernels.cpu import panels

__all__ = ["FUSED_ROWS", "grouped_linear", "linear", "linear_grad", "panel_linear"]

FUSED_ROWS = {torch.float32: 64, torch.bfloat16: 8}
"""The most activation rows that are multiplied while decoding, by the dtype that torch would multiply panels
in.
"""

_ALWAYS_FUSED = min(FUSED_ROWS.values())


def linear(
    activations: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format
) -> torch.Tensor:
    """As `reference.linear`, with the weight in float32; `panels.linear` takes over for what the compiled
    part cannot read.
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
        and count > _most_fused(activations.dtype)
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


def grouped_linear(
    activations: torch.Tensor,
    counts: Sequence[int],
    layers: Sequence[tuple[Mapping[str, torch.Tensor], Format]],
) -> torch.Tensor | None:
    """`linear` of one layer after the other, each for its own rows, in one call and bit for bit: the experts
    of a layer.

    Args:
        activations: [rows, in_features], sorted by layer.
        counts: The rows of each layer, all of them together; none is zero.
        layers: (tensors, format) of each, all of one size.

    Returns:
        [rows, out_features] in the activations' dtype; None where a layer, or so many rows, is not for this,
        or sizes do not match.
    """
    compiled = library()
    if compiled is None or not layers or max(counts) > _most_fused(activations.dtype):
        return None
    described = [_layer(activations, tensors, weight_format) for tensors, weight_format in layers]
    found = [layer for layer in described if layer is not None]
    if len(found) < len(layers) or {layer.sizes for layer in found} != {
        (found[0].sizes[0], activations.shape[1])
    }:
        return None
    if sum(counts) != activations.shape[0] or len(counts) != len(layers):
        return None
    rows = activations.contiguous()
    out_features = found[0].out_features
    number = len(found)
    result = rows.new_empty(rows.shape[0], out_features)
    here, sizes = (CppLayer * number)(*found), (ctypes.c_int64 * number)(*counts)
    status = compiled.hfq_grouped(
        here,
        sizes,
        number,
        rows.data_ptr(),
        DTYPES[rows.dtype],
        rows.stride(0),
        result.data_ptr(),
        DTYPES[result.dtype],
        out_features,
        torch.get_num_threads(),
    )
    if status != 0:
        return None  # `linear` of the layer that is at fault says what is wrong with it, or goes row by row
    for part, (tensors, _) in zip(result.split(list(counts)), layers, strict=True):
        if tensors.get("bias") is not None:
            part += tensors["bias"].to(part.dtype)
    return result


def linear_grad(
    grad: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format
) -> torch.Tensor:
    """As `reference.linear_grad`, by panels that the compiled part dequantizes."""
    compiled, layer = library(), _layer(grad, tensors, weight_format)
    if compiled is None or layer is None:
        return panels.linear_grad(grad, tensors, weight_format)
    return panels.multiply_grad(
        grad, tensors, weight_format, _filler(compiled, layer, tensors, weight_format)
    )


def panel_linear(
    activations: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format, panel_nbytes: int
) -> torch.Tensor:
    """Multiplies as `panels.linear`, with panels that the compiled part dequantizes where it reads the layer.

    Args:
        activations: [..., in_features].
        tensors: The module's tensors by local name.
        weight_format: Their format.
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
def _most_fused(dtype: torch.dtype) -> int:
    return FUSED_ROWS[panels.product_dtype(dtype)]


def _layer(
    values: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format
) -> CppLayer | None:
    """The layer as the compiled part reads it; None where it cannot, or where there is nothing to
    multiply.
    """
    if (
        not values.is_cpu or values.dtype not in DTYPES or not values.data_ptr()
    ):  # there are none, or stand-ins (FakeTensor)
        return None
    return describe_layer(weight_format, tensors)


def _filler(
    compiled: ctypes.CDLL, layer: CppLayer, tensors: Mapping[str, torch.Tensor], weight_format: Format
) -> panels.Fill:
    """Fills panels in the order that the codes lie in: rows of outputs, or, for GPTQ and AWQ, rows of
    inputs.
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
    """Raises for what was not computed: an index that would be followed out of the layer's memory since its
    file changed.
    """
    if status == -3:
        raise MemoryError("no memory for the activations of a product")
    name = "g_idx" if "g_idx" in tensors else "weight_g_idx"
    index = tensors[name]
    raise CheckpointError(
        "The groups of a layer changed after the model was loaded.",
        tensor=name,
        expected=f"0 to {layer.groups - 1}",
        found=f"{int(index.min())} to {int(index.max())}",
        fix="leave a checkpoint's files alone while a model uses them; restore the file and load again",
    )
