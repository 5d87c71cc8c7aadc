"""A linear layer that holds quantized weights and never a float copy of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.compiler import is_compiling

from hfq.errors import SetupError
from hfq.formats import ActivationScheme, Format
from hfq.kernels.activations import OutlierTally
from hfq.kernels.registry import KERNELS, Kernel
from hfq.modules.graph_capture import is_captured, uncompiled
from hfq.modules.graph_ops import OPS, multiply_rounded, without_autocast
from hfq.modules.layer_layout import layer_text
from hfq.modules.quantized_module import QuantizedModule
from hfq.tensor_spec import TensorInfo

__all__ = ["QuantizedLinear"]


class QuantizedLinear(QuantizedModule):
    """Replaces `nn.Linear`, transformers' `Conv1D`, or one projection of one expert.

    Args:
        name: The module's name in the model, for messages.
        in_features: Number of input channels.
        out_features: Number of output rows.
        weight_format: The format of its tensors.
        infos: The stored tensors, by checkpoint name.
        kernel: The kernel on a CPU.
        scheme: Scheme that quantizes activations; None leaves them unquantized.
        accelerated: The kernel on another device; None uses the reference kernel.

    Attributes:
        outliers: Number of outlier channels so far under LLM.int8(); None for other schemes.
        local_in_features: Number of input channels on this rank: fewer than `in_features` for a slice of the
            layer.
        is_sliced: True for a slice of a layer, which stays out of graphs.
    """

    kernel: Kernel
    accelerated: Kernel
    local_in_features: int
    scheme: ActivationScheme | None = None
    outliers: OutlierTally | None = None
    is_sliced = False

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        weight_format: Format,
        infos: dict[str, TensorInfo],
        kernel: Kernel,
        scheme: ActivationScheme | None = None,
        accelerated: Kernel | None = None,
    ) -> None:
        super().__init__(name, in_features, out_features, weight_format, infos)
        own = vars(self)  # torch's assignment is slow
        own["kernel"] = kernel
        own["accelerated"] = accelerated or KERNELS["reference"]
        own["local_in_features"] = in_features
        if scheme is not None:
            own["scheme"] = scheme
            own["outliers"] = OutlierTally() if scheme.outlier_threshold else None

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        if not is_compiling() or not self.fits_graph():
            return _compute(activations, self)
        if not self._is_operator(activations):
            return _compute_in_memory(activations, self)
        device = activations.device.type
        if torch.is_autocast_enabled(device):
            activations = _autocasted(activations)
        has_grad = torch.is_grad_enabled() and activations.requires_grad
        multiply = OPS.linear if has_grad else OPS.linear_without_grad
        return multiply(activations, self.graph_inputs(), self.layout)

    def _is_operator(self, activations: torch.Tensor) -> bool:
        """Returns True if a product in memory can be an operator of a graph."""
        is_valid = activations.shape[-1] == self.local_in_features and activations.is_floating_point()
        return is_valid and self.outliers is None and not self.is_sliced

    def _describe(self) -> None:
        own = vars(self)
        sizes = own["out_features"], own["local_in_features"]
        kernels = own["kernel"].name, own["accelerated"].name
        own["layout"] = layer_text(own["weight_format"], *sizes, *kernels, self.scheme, *self._held_names())


@uncompiled
def _compute(activations: torch.Tensor, module: QuantizedLinear) -> torch.Tensor:
    """Multiplies outside of graphs."""
    if activations.shape[-1] != module.local_in_features or not activations.is_floating_point():
        kind = "size" if activations.is_floating_point() else f"dtype, {activations.dtype}"
        raise SetupError(
            f"{module.name} received activations of the wrong {kind}.",
            expected=f"[..., {module.local_in_features}]",
            found=str(list(activations.shape)),
            fix="Load the model with the config.json of this checkpoint.",
        )
    device = activations.device.type
    if not activations.is_meta and torch.is_autocast_enabled(device):
        activations = _autocasted(activations)
        with without_autocast(activations):
            return _record(activations, module)
    return _record(activations, module)


def _compute_in_memory(activations: torch.Tensor, module: QuantizedLinear) -> torch.Tensor:
    """Multiplies by a layer in memory, outside of graphs."""
    return _compute(activations, module)


uncompiled(
    _compute_in_memory,
    reason="A graph holds no layer that counts outliers (LLM.int8()) or is a slice, and no product of "
    "activations that have a wrong size or dtype.",
    fix="Leave fullgraph=True out.",
)


def _autocasted(values: torch.Tensor) -> torch.Tensor:
    """Returns values as `nn.Linear` computes on under autocast."""
    return (
        values if values.dtype == torch.float64 else values.to(torch.get_autocast_dtype(values.device.type))
    )


def _record(activations: torch.Tensor, module: QuantizedLinear) -> torch.Tensor:
    if torch.is_grad_enabled() and activations.requires_grad:
        return _Multiply.apply(activations, module)
    return _multiply(activations, module)


class _Multiply(torch.autograd.Function):
    """The multiplication for autograd: it keeps the module, not the weight.

    Only activations have a gradient. The gradient passes straight through the quantization of activations.
    """

    @staticmethod
    def forward(ctx: Any, activations: torch.Tensor, module: QuantizedLinear) -> torch.Tensor:
        ctx.module = module
        return _multiply(activations, module)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        kernel, tensors, grad = _where_it_computes(ctx.module, grads[0])
        with without_autocast(grad):
            values = kernel.linear_grad(grad, tensors, ctx.module.weight_format)
        return values.to(grads[0].device), None


def _multiply(activations: torch.Tensor, module: QuantizedLinear) -> torch.Tensor:
    scheme = module.scheme
    kernel, tensors, values = _where_it_computes(module, activations)
    if scheme is None:
        result = kernel.linear(values, tensors, module.weight_format)
    else:
        if module.outliers is not None:
            module.outliers.count(values, scheme)
        result = multiply_rounded(kernel, values, tensors, module.weight_format, scheme)
    return result if values is activations else result.to(activations.device)


def _where_it_computes(
    module: QuantizedLinear, values: torch.Tensor
) -> tuple[Kernel, Mapping[str, torch.Tensor], torch.Tensor]:
    """Returns the kernel, and the layer's tensors and the values on one device.

    That is the device of the values, or the device on which the layer is stored.
    """
    execution = module.on_cpu
    if execution is not None and not is_captured() and execution.is_chosen(module, values):
        tensors = module.stored_tensors()
        execution.cpu_forwards += 1
        return module.kernel, tensors, values.to(next(iter(tensors.values())).device)
    return module.kernel if values.is_cpu else module.accelerated, module.onloaded_tensors(), values
