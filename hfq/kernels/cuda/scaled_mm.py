"""torch's own product of FP8 activations and FP8 weights, for devices that have it.

The kernel serves checkpoints that require FP8 activations. Activations are rounded as by
`quantize_activations`, under one scale for the tensor, one for each token, or one for each group of 128. The
codes are multiplied, then the products are scaled. The device defines the precision of sums (torch's
`use_fast_accum=False`).

Scales of blocks have a layout that torch does not check: with another one, results are wrong without an error
(pytorch#166752). So one product of known numbers is compared on the device before the first one of a model.

Tested with torch's CPU implementation of the same call; never run on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch.nn import functional

from hfq.formats import ActivationScheme, Format
from hfq.formats.fp8 import Fp8
from hfq.kernels.activations import activation_codes
from hfq.kernels.cuda import triton_linear
from hfq.kernels.cuda.launch import SOME_ROWS
from hfq.kernels.cuda.libraries import probe

__all__ = ["linear", "reason_against"]

_MULTIPLE = 16
"""cuBLAS and CUTLASS require both sizes of the weight to be multiples of this."""

_BLOCK = 128
"""Channels under one scale, on both sides of a block."""

_ALIGNED = 4
"""torch requires rows of activations, and blocks in a column of the weight, to be multiples of this."""


def reason_against(
    weight_format: Format, scheme: ActivationScheme, in_features: int, out_features: int
) -> str | None:
    """Returns why a layer under a scheme is unsupported on this machine, or None."""
    recipe = _recipe(weight_format, scheme)
    if recipe is None:
        return f"torch has no product of {scheme.strategy} activations by {weight_format.describe()}"
    multiple = _BLOCK if recipe == "blockwise" else _MULTIPLE
    if in_features % multiple or out_features % multiple:
        return f"{out_features} x {in_features} is no multiple of {multiple}"
    is_available, reason = probe(f"scaled_mm {recipe}")
    if not is_available:
        return reason
    return _reason_against_blocks() if recipe == "blockwise" else None


def linear(
    activations: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    weight_format: Format,
    scheme: ActivationScheme,
) -> torch.Tensor:
    """Computes `quantize_activations(activations) @ W.T (+ bias)`.

    The Triton kernel computes results that torch's product cannot return in the activations' dtype: with
    scales per row or block, torch returns bfloat16 only. It also computes few rows by scales of blocks, for
    which the bytes of the weight decide.
    """
    recipe = _recipe(weight_format, scheme)
    rows, weight = activations.reshape(-1, activations.shape[-1]), tensors["weight"]
    if (
        not activations.numel()
        or (recipe != "tensorwise" and activations.dtype != torch.bfloat16)
        or (recipe == "blockwise" and len(rows) <= SOME_ROWS)
    ):
        return triton_linear.quantized_linear(activations, tensors, weight_format, scheme)
    stored = tensors[weight_format.scale_name].to(torch.float32)  # type: ignore[attr-defined]
    stored = stored.reciprocal() if weight_format.reciprocal else stored  # type: ignore[attr-defined]
    result = rows.new_empty(*activations.shape[:-1], weight.shape[0])  # no view, as in the reference
    flat = result.view(rows.shape[0], weight.shape[0])
    if recipe == "blockwise":
        flat.copy_(_multiply_blocks(*triton_linear.quantize_rows(rows, scheme), weight, stored))
    else:
        codes, scale = activation_codes(rows, scheme, tensors)
        if recipe == "rowwise":
            scale = scale.reshape(-1, 1).expand(rows.shape[0], 1).contiguous()
            stored = stored.reshape(1, -1).expand(1, weight.shape[0]).contiguous()
        else:
            scale, stored = scale.reshape(()), stored.reshape(())
        torch._scaled_mm(codes, weight.t(), scale, stored, out_dtype=activations.dtype, out=flat)
    bias = tensors.get("bias")
    if bias is not None:
        result += bias.to(result.dtype)
    return result


def _multiply_blocks(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, stored: torch.Tensor
) -> torch.Tensor:
    """Multiplies codes of activations and of a weight, with scales of 1 x 128 and of 128 x 128.

    torch needs the scales of a row's groups and those of a column's blocks in columns of memory. It needs a
    multiple of 4 rows, and a multiple of 4 blocks in a column.

    Args:
        codes: float8_e4m3fn [rows, in_features].
        scales: float32 [rows, in_features / 128].
        weight: float8_e4m3fn [out_features, in_features].
        stored: float32 [out_features / 128, in_features / 128].

    Returns:
        bfloat16 [rows, out_features].
    """
    count = codes.shape[0]
    rows, blocks = -count % _ALIGNED, -stored.shape[1] % _ALIGNED
    if rows:
        codes = functional.pad(codes.view(torch.int8), (0, 0, 0, rows)).view(torch.float8_e4m3fn)
        scales = functional.pad(scales, (0, 0, 0, rows))
    if blocks:
        stored = functional.pad(stored, (0, blocks))
    product = functional.scaled_mm(
        codes,
        weight.t(),
        scales.t().contiguous().t(),
        functional.ScalingType.BlockWise1x128,
        stored.contiguous().t(),
        functional.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return product[:count]


@functools.cache
def _reason_against_blocks(device: str = "cuda") -> str | None:
    """Returns why products with scales of blocks are unusable on a device, or None.

    All factors and sums of the compared product are exact, so that any right product has its bits. Its sizes
    need both kinds of padding.
    """
    if not hasattr(functional, "scaled_mm"):
        return "this version of torch has no scaled_mm with scales of blocks"
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).float()

    rows, weight = draw(-2, 3, 7, 3 * _BLOCK), draw(-2, 3, 2 * _BLOCK, 3 * _BLOCK)
    scales, stored = draw(-2, 3, 7, 3).exp2(), draw(-2, 3, 2, 3).exp2()
    left = rows * scales.repeat_interleave(_BLOCK, 1)
    right = weight * stored.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    expected = (left.double() @ right.double().t()).to(torch.bfloat16)
    try:
        found = _multiply_blocks(
            rows.to(device, torch.float8_e4m3fn),
            scales.to(device),
            weight.to(device, torch.float8_e4m3fn),
            stored.to(device),
        )
    except RuntimeError as error:
        return f"torch cannot multiply with scales of blocks: {str(error).strip().splitlines()[0]}"
    if not torch.equal(found.cpu(), expected):
        return "torch's product with scales of blocks differs from the exact one on this device"
    return None


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
