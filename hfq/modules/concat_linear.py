"""A linear layer that concatenates the outputs of several quantized layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hfq.modules.linear import QuantizedLinear

__all__ = ["ConcatLinear"]


class ConcatLinear(nn.ModuleDict):
    """Computes several quantized layers on the same input, and concatenates their outputs.

    Each layer keeps its own flat buffer, so that it is placed, read, and saved by itself, under the
    checkpoint's name, and the layers may have different formats.

    Args:
        layers: The layers by local name, in the order of their outputs; all take the same input.
    """

    def __init__(self, layers: Mapping[str, QuantizedLinear]) -> None:
        super().__init__(dict(layers))
        self.in_features = next(iter(layers.values())).in_features
        self.out_features = sum(layer.out_features for layer in layers.values())

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """Returns the concatenated outputs: [..., in_features] → [..., out_features]."""
        return torch.cat([layer(activations) for layer in self.values()], dim=-1)
