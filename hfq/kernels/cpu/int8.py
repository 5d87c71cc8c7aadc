"""Products of int8 activations and int8 weights on a CPU, read from the checkpoint's bytes.

    y[m, n] = (sum of q[m, k] * (w[n, k] - zero_point[n]) over k) * activation_scale[m] * weight_scale[n]

The C++ library (cpp/src/int8.cpp) sums exactly in integers. With dot products of bytes (AVX-512 VNNI) or
tiles (AMX), it rounds, multiplies, and scales any number of rows in one call. Without a compiler, torch's
`_int_mm` multiplies many rows on processors with dot products, and `_weight_int8pack_mm` multiplies few rows
of bfloat16 activations. The latter receives the codes as bfloat16, which represents each of them, sums in
float32, and rounds the sum to bfloat16. All other products use panels. torch's prepacked linear of oneDNN is
not used: its 16-bit sums saturate silently on a processor without VNNI (torch 2.13 on AVX2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch

from hfq.formats import ActivationScheme, Format
from hfq.formats.bitsandbytes import BnbInt8
from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.formats.compressed_tensors import IntQuantized
from hfq.formats.layouts.scaled import ScaledCodes
from hfq.kernels.activations import (
    TOPS,
    activation_codes,
    outlier_channels,
    quantize_activations,
    shared_scale,
)
from hfq.kernels.cpp.int8_library import (
    RoundedWeight,
    integer_product,
    is_built,
    rounded_linear,
    takes_any_rows,
)
from hfq.kernels.cpp.layer_struct import DTYPES
from hfq.kernels.cpu import panels
from hfq.kernels.layer_tensors import LayerTensors, PlacedTensors, check_on_cpu

__all__ = ["BATCH_NBYTES", "linear", "reason_against"]

_MOST_INPUTS = 1 << 17
"""Number of inputs from which int32 sums could overflow."""

BATCH_NBYTES = 4 << 20
"""The most bytes of float32 activations or sums that are allocated together."""

_MOST_OUTLIERS = 1 / 32
"""The largest share of channels that are LLM.int8() outliers; for more, panels are used."""

_OUTLIER_ROWS = 16
"""Rows, padded with zeros, that are multiplied by outlier channels together.

The number is fixed because torch's order of sums depends on it.
"""

_VNNI_ROWS = 32
"""The fewest rows that `_int_mm` multiplies without a compiler, on processors with VNNI.

For few rows, `_int_mm` is slower than bfloat16. The exact crossover is not tuned.
"""

_FUSED_ROWS, _FUSED_DTYPES = 64, (torch.float32, torch.bfloat16)
"""The most rows, and the dtypes, that are rounded, multiplied, and scaled in one call.

The limit of rows holds on processors with neither dot products nor tiles.
"""

_PACK_ROWS, _PACK_MULTIPLE = 16, 32
"""Limits of `_weight_int8pack_mm`: the most rows, and a divisor of in_features.

For more rows, panels are faster. It reads whole vectors, also past the end of a row (torch 2.13), so
in_features must be a multiple of the second number.
"""

_PACK_ALIGNMENT, _PACK_PART = 16, 1 << 18
"""Alignment in bytes that `_weight_int8pack_mm` requires, and codes per copied part.

