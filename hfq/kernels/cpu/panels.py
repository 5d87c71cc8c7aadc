"""The torch kernel: large panels in reused buffers, for every format on a CPU.

Panels are bit-identical to those of the reference kernel. They are multiplied in a dtype that the processor
multiplies fast. On processors without bfloat16 instructions, torch multiplies bfloat16 far slower than
float32. There, and for float16 everywhere, panels stay in float32, and only the result is rounded to the
activations' dtype. Results then differ from the reference kernel's in their last bits, at no loss of
accuracy.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import torch

from hfq.formats import Format
from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.formats.fp8 import Fp8
from hfq.formats.qmoe import Qmoe
from hfq.kernels import reference
from hfq.kernels.cpp import ternary
from hfq.kernels.cpu import fp8_bfloat16
from hfq.kernels.layer_tensors import check_on_cpu

__all__ = [
    "BATCH_NBYTES",
    "PANEL_NBYTES",
    "Fill",
    "linear",
    "linear_grad",
    "multiply",
    "multiply_grad",
    "product_dtype",
    "scales_sums",
]

PANEL_NBYTES = 11 << 19
"""The most bytes of a panel, unless `row_multiple` rows need more.

The size fits 256 rows of a 7B model in bfloat16. Rows of a panel share the reading of the activations.
"""

_ALIGNED_ROWS = (128, 32)
"""Preferred multiples of a panel's rows: rows of a block, and of a library's inner loop."""

BATCH_NBYTES = 16 << 20
"""The most bytes of activations that are converted together."""

Fill = Callable[[int, int, torch.dtype], torch.Tensor]
"""(first output row, rows, dtype) → a part of the weight, [rows, in_features].

The part is valid until the next call.
"""


def linear(
    activations: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    weight_format: Format,
    panel_nbytes: int | None = None,
) -> torch.Tensor:
    """Computes `reference.linear` with large panels.

    Args:
        activations: [..., in_features], float32, bfloat16, or float16.
        tensors: The module's tensors by local name.
        weight_format: The format of the tensors.
        panel_nbytes: The most bytes of a panel; None for `PANEL_NBYTES`.

    Returns:
        [..., out_features] in the activations' dtype.

    Raises:
        SetupError: A tensor is not in CPU memory.
    """
    check_on_cpu(tensors, activations)
    if scales_sums(weight_format, activations.dtype):
        return _multiply_codes(activations, tensors, weight_format, panel_nbytes)
    fill = _filler(tensors, weight_format, product_dtype(activations.dtype))
    return multiply(activations, tensors, weight_format, fill, panel_nbytes)


def linear_grad(
    grad: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format
) -> torch.Tensor:
    """Computes `reference.linear_grad` with large panels, on a CPU."""
    check_on_cpu(tensors, grad)
    return multiply_grad(
        grad, tensors, weight_format, _filler(tensors, weight_format, product_dtype(grad.dtype))
    )


def multiply(
    activations: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    weight_format: Format,
    fill: Fill,
    panel_nbytes: int | None = None,
) -> torch.Tensor:
    """Computes `activations @ W.T (+ bias)` by panels.

    Args:
        activations: [..., in_features], float32, bfloat16 or float16, on a CPU.
        tensors: The module's tensors by local name.
        weight_format: The format of the tensors.
        fill: Dequantizes a panel.
        panel_nbytes: The most bytes of a panel; None for `PANEL_NBYTES`.

    Returns:
        [..., out_features] in the activations' dtype.
    """
    rows = activations.reshape(-1, activations.shape[-1])
    out_features, in_features = weight_format.shape(tensors)
    result = rows.new_empty(
        *activations.shape[:-1], out_features
    )  # no view: code after a layer may write into its output
    flat, dtype = result.view(rows.shape[0], out_features), product_dtype(activations.dtype)
    batch = max(rows.shape[0] if dtype == result.dtype else BATCH_NBYTES // (4 * max(in_features, 1)), 1)
    spans = _spans(weight_format, out_features, in_features, dtype, panel_nbytes)
    for first in range(0, rows.shape[0], batch):
        part, target = rows[first : first + batch].to(dtype), flat[first : first + batch]
        for span in spans:
            _multiply_panel(part, fill, target, span)
    return _add_bias(result, tensors)


def _multiply_panel(rows: torch.Tensor, fill: Fill, result: torch.Tensor, span: range) -> None:
    """Multiplies by output rows `span` of the weight, and writes columns of the result."""
    panel, target = fill(span.start, len(span), rows.dtype), result[:, span.start : span.stop]
    if target.dtype == rows.dtype:
        torch.mm(rows, panel.t(), out=target)
    else:
        product = thread_buffer("product", rows.dtype, rows.device, target.numel()).view(target.shape)
        target.copy_(torch.mm(rows, panel.t(), out=product))


def _multiply_codes(
    activations: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    weight_format: Fp8,
    panel_nbytes: int | None,
) -> torch.Tensor:
    """Multiplies bfloat16 by unscaled e4m3 codes, then scales the sums."""
    codes = tensors["weight"]
    shifts = fp8_bfloat16.is_shifted(codes)

    def fill(start: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
        return fp8_bfloat16.fill_codes(codes[start : start + rows], shifts)

    unbiased = {name: tensor for name, tensor in tensors.items() if name != "bias"}
    result = multiply(activations, unbiased, weight_format, fill, panel_nbytes)
    fp8_bfloat16.scale_sums(result.view(-1, result.shape[-1]), tensors, weight_format)
    return _add_bias(result, tensors)


def _add_bias(result: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    bias = tensors.get("bias")
    if bias is not None:
        result += bias.to(result.dtype)
    return result


def multiply_grad(
    grad: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format, fill: Fill
) -> torch.Tensor:
    """Computes `grad @ W` by panels, summed in float32.

    Args:
        grad: [..., out_features].
        tensors: The module's tensors by local name.
        weight_format: The format of the tensors.
        fill: Dequantizes a panel.

    Returns:
        [..., in_features] in the gradient's dtype.
    """
    rows = grad.reshape(-1, grad.shape[-1])
    out_features, in_features = weight_format.shape(tensors)
    dtype = product_dtype(grad.dtype)
    result = torch.zeros(rows.shape[0], in_features, dtype=torch.float32)
    for span in _spans(weight_format, out_features, in_features, dtype):
        part, panel = rows[:, span.start : span.stop].to(dtype), fill(span.start, len(span), dtype)
        if dtype == torch.float32:
            result.addmm_(part, panel)
        else:
            result += part @ panel
    return result.to(grad.dtype).view(*grad.shape[:-1], in_features)


def scales_sums(weight_format: Format, dtype: torch.dtype) -> TypeGuard[Fp8]:
    """Returns True if activations are multiplied by unscaled codes, and the sums are scaled."""
    return fp8_bfloat16.is_summed(weight_format) and product_dtype(dtype) == torch.bfloat16


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which this processor multiplies activations of a dtype.

    The result is float32 for dtypes that the processor has no instructions for.
    """
    if dtype == torch.float16 or (dtype == torch.bfloat16 and not _has_bfloat16()):
        return torch.float32
    return dtype


