"""Linear layers of a block in memory: each computes by panels of its stored bytes, and no weight is ever
whole in floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from hfq.formats import Format
from hfq.kernels.cpp import kernel as cpp_kernel

__all__ = ["hold", "let_go", "tensors_of"]


_PANEL_NBYTES = 1 << 20
"""Of a panel in floats; what a format makes on the way takes as much again, or more."""


class _TemporaryForward:
    """The forward of a layer that is held."""

    def __init__(self, layer: nn.Module, tensors: Mapping[str, torch.Tensor], weight_format: Format) -> None:
        before = vars(layer).get("forward")
        self.layer = layer
        self.tensors = {**tensors}
        self.format = weight_format
        self.before: Callable | None = before.before if isinstance(before, _TemporaryForward) else before

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        bias = self.layer._parameters.get("bias")
        tensors = self.tensors if bias is None else {**self.tensors, "bias": bias}
        return cpp_kernel.panel_linear(inputs, tensors, self.format, _PANEL_NBYTES)


def hold(layer: nn.Module, tensors: Mapping[str, torch.Tensor], weight_format: Format) -> None:
    """Makes a linear layer or a Conv1D compute with packed or float tensors, until `let_go`; its own weight
    stays as it is.

    Args:
        layer: The layer; its bias, where it has one, is its own.
        tensors: A weight [out, in] by the local names of its format.
        weight_format: Their format.
    """
    layer.forward = _TemporaryForward(layer, tensors, weight_format)


def let_go(layer: nn.Module) -> None:
    """Gives a layer that is held its own forward again."""
    held = vars(layer).get("forward")
    if isinstance(held, _TemporaryForward):
        del layer.forward
        if held.before is not None:
            layer.forward = held.before


def tensors_of(layer: nn.Module) -> Mapping[str, torch.Tensor] | None:
    """What a layer computes with if it is held."""
    held = vars(layer).get("forward")
    return held.tensors if isinstance(held, _TemporaryForward) else None
