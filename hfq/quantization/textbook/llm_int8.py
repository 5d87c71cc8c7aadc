"""LLM.int8(): int8 products with scales per row, and outlier features in full precision.

Dettmers et al. 2022, arXiv 2208.07339, section 3. Activations and weights have one scale per row. A feature
(input channel) in which any activation reaches the threshold is excluded from the int8 product and multiplied
in floats. Without the threshold, this is row-wise or vector-wise W8A8. With one scale per tensor, it is
absmax or zero-point W8A8. Sums of up to 2**38 products of int8 codes are exact in float64.
"""

from __future__ import annotations

from typing import Literal

import torch

from hfq.quantization.textbook.linear import Affine, absmax, zero_point

__all__ = ["THRESHOLD", "Granularity", "int8_linear", "outlier_features"]

THRESHOLD = 6.0
Granularity = Literal["tensor", "row", "vector"]
"""Scales of activations and weights.

"tensor": one each. "row": one for each row (token) of activations. "vector": also one for each output channel
of the weight.
"""


def outlier_features(activations: torch.Tensor, threshold: float = THRESHOLD) -> torch.Tensor:
    """Returns the features that reach the threshold in any activation [tokens, in], bool [in]."""
    return activations.abs().amax(0) >= threshold


def int8_linear(
    activations: torch.Tensor,
    weight: torch.Tensor,
    granularity: Granularity = "vector",
    symmetric: bool = True,
    threshold: float | None = THRESHOLD,
) -> torch.Tensor:
    """Multiplies activations [tokens, in] and a weight [out, in], both quantized to int8.

    Args:
        activations: [tokens, in], floats.
        weight: [out, in], floats.
        granularity: Elements that share a scale. See `Granularity`.
        symmetric: True if activations are quantized by absmax. Weights always are.
        threshold: Least magnitude of a feature that is computed in floats. None computes none in floats.

    Returns:
        float32 [tokens, out].
    """
    activations, weight = activations.to(torch.float32), weight.to(torch.float32)
    is_outlier = torch.zeros(weight.shape[1], dtype=torch.bool)
    if threshold is not None:
        is_outlier = outlier_features(activations, threshold)
    exact = activations[:, is_outlier] @ weight[:, is_outlier].t()
    if bool(is_outlier.all()):
        return exact
    quantize = absmax if symmetric else zero_point
    rows = quantize(activations[:, ~is_outlier], 8, "tensor" if granularity == "tensor" else "channel")
    columns = absmax(weight[:, ~is_outlier], 8, "channel" if granularity == "vector" else "tensor")
    return exact + _product(rows, columns)


def _product(rows: Affine, columns: Affine) -> torch.Tensor:
    codes, others = rows.codes.double(), columns.codes.double()
    sums = codes @ others.t()
    if rows.zero_point is not None:
        sums -= rows.zero_point.double() * others.sum(1)
    return (sums * rows.scale.double() * columns.scale.double().t()).float()
