"""Quantizes activations as a checkpoint asks (`quantize_activations=True`): rounded to FP8 e4m3 or int8, and
back.
"""

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
"""What activations can be rounded to."""

TOPS = {"e4m3": torch.finfo(torch.float8_e4m3fn).max, "int8": 127.5}
"""What an amplitude is divided by: compressed-tensors divides int8's whole range, 255, by two."""

_LLM_INT8_TOP = 127.0


def quantize_activations(
    activations: torch.Tensor, scheme: ActivationScheme, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Rounds activations under the scheme's scales, and returns them in their own dtype.

    Args:
        activations: [..., in_features].
        scheme: Static (the tensor `scheme.scale_name`) or dynamic (amax / 448, or / 127.5, of what shares a
            scale). With an `outlier_threshold` the channels that `outlier_channels` names stay as they are,
            and the others are divided by amax / 127: LLM.int8() (Dettmers et al. 2022, section 3).
        tensors: The module's tensors by local name.
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
    """The codes of activations, and their scales: float32, of a shape that broadcasts over [...,
    in_features].

    Args:
        activations: [..., in_features], not empty; outliers are not looked for.
        scheme: Of strategy tensor or token.
        tensors: The module's tensors by local name.
        scale: The scale, where it is known.

    Returns:
        float8_e4m3fn or int8 [..., in_features]; their products with the scales are what
        `quantize_activations` gives.
    """
    values = activations.to(torch.float32)
    scale = _scale(values, scheme, tensors) if scale is None else scale
    return _codes(values, scale, scheme).to(
        torch.int8 if scheme.dtype == "int8" else torch.float8_e4m3fn
    ), scale


def outlier_channels(activations: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor | None:
    """The input channels in which an activation of this call reaches the scheme's threshold: bool
    [in_features]; None without one.
    """
    if not scheme.outlier_threshold:
        return None
    low, high = torch.aminmax(
        activations.reshape(-1, activations.shape[-1]), dim=0
    )  # no copy of all, as abs() makes
    return torch.maximum(-low, high) >= scheme.outlier_threshold


def shared_scale(
    activations: torch.Tensor, scheme: ActivationScheme, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """The scale that all activations share, float32 []; None where each token has its own."""
    if scheme.scale_name is not None:
        return tensors[scheme.scale_name].to(torch.float32).reshape(())
    if scheme.strategy != "tensor":
        return None
    low, high = torch.aminmax(activations)
    return _dynamic(torch.maximum(-low, high).to(torch.float32), scheme)


@dataclass
class OutlierTally:
    """How many input channels were outliers, summed over calls.

    Attributes:
        outliers: The outliers so far.
        channels: All input channels of those calls.
    """

    outliers: int = 0
    channels: int = 0

    def count(self, activations: torch.Tensor, scheme: ActivationScheme) -> None:
        """Counts those of one call."""
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
    """The codes as float32."""
    scaled = values / scale
    if scheme.dtype == "int8":
        return scaled.round_().clamp_(-128, 127)
    return scaled.clamp_(-TOPS["e4m3"], TOPS["e4m3"]).to(torch.float8_e4m3fn).to(torch.float32)


def _rounded(values: torch.Tensor, scale: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    return _codes(values, scale, scheme) * scale
