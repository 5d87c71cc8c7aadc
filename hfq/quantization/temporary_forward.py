"""Temporary forwards for linear layers in memory.

Each computes with panels of its stored bytes, so no weight is ever whole in floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from hfq.formats import Format
from hfq.kernels.cpp import kernel as cpp_kernel

__all__ = ["hold", "let_go", "tensors_of"]


_PANEL_NBYTES = 1 << 20
"""Bytes of a float panel. Intermediate tensors of a format need as much again, or more."""


class _TemporaryForward:
    """Temporary forward of a layer."""

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
    """Makes a linear layer or a Conv1D compute with quantized or float tensors until `let_go`.

    The layer's own weight does not change.

    Args:
        layer: The layer. It computes with its own bias if it has one.
        tensors: Tensors of a weight [out, in], by the local names of its format.
        weight_format: Format of the tensors.
    """
    layer.forward = _TemporaryForward(layer, tensors, weight_format)


def let_go(layer: nn.Module) -> None:
    """Restores a layer's own forward."""
    held = vars(layer).get("forward")
    if isinstance(held, _TemporaryForward):
        del layer.forward
        if held.before is not None:
            layer.forward = held.before


def tensors_of(layer: nn.Module) -> Mapping[str, torch.Tensor] | None:
    """Returns the tensors of a layer's temporary forward, or None without one."""
    held = vars(layer).get("forward")
    return held.tensors if isinstance(held, _TemporaryForward) else None
