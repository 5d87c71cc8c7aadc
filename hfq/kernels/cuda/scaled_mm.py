"""torch's own product of FP8 activations and FP8 weights, for devices that have it.

The kernel serves checkpoints that require FP8 activations. Activations are rounded as by
`quantize_activations`, under one scale for the tensor or one for each token. The codes are multiplied, then
the products are scaled. The device defines the precision of sums (torch's `use_fast_accum=False`).

Tested with torch's CPU implementation of the same call; never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hfq.formats import ActivationScheme, Format
from hfq.formats.fp8 import Fp8
from hfq.kernels.activations import activation_codes
from hfq.kernels.cuda import triton_linear
from hfq.kernels.cuda.libraries import probe

__all__ = ["linear", "reason_against"]

_MULTIPLE = 16
"""cuBLAS and CUTLASS require both sizes of the weight to be multiples of this."""


def reason_against(
    weight_format: Format, scheme: ActivationScheme, in_features: int, out_features: int
) -> str | None:
    """Returns why a layer under a scheme is unsupported on this machine, or None."""
    recipe = _recipe(weight_format, scheme)
    if recipe is None:
        return f"torch has no product of {scheme.strategy} activations by {weight_format.describe()}"
    if in_features % _MULTIPLE or out_features % _MULTIPLE:
        return f"{out_features} x {in_features} is no multiple of {_MULTIPLE}"
    is_available, reason = probe(f"scaled_mm {recipe}")
    return None if is_available else reason


def linear(
    activations: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    weight_format: Format,
    scheme: ActivationScheme,
) -> torch.Tensor:
    """Computes `quantize_activations(activations) @ W.T (+ bias)`.

    The Triton kernel computes results that torch's product cannot return in the activations' dtype: with
    scales per row, torch returns bfloat16 only.
    """
    is_by_row = _recipe(weight_format, scheme) == "rowwise"
    if not activations.numel() or (is_by_row and activations.dtype != torch.bfloat16):
        return triton_linear.quantized_linear(activations, tensors, weight_format, scheme)
    rows, weight = activations.reshape(-1, activations.shape[-1]), tensors["weight"]
    codes, scale = activation_codes(rows, scheme, tensors)
    stored = tensors[weight_format.scale_name].to(torch.float32)  # type: ignore[attr-defined]
    stored = stored.reciprocal() if weight_format.reciprocal else stored  # type: ignore[attr-defined]
    if is_by_row:
        scale = scale.reshape(-1, 1).expand(rows.shape[0], 1).contiguous()
        stored = stored.reshape(1, -1).expand(1, weight.shape[0]).contiguous()
    else:
        scale, stored = scale.reshape(()), stored.reshape(())
    result = rows.new_empty(*activations.shape[:-1], weight.shape[0])  # no view, as in the reference
    flat = result.view(rows.shape[0], weight.shape[0])
    torch._scaled_mm(codes, weight.t(), scale, stored, out_dtype=activations.dtype, out=flat)
    bias = tensors.get("bias")
    if bias is not None:
        result += bias.to(result.dtype)
    return result


def _recipe(weight_format: Format, scheme: ActivationScheme) -> str | None:
    """Returns the name of torch's scaling recipe for a layer, or None."""
    if (
        type(weight_format) is not Fp8
        or weight_format.codes_dtype != "F8_E4M3"
        or weight_format.scale_dtype != "F32"
    ):
        return None
    if weight_format.strategy == "tensor" and scheme.strategy == "tensor":
        return "tensorwise"
    if weight_format.strategy in ("tensor", "channel") and scheme.strategy in ("tensor", "token"):
        return "rowwise"
    if (
        weight_format.strategy == "block"
        and weight_format.block_structure == (128, 128)
        and scheme.group_size == 128
    ):
        return "blockwise"
    return None