With AVX-512 and four rows or more, it ends the process if the weight is not aligned (torch 2.13). Files align
tensors to 8 bytes only, so unaligned weights are copied in parts of about this many codes.
"""


def reason_against(
    weight_format: Format, scheme: ActivationScheme, in_features: int, out_features: int
) -> str | None:
    """Returns why a layer under a scheme is unsupported, or None; may wait for the C++ build."""
    if type(weight_format) not in (IntQuantized, BnbInt8) or not isinstance(weight_format, ScaledCodes):
        return f"it does not read {weight_format.name}"
    if scheme.dtype != "int8" or scheme.strategy == "group":
        return f"it does not round to {scheme.dtype} by {scheme.strategy}"
    if weight_format.has_columns or weight_format.strategy not in ("tensor", "channel"):
        return "it reads codes with one scale per row, or one for all"
    if not 0 < in_features < _MOST_INPUTS:
        return f"{in_features} inputs are too many: it supports fewer than {_MOST_INPUTS}"
    if is_built():
        return None
    if weight_format.zero_dtype or in_features % _PACK_MULTIPLE:
        return (
            f"without the C++ library, it requires symmetric codes and a multiple of {_PACK_MULTIPLE} inputs"
        )
    return None


def linear(
    activations: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    weight_format: ScaledCodes,
    scheme: ActivationScheme,
) -> torch.Tensor:
    """Computes `quantize_activations(activations) @ W.T (+ bias)`.

    Sums of codes are scaled in float32. Temporary tensors have at most `BATCH_NBYTES`, plus the outlier
    channels of the weight and `_OUTLIER_ROWS` rows of their sums. Without a compiler, a buffer holds
    `_PACK_PART` codes of an unaligned weight, or 64 rows if those are more.

    Raises:
        SetupError: A tensor is not in CPU memory.
    """
    check_on_cpu(tensors, activations)
    rows = activations if activations.dim() == 2 else activations.reshape(-1, activations.shape[-1])
    weight = tensors[weight_format.codes]
    fused = _fused_weight(tensors, weight_format, scheme) if _is_for_fused(rows) else None
    if fused is not None:
        return _fused(activations, rows, tensors, fused)
    outliers = outlier_channels(activations, scheme) if rows.shape[0] else None
    columns = outliers.nonzero()[:, 0] if outliers is not None else None
    multiply = _multiplier(rows, weight)
    if multiply is None or (columns is not None and columns.numel() > _MOST_OUTLIERS * rows.shape[1]):
        return panels.linear(quantize_activations(activations, scheme, tensors), tensors, weight_format)
    shared = shared_scale(rows, scheme, tensors)
    steps = tensors[weight_format.scale].reshape(-1).to(torch.float32)
    steps = steps if weight_format.multiplier == 1 else steps * weight_format.multiplier
    floats = None if columns is None else _floats(tensors, weight_format, columns)
    result = activations.new_empty(*activations.shape[:-1], weight.shape[0])  # no view, as in the reference
    flat, batch = result.view(rows.shape[0], weight.shape[0]), max(BATCH_NBYTES // (4 * max(weight.shape)), 1)
    if floats is not None:
        batch = max(batch // _OUTLIER_ROWS, 1) * _OUTLIER_ROWS
    for first in range(0, rows.shape[0], batch):
        part = rows[first : first + batch]
        codes, scale = activation_codes(
            part if outliers is None else part.masked_fill(outliers, 0), scheme, tensors, shared
        )
        product = multiply(codes, weight)
        if weight_format.zero_dtype:
            zeros = tensors[weight_format.zero].reshape(-1).to(torch.int32)
            product.sub_(codes.sum(1, keepdim=True, dtype=torch.int32) * zeros)
        product = product.to(torch.float32).mul_(scale).mul_(steps)
        if floats is not None:
            _add_outliers(product, part[:, columns], floats)
        flat[first : first + batch] = product
    bias = tensors.get("bias")
    if bias is not None:
        result += bias.to(result.dtype)
    return result


def _is_for_fused(rows: torch.Tensor) -> bool:
    """Returns True if the C++ library rounds, multiplies, and scales these rows.

    For few rows, torch's operations would take as long as the product.
    """
    count = rows.shape[0]
    if not count or rows.dtype not in _FUSED_DTYPES or not rows.data_ptr():
        return False
    return is_built() and (count <= _FUSED_ROWS or takes_any_rows())


def _fused_weight(
    tensors: Mapping[str, torch.Tensor], weight_format: ScaledCodes, scheme: ActivationScheme
) -> RoundedWeight | None:
    """Returns the cached weight for `rounded_linear`; None if unsupported."""
    answers = tensors.answers if isinstance(tensors, (LayerTensors, PlacedTensors)) else {}
    answer = answers.get("int8")
    if isinstance(answer, tuple) and answer[0] is weight_format and answer[1] is scheme:
        return answer[2]
    is_plain = scheme.strategy == "token" and scheme.scale_name is None and scheme.outlier_threshold is None
    weight, stored = tensors[weight_format.codes], tensors[weight_format.scale]
    if not is_plain or not _has_rows(weight) or weight_format.zero_dtype or not is_built():
        return None
    steps = (stored if stored.dtype in DTYPES else stored.to(torch.float32)).contiguous()
    bound = math.inf if scheme.upper_bound is None else scheme.upper_bound
    fused = RoundedWeight(weight, steps, weight_format.multiplier, TOPS["int8"], bound)
    if steps is stored:  # a cached copy would miss later changes of the stored scales
        answers["int8"] = weight_format, scheme, fused
    return fused


def _fused(
    activations: torch.Tensor, rows: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight: RoundedWeight
) -> torch.Tensor:
    """Computes `linear` in the C++ library, bit-identical to torch's operations."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    *leading, _ = activations.shape
    result = activations.new_empty(*leading, weight.out_features)  # no view, as in the reference
    count, in_features = rows.shape
    kept = (
        (in_features + 63) // 64 * 64 + 8 if takes_any_rows() else 4 * (weight.out_features + in_features + 1)
    )
    if count * kept <= BATCH_NBYTES:
        rounded_linear(rows, weight, result)
    else:
        batches = math.ceil(count / max(BATCH_NBYTES // kept, 1))
        for part, target in zip(rows.chunk(batches), result.view(count, -1).chunk(batches), strict=True):
            rounded_linear(part, weight, target)
    bias = tensors.get("bias")
    if bias is not None:
        result += bias.to(result.dtype)
    return result


def _has_rows(weight: torch.Tensor) -> bool:
    """Returns True if a weight is contiguous in memory; a FakeTensor has no memory."""
    return weight.is_contiguous() and weight.data_ptr() != 0


def _multiplier(
    rows: torch.Tensor, weight: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Returns a product of int8 codes [rows, in_features] and weight; None to use panels."""
    count, in_features = rows.shape
    if not count or not _has_rows(weight) or not rows.data_ptr():
        return None
    if is_built():
        return lambda codes, weight: integer_product(codes.to(torch.int16).contiguous(), weight)
    if count >= _VNNI_ROWS and _has_exact_dots():
        return lambda codes, weight: torch._int_mm(codes, weight.t())
    if count <= _PACK_ROWS and rows.dtype == torch.bfloat16 and in_features % _PACK_MULTIPLE == 0:
        return lambda codes, weight: _multiply_packed(codes.to(torch.bfloat16).contiguous(), weight)
    return None


def _multiply_packed(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes `codes @ weight.T`, bfloat16 [rows, out_features], summed in float32."""
    ones = _ones(weight.shape[0])
    if weight.data_ptr() % _PACK_ALIGNMENT == 0:
        return torch._weight_int8pack_mm(codes, weight, ones)
    product = codes.new_empty(codes.shape[0], weight.shape[0])
    step = max(_PACK_PART // weight.shape[1] // 64, 1) * 64
    for start in range(0, weight.shape[0], step):
        part = weight[start : start + step]
        aligned = thread_buffer("int8", torch.int8, part.device, part.numel()).view(part.shape).copy_(part)
        product[:, start : start + step] = torch._weight_int8pack_mm(codes, aligned, ones[: part.shape[0]])
    return product


def _add_outliers(product: torch.Tensor, values: torch.Tensor, floats: torch.Tensor) -> None:
    """Adds `values @ floats.T` to `product`.

    Every product has `_OUTLIER_ROWS` rows, so that the bits of a row do not depend on the other rows.
    """
    for part, target in zip(values.split(_OUTLIER_ROWS), product.split(_OUTLIER_ROWS), strict=True):
        filled = floats.new_zeros(_OUTLIER_ROWS, floats.shape[1])
        filled[: part.shape[0]] = part
        target += (filled @ floats.t())[: part.shape[0]]


def _floats(
    tensors: Mapping[str, torch.Tensor], weight_format: ScaledCodes, columns: torch.Tensor
) -> torch.Tensor:
    """Dequantizes input channels of the weight: float32 [out_features, channels]."""
    codes = tensors[weight_format.codes][:, columns].to(torch.float32)
    if weight_format.zero_dtype:
        codes.sub_(tensors[weight_format.zero].reshape(-1, 1).to(torch.float32))
    return codes.mul_(tensors[weight_format.scale].reshape(-1, 1).to(torch.float32)).mul_(
        weight_format.multiplier
    )


@functools.cache
def _has_exact_dots() -> bool:
    """Returns True if the processor has int8 dot products and torch's sums with them are exact."""
    if not getattr(torch.cpu, "_is_vnni_supported", bool)():
        return False
    extremes = torch.tensor([[127], [-128]], dtype=torch.int8).expand(2, 256).contiguous()
    expected = extremes.to(torch.int32) @ extremes.to(torch.int32).t()
    return bool(torch.equal(torch._int_mm(extremes, extremes.t()), expected))


@functools.lru_cache(maxsize=64)
def _ones(count: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.ones(count, dtype=torch.bfloat16)