@functools.cache
def _has_bfloat16() -> bool:
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)


def _spans(
    weight_format: Format, out_features: int, in_features: int, dtype: torch.dtype, nbytes: int | None = None
) -> list[range]:
    """Returns the output rows of each panel of at most `nbytes`, or `PANEL_NBYTES`."""
    most = (nbytes or PANEL_NBYTES) // (dtype.itemsize * max(in_features, 1))
    multiple = weight_format.row_multiple
    return _divide(out_features, most, [*(math.lcm(multiple, rows) for rows in _ALIGNED_ROWS), multiple])


def _divide(count: int, most: int, multiples: Sequence[int]) -> list[range]:
    """Divides `count` rows into parts of nearly equal length.

    Args:
        count: The number of rows.
        most: The most rows of a part, unless the last of the multiples is more.
        multiples: Candidates, coarsest first. The length of each part except the last is a multiple of the
            first candidate that is not too coarse for `count` and `most`.
    """
    fine = [
        multiple
        for multiple in multiples
        if multiple <= most and (count % multiple == 0 or count >= 4 * multiple)
    ]
    multiple = (fine or multiples[-1:])[0]
    blocks = -(-count // multiple)
    parts = -(-blocks // max(most // multiple, 1))
    edges = [min(blocks * part // parts * multiple, count) for part in range(parts + 1)] if parts else []
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def _filler(tensors: Mapping[str, torch.Tensor], weight_format: Format, dtype: torch.dtype) -> Fill:
    """Returns a function that fills panels of one dtype."""
    _, in_features = weight_format.shape(tensors)
    device, multiple = torch.device("cpu"), weight_format.row_multiple
    step = max(reference.PANEL_NBYTES // (4 * max(in_features, 1)) // multiple, 1) * multiple
    whole = _whole_filler(tensors, weight_format, dtype)

    def fill(start: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
        filled = whole(start, rows) if whole is not None else None
        if filled is not None:
            return filled
        panel = thread_buffer("panel", dtype, device, rows * in_features).view(rows, in_features)
        for first in range(0, rows, step):  # in steps, so that temporary tensors stay small
            part = panel[first : first + step]
            if dtype == torch.float32:
                weight_format.dequantize_into(part, tensors, start + first)
            else:
                wide = thread_buffer("wide", torch.float32, device, part.numel()).view(part.shape)
                weight_format.dequantize_into(wide, tensors, start + first)
                part.copy_(wide)
        return panel

    return fill


def _whole_filler(
    tensors: Mapping[str, torch.Tensor], weight_format: Format, dtype: torch.dtype
) -> Callable[[int, int], torch.Tensor | None] | None:
    """Returns a function that fills whole panels without temporary tensors, or None."""
    if isinstance(weight_format, Qmoe):
        return functools.partial(ternary.fill_rows, tensors, weight_format, dtype)
    if dtype != torch.bfloat16:
        return None
    if not fp8_bfloat16.is_in_blocks(weight_format) or not fp8_bfloat16.is_shifted(tensors["weight"]):
        return None
    factors = fp8_bfloat16.block_factors(tensors, weight_format)
    if factors is None:
        return None
    return functools.partial(fp8_bfloat16.fill_blocks, tensors["weight"], factors, weight_format)
