"""Triton kernels for CUDA devices, for every format.

The kernels read the checkpoint's bytes. At most `FEW_ROWS` activation rows are multiplied in float32, at most
`SOME_ROWS` by tensor cores, while the codes are decoded. For more rows, panels of the weight are dequantized
for the device's own product. Results are the same in every call.

Tested in Triton's interpreter on a CPU (`TRITON_INTERPRET=1`); never run on a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping

import torch

from hfq.formats import ActivationScheme, Format
from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.formats.fp8 import Fp8
from hfq.kernels import reference
from hfq.kernels.activations import quantize_activations
from hfq.kernels.cuda import launch
from hfq.kernels.cuda.launch import EXPANDED_NBYTES, FEW_ROWS, SOME_ROWS, Product
from hfq.kernels.cuda.layers import Layer, describe
from hfq.kernels.cuda.layers import reason_against as reason_against_format
from hfq.kernels.layer_tensors import LayerTensors

__all__ = [
    "linear",
    "quantize_rows",
    "quantized_linear",
    "reason_against",
    "reason_against_scheme",
    "reason_missing",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROUNDED_AT_ONCE = 1024


def reason_missing() -> str | None:
    """Returns why this machine cannot run the kernels, or None.

    The first call compiles and launches a small kernel, since Triton needs a C compiler and Python's headers.
    """
    if not torch.cuda.is_available():
        return "this machine has no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return _reason_not_launched()


@functools.cache
def _reason_not_launched() -> str | None:
    try:
        rows = torch.ones(1, 16, device="cuda")
        quantize_rows(rows, ActivationScheme("token"))
        torch.cuda.synchronize()
    except Exception as error:  # Triton, its compilers, and the driver raise many kinds
        lines = str(error).strip().splitlines()
        return f"Triton cannot compile: {type(error).__name__}: {lines[-1] if lines else 'no reason given'}"
    return None


def reason_against(weight_format: Format, in_features: int, out_features: int) -> str | None:
    """Returns why the kernels cannot multiply by a layer, or None."""
    return reason_against_format(weight_format)


def reason_against_scheme(
    weight_format: Format, scheme: ActivationScheme, in_features: int, out_features: int
) -> str | None:
    """Returns why `quantized_linear` cannot multiply by a layer under a scheme, or None."""
    if type(weight_format) is not Fp8:
        return f"it does not read {weight_format.name}"
    if scheme.dtype != "e4m3":
        return f"it does not round to {scheme.dtype}"
    return reason_against(weight_format, in_features, out_features)


def linear(
    activations: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format
) -> torch.Tensor:
    """Computes `activations @ W.T (+ bias)`.

    Args:
        activations: [..., in_features], float32, bfloat16 or float16.
        tensors: The module's tensors by local name, on the activations' device.
        weight_format: The format of the tensors.

    Returns:
        [..., out_features] in the activations' dtype. Few rows are multiplied by the exact weight, others by
        the weight rounded once to that dtype.
    """
    rows = activations.reshape(-1, activations.shape[-1])
    count, in_features = rows.shape
    if not count or not in_features or rows.dtype not in _DTYPES:
        return reference.linear(activations, tensors, weight_format)
    layer = describe(weight_format, tensors)
    out = rows.new_empty(*activations.shape[:-1], layer.out_features)
    flat = out.view(count, layer.out_features)
    if count <= FEW_ROWS or (count <= SOME_ROWS and _uses_dot(rows.dtype)):
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        with torch.cuda.device_of(rows):
            _product_of(layer, tensors, rows)(rows, flat)
    else:
        _multiply_panels(rows, layer, flat)
        bias = tensors.get("bias")
        if bias is not None:
            out += bias.to(out.dtype)
    return out


def quantized_linear(
    activations: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    weight_format: Format,
    scheme: ActivationScheme,
) -> torch.Tensor:
    """Computes `linear` of activations rounded as by `quantize_activations`.

    One kernel rounds the activations if each token or group has a scale.
    """
    rows = activations.reshape(-1, activations.shape[-1])
    if scheme.scale_name is not None or scheme.strategy == "tensor" or not rows.numel():
        return linear(quantize_activations(activations, scheme, tensors), tensors, weight_format)
    rounded = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _round(rows, scheme, rounded)
    return linear(rounded.view(activations.shape), tensors, weight_format)


def quantize_rows(rows: torch.Tensor, scheme: ActivationScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds activations to e4m3 under a scale for each token or group, in one kernel.

    Args:
        rows: [tokens, in_features], float32, bfloat16 or float16.
        scheme: A dynamic scheme of strategy token or group.

    Returns:
        Codes, float8_e4m3fn [tokens, in_features], and scales, float32 [tokens, groups]. The products of both
        equal the result of `quantize_activations`.
    """
    groups = -(-rows.shape[1] // _group_size(rows, scheme))
    codes = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    scales = torch.empty(rows.shape[0], groups, dtype=torch.float32, device=rows.device)
    _round(rows, scheme, codes, scales)
    return codes.view(torch.float8_e4m3fn), scales


def _round(
    rows: torch.Tensor, scheme: ActivationScheme, result: torch.Tensor, scales: torch.Tensor | None = None
) -> None:
    """Writes rounded rows, or codes and scales."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    (count, in_features), group_size = rows.shape, _group_size(rows, scheme)
    block = min(_ROUNDED_AT_ONCE, 1 << (group_size - 1).bit_length())
    with torch.cuda.device_of(rows):
        launch.device_code().round_e4m3[(count, -(-in_features // group_size))](
            rows,
            result,
            result if scales is None else scales,
            in_features,
            group_size,
            rows.stride(0),
            scheme.upper_bound or 0.0,
            scheme.upper_bound is not None,
            scales is not None,
            launch.triton_dtype(rows.dtype),
            block,
            -(-group_size // block),
        )


def _group_size(rows: torch.Tensor, scheme: ActivationScheme) -> int:
    return scheme.group_size if scheme.strategy == "group" and scheme.group_size else rows.shape[1]


def _uses_dot(dtype: torch.dtype) -> bool:
    """Returns True if tensor cores multiply factors of this dtype exactly."""
    return dtype != torch.float32 or launch.is_interpreted()


def _product_of(layer: Layer, tensors: Mapping[str, torch.Tensor], rows: torch.Tensor) -> Product:
    """Returns the product of rows by a layer, kept with the tensors that a module holds."""
    if type(tensors) is not LayerTensors:
        return Product(layer, rows.dtype, rows.shape[0], tensors.get("bias"))
    count = rows.shape[0]
    size = 1 if count == 1 else 2 if count == 2 else 4 if count <= 4 else 16 if count <= 16 else count
    key = ("triton", size if size <= 16 else 32 if size <= 32 else 64, rows.dtype)
    found = tensors.answers.get(key)  # type: ignore[call-overload]
    if found is None or found[0] is not layer:
        found = layer, Product(layer, rows.dtype, count, tensors.get("bias"))
        tensors.answers[key] = found  # type: ignore[index]
    return found[1]


def _multiply_panels(rows: torch.Tensor, layer: Layer, out: torch.Tensor) -> None:
    """Multiplies many rows by panels of the dequantized weight."""
    in_features = rows.shape[1]
    height = max(EXPANDED_NBYTES // (in_features * rows.element_size()) // 16 * 16, 16)
    with torch.cuda.device_of(rows):
        for first in range(0, layer.out_features, height):
            size = min(height, layer.out_features - first)
            panel = thread_buffer("triton panel", rows.dtype, rows.device, size * in_features)
            panel = panel.view(size, in_features)
            launch.expand(panel, layer, first)
            torch.mm(rows, panel.t(), out=out[:, first : first + size])
