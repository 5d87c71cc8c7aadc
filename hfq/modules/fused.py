"""FusedLinear: several packed layers that a model asks for as one, each as it is stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hfq.modules.linear import PackedLinear

__all__ = ["FusedLinear"]


class FusedLinear(nn.Module):
    """Computes the outputs of its parts one after another, and puts them together along the features.

    Nothing is concatenated but outputs, so that parts may have different dialects, and need no memory of their own.

    Args:
        parts: The layers, all with the same inputs.
    """

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features]."""
        return torch.cat([part(activations) for part in self.parts], dim=-1)
