"""LLM.int8(): int8 products with a scale for each row of activations and of weights, and outlier features in
full precision.

Dettmers et al. 2022, arXiv 2208.07339, section 3. A feature (input channel) in which any activation reaches
the threshold is left out of the int8 product and multiplied in floats. Without it this is row-wise or
vector-wise W8A8; with one scale for a tensor, absmax or zero-point W8A8. Products of int8 codes are exact in
float64 up to 2**38 of them.
"""

from __future__ import annotations

from typing import Literal

import torch

from hfq.quantization.textbook.linear import Affine, absmax, zero_point

__all__ = ["THRESHOLD", "Granularity", "int8_linear", "outlier_features"]

THRESHOLD = 6.0
Granularity = Literal["tensor", "row", "vector"]
"""Scales of activations and weights: one each; one for each row (token) of activations; and one for each
output channel, too.
"""


def outlier_features(activations: torch.Tensor, threshold: float = THRESHOLD) -> torch.Tensor:
    """bool [in]: the features in which some activation [tokens, in] reaches the threshold."""
    return activations.abs().amax(0) >= threshold


def int8_linear(
    activations: torch.Tensor,
    weight: torch.Tensor,
    granularity: Granularity = "vector",
    symmetric: bool = True,
    threshold: float | None = THRESHOLD,
) -> torch.Tensor:
    """The product of activations [tokens, in] and a weight [out, in], both quantized to int8.

    Args:
        activations: Floats.
        weight: Floats.
        granularity: What shares a scale.
        symmetric: Whether activations are quantized by absmax; weights always are.
        threshold: From which magnitude on a feature is computed in floats; None for no feature.

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
