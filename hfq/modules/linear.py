"""PackedLinear: a linear layer that holds a packed row, and never a float copy of its weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hfq.errors import SetupError
from hfq.formats import ActivationScheme, Format
from hfq.kernels.activations import quantize_activations
from hfq.kernels.table import Kernel
from hfq.modules.packed import PackedModule
from hfq.spec import TensorInfo

__all__ = ["PackedLinear"]


class PackedLinear(PackedModule):
    """Replaces `nn.Linear`, transformers' `Conv1D`, or one projection of one expert.

    Args:
        name: The module's name in the model, for messages.
        in_features: The size of an input.
        out_features: The size of an output.
        weight_format: The format of its tensors.
        infos: Where each tensor is stored, by local on-disk name.
        kernel: The kernel to multiply with.
        scheme: How activations are quantized first; None to leave them as they are.

    Attributes:
        local_in_features: The size of an input here: less than `in_features` where ranks hold slices of the layer.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        weight_format: Format,
        infos: Mapping[str, TensorInfo],
        kernel: Kernel,
        scheme: ActivationScheme | None = None,
    ) -> None:
        super().__init__(name, in_features, out_features, weight_format, infos)
        self.kernel, self.scheme, self.local_in_features = kernel, scheme, in_features

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        if activations.shape[-1] != self.local_in_features or not activations.is_floating_point():
            kind = "size" if activations.is_floating_point() else f"dtype, {activations.dtype}"
            raise SetupError(
                f"{self.name} was given activations of the wrong {kind}.", expected=f"[..., {self.local_in_features}]",
                found=str(list(activations.shape)), fix="check the model's config against the checkpoint",
            )  # fmt: skip
        return _Multiply.apply(activations, self)


class _Multiply(torch.autograd.Function):
    """The multiplication as autograd sees it: it keeps the module, not the weight, and has a gradient for activations only.

    Quantizing activations is passed straight through in the backward.
    """

    @staticmethod
    def forward(ctx, activations: torch.Tensor, module: PackedLinear) -> torch.Tensor:
        ctx.module = module
        tensors = module.packed_tensors()
        if module.scheme is not None:
            activations = quantize_activations(activations, module.scheme, tensors)
        return module.kernel.linear(activations, tensors, module.weight_format)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        module = ctx.module
        return module.kernel.linear_grad(grads[0], module.packed_tensors(), module.weight_format), None
