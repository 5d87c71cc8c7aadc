"""Quantizes activations as a checkpoint asks (`activations="checkpoint"`): rounded to FP8 e4m3 or int8, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hfq.formats.base import ActivationScheme

__all__ = ["READABLE_DTYPES", "quantize_activations"]

READABLE_DTYPES = ("e4m3", "int8")
"""What activations can be rounded to."""

_TOPS = {"e4m3": torch.finfo(torch.float8_e4m3fn).max, "int8": 127.5}
"""What an amplitude is divided by: compressed-tensors divides int8's whole range, 255, by two."""


def quantize_activations(
    activations: torch.Tensor, scheme: ActivationScheme, tensors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Rounds activations under the scheme's scales, and returns them in their own dtype.

    Args:
        activations: [..., in_features].
        scheme: Static (the tensor `scheme.scale_name`) or dynamic (amax / 448, or / 127.5, of what shares a scale).
        tensors: The module's tensors by local name.
    """
    if not activations.numel():
        return activations
    values = activations.to(torch.float32)
    if scheme.strategy == "group" and scheme.group_size:
        in_features = values.shape[-1]
        padding = -in_features % scheme.group_size
        values = torch.nn.functional.pad(values, (0, padding)).unflatten(-1, (-1, scheme.group_size))
        rounded = _round(values, _dynamic(values.abs().amax(-1, keepdim=True), scheme), scheme)
        return rounded.flatten(-2)[..., :in_features].to(activations.dtype)
    if scheme.scale_name is not None:
        scale = tensors[scheme.scale_name].to(torch.float32).reshape(())
    elif scheme.strategy == "tensor":
        scale = _dynamic(values.abs().amax(), scheme)
    else:
        scale = _dynamic(values.abs().amax(-1, keepdim=True), scheme)
    return _round(values, scale, scheme).to(activations.dtype)


def _dynamic(amax: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    if scheme.upper_bound is not None:
        amax = amax.clamp(max=scheme.upper_bound)
    return torch.where(amax == 0, 1, amax / _TOPS[scheme.dtype])


def _round(values: torch.Tensor, scale: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    scaled = values / scale
    if scheme.dtype == "int8":
        return scaled.round().clamp(-128, 127) * scale
    return scaled.clamp(-_TOPS["e4m3"], _TOPS["e4m3"]).to(torch.float8_e4m3fn).to(torch.float32) * scale
