"""JoinedLinear: one linear layer of the model that the checkpoint stores as two."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hfq.modules.linear import PackedLinear

__all__ = ["JoinedLinear"]


class JoinedLinear(nn.ModuleDict):
    """Replaces an `nn.Linear` whose outputs are those of several packed layers, one after the other.

    Each layer has its own packed row, so that each is placed, read and saved by itself, under the checkpoint's name.

    Args:
        layers: The layers by local name, in the order of their outputs; all take the same input.
    """

    def __init__(self, layers: Mapping[str, PackedLinear]) -> None:
        super().__init__(dict(layers))

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(activations) for layer in self.values()], -1)
