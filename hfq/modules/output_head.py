"""An unquantized output head that the C++ library multiplies by few rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hfq.kernels.cpp import dense
from hfq.modules.graph_capture import is_captured

__all__ = ["OutputHead", "replace_head"]


class OutputHead(nn.Linear):
    """`nn.Linear` without a bias, with a faster product of few 16-bit rows on a CPU.

    All other calls are those of `nn.Linear`.
    """

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        is_plain = activations.is_cpu and weight.is_cpu and not torch.is_autocast_enabled("cpu")
        if not is_plain or is_captured():
            return super().forward(activations)
        if torch.is_grad_enabled() and (activations.requires_grad or weight.requires_grad):
            return _Multiply.apply(activations, weight)
        return _multiply(activations, weight)


class _Multiply(torch.autograd.Function):
    """The multiplication for autograd, with the bits that it has without gradients."""

    @staticmethod
    def forward(ctx: Any, activations: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(activations, weight)
        return _multiply(activations, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        activations, weight = ctx.saved_tensors
        grad, of_weight = grads[0], None
        if ctx.needs_input_grad[1]:
            rows = activations.reshape(-1, activations.shape[-1])
            of_weight = grad.reshape(-1, grad.shape[-1]).t() @ rows
        return grad @ weight if ctx.needs_input_grad[0] else None, of_weight


def _multiply(activations: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    found = dense.linear(activations, weight)
    return nn.functional.linear(activations, weight) if found is None else found


def replace_head(model: Any) -> None:
    """Makes a model's output head an `OutputHead`, if it is a plain `nn.Linear` without a bias."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is nn.Linear and head.bias is None and "forward" not in vars(head):
        head.__class__ = OutputHead
