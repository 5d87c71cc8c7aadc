"""Rounding of activations to FP8 e4m3 or int8, for `quantize_activations=True`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.formats.base import ActivationScheme

__all__ = [
    "READABLE_DTYPES",
    "TOPS",
    "OutlierTally",
    "activation_codes",
    "outlier_channels",
    "quantize_activations",
    "shared_scale",
]

READABLE_DTYPES = ("e4m3", "int8")
"""The dtypes that activations can be rounded to."""

TOPS = {"e4m3": torch.finfo(torch.float8_e4m3fn).max, "int8": 127.5}
"""The divisor of an amplitude, by dtype. compressed-tensors halves int8's range of 255."""

_LLM_INT8_TOP = 127.0


def quantize_activations(
    activations: torch.Tensor, scheme: ActivationScheme, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Rounds activations under the scheme's scales.

    Args:
        activations: [..., in_features].
        scheme: The scales are static (the tensor `scheme.scale_name`) or dynamic (the amax of the activations
            that share a scale, divided by 448 or 127.5). With an `outlier_threshold`, the channels that
            `outlier_channels` returns are unchanged, and the others are divided by amax / 127: LLM.int8()
            (Dettmers et al. 2022, section 3).
        tensors: The module's tensors by local name.

    Returns:
        [..., in_features] in the dtype of the activations.
    """
    if not activations.numel():
        return activations
    values = activations.to(torch.float32)
    if scheme.strategy == "group" and scheme.group_size:
        in_features = values.shape[-1]
        padding = -in_features % scheme.group_size
        values = torch.nn.functional.pad(values, (0, padding)).unflatten(-1, (-1, scheme.group_size))
        rounded = _rounded(values, _dynamic(values.abs().amax(-1, keepdim=True), scheme), scheme)
        return rounded.flatten(-2)[..., :in_features].to(activations.dtype)
    outliers = outlier_channels(activations, scheme)
    if outliers is None:
        return _rounded(values, _scale(values, scheme, tensors), scheme).to(activations.dtype)
    others = values.masked_fill(outliers, 0)
    rounded = _rounded(others, _scale(others, scheme, tensors), scheme).to(activations.dtype)
    return torch.where(outliers, activations, rounded)


def activation_codes(
    activations: torch.Tensor,
    scheme: ActivationScheme,
    tensors: Mapping[str, torch.Tensor],
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes of activations and their scales.

    Args:
        activations: [..., in_features], not empty. Outliers are ignored.
        scheme: A scheme of strategy tensor or token.
        tensors: The module's tensors by local name.
        scale: The scale, float32; None to compute it.

    Returns:
        The codes, float8_e4m3fn or int8 [..., in_features], and the scales, float32, whose shape broadcasts
        over the codes. The products of both equal the result of `quantize_activations`.
    """
    values = activations.to(torch.float32)
    scale = _scale(values, scheme, tensors) if scale is None else scale
    return _codes(values, scale, scheme).to(
        torch.int8 if scheme.dtype == "int8" else torch.float8_e4m3fn
    ), scale


def outlier_channels(activations: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor | None:
    """Returns a mask of input channels with an activation that reaches the scheme's threshold.

    Returns:
        bool [in_features]; None if the scheme has no threshold.
    """
    if not scheme.outlier_threshold:
        return None
    low, high = torch.aminmax(
        activations.reshape(-1, activations.shape[-1]), dim=0
    )  # abs() would copy all activations
    return torch.maximum(-low, high) >= scheme.outlier_threshold


def shared_scale(
    activations: torch.Tensor, scheme: ActivationScheme, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """Returns the scale of all activations, float32 []; None if each token has its own."""
    if scheme.scale_name is not None:
        return tensors[scheme.scale_name].to(torch.float32).reshape(())
    if scheme.strategy != "tensor":
        return None
    low, high = torch.aminmax(activations)
    return _dynamic(torch.maximum(-low, high).to(torch.float32), scheme)


@dataclass
class OutlierTally:
    """Counts of input channels with outliers, summed over calls.

    Attributes:
        outliers: Input channels that were outliers, so far.
        channels: All input channels of those calls.
    """

    outliers: int = 0
    channels: int = 0

    def count(self, activations: torch.Tensor, scheme: ActivationScheme) -> None:
        """Adds the outliers and channels of one call."""
        found = outlier_channels(activations, scheme) if activations.numel() else None
        if found is not None:
            self.outliers += int(found.sum())
            self.channels += found.numel()


def _scale(
    values: torch.Tensor, scheme: ActivationScheme, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    shared = shared_scale(values, scheme, tensors)
    return _dynamic(values.abs().amax(-1, keepdim=True), scheme) if shared is None else shared


def _dynamic(amax: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    if scheme.upper_bound is not None:
        amax = amax.clamp(max=scheme.upper_bound)
    top = TOPS[scheme.dtype] if scheme.outlier_threshold is None else _LLM_INT8_TOP
    return torch.where(amax == 0, 1, amax / top)


def _codes(values: torch.Tensor, scale: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    """Returns the codes as float32."""
    scaled = values / scale
    if scheme.dtype == "int8":
        return scaled.round_().clamp_(-128, 127)
    return scaled.clamp_(-TOPS["e4m3"], TOPS["e4m3"]).to(torch.float8_e4m3fn).to(torch.float32)


def _rounded(values: torch.Tensor, scale: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    return _codes(values, scale, scheme) * scale
