"""Experts of a layer that compute together on an accelerator, with the device's own routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hfq.kernels.registry import Kernel
from hfq.modules.linear import QuantizedLinear

__all__ = ["StackedExperts", "is_plain", "multiply_as_stacked"]

Join = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def is_plain(layer: nn.Module) -> bool:
    """Returns True if calling a layer only multiplies."""
    return (
        type(layer) is QuantizedLinear
        and "forward" not in vars(layer)
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )


def multiply_as_stacked(layer: nn.Module, rows: torch.Tensor, kernel: Kernel, size: int) -> torch.Tensor:
    """Multiplies rows by one expert, with the bits of a stack if it has the kernel.

    Args:
        layer: A projection of an expert.
        rows: [count, in_features].
        kernel: See `StackedExperts.rows_of_block`.
        size: See `StackedExperts.rows_of_block`.
    """
    if not is_plain(layer) or layer.scheme is not None or layer.on_cpu is not None:
        return layer(rows)
    if (layer.kernel if rows.is_cpu else layer.accelerated) is not kernel:
        return layer(rows)
    return kernel.experts.multiply_rows(rows, layer.onloaded_tensors(), layer.weight_format, size)


class StackedExperts:
    """The stacks of a module of experts, replaced if a layer changes.

    Args:
        experts: The layers of each expert, by local name.
        first: The projections that multiply an expert's input, in the order of their outputs.
        join: Returns gate and up channels in the order that `apply_gate` expects.
        apply_gate: The model's own gating.
    """

    def __init__(
        self,
        experts: nn.ModuleList,
        first: Sequence[str],
        join: Join,
        apply_gate: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._experts, self._first, self._join, self._apply_gate = experts, first, join, apply_gate
        self._sources: list[tuple] = []
        self._stacks: dict | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_sources": [], "_stacks": None}  # a copy makes its own

    def rows_of_block(self, hidden_states: torch.Tensor, top_k: int) -> tuple[Kernel, int] | None:
        """Returns the kernel and the rows of a block, or None if experts compute one by one."""
        layer = next(iter(self._experts[0].values()))  # type: ignore[operator]
        kernel = getattr(layer, "kernel" if hidden_states.is_cpu else "accelerated", None)
        products = getattr(kernel, "experts", None)
        is_float = hidden_states.dtype in (torch.float32, torch.bfloat16, torch.float16)
        if kernel is None or products is None or not is_float or not hidden_states.numel():
            return None
        if torch.is_autocast_enabled(hidden_states.device.type) or (
            torch.is_grad_enabled() and hidden_states.requires_grad
        ):
            return None
        size = products.block_size(len(hidden_states), top_k, len(self._experts), hidden_states.dtype)
        return None if size is None else (kernel, size)

    def compute(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        kernel: Kernel,
        size: int,
    ) -> torch.Tensor | None:
        """Returns the weighted sum of the experts' outputs, or None if weights are apart.

        Args:
            hidden_states: [tokens, hidden].
            top_k_index: The experts of each token, integers [tokens, top_k].
            top_k_weights: Their weights, [tokens, top_k].
            kernel: See `rows_of_block`.
            size: See `rows_of_block`.
        """
        stacks = self._find(kernel, hidden_states.device)
        if not stacks:
            return None
        products = kernel.experts
        routing = products.routing.of(top_k_index, top_k_weights, len(self._experts), size)  # type: ignore[union-attr]
        both = self._join([stacks[name](hidden_states, routing, True) for name in self._first])
        return routing.combine(stacks["down_proj"](self._apply_gate(both), routing, False))

    def _find(self, kernel: Kernel, device: torch.device) -> dict | None:
        """Returns the stack of each projection; None if the layers cannot be multiplied together."""
        layers = [layer for expert in self._experts for layer in expert.values()]  # type: ignore[operator]
        if not all(map(is_plain, layers)):
            return None
        sources = [(layer, _source(layer), kernel, device) for layer in layers]
        if sources != self._sources:
            self._sources, self._stacks = sources, self._made(layers, kernel, device)
        return self._stacks

    def _made(self, layers: Sequence[QuantizedLinear], kernel: Kernel, device: torch.device) -> dict | None:
        is_apart = any(
            layer.is_offloaded
            or layer.fetch is not None
            or layer.on_cpu is not None
            or layer.scheme is not None
            or layer.storage_kind == "shard"
            or layer.compute_device != device
            or (layer.kernel if device.type == "cpu" else layer.accelerated) is not kernel
            for layer in layers
        )
        if is_apart:
            return None
        stacks = {
            name: kernel.experts.stack(  # type: ignore[union-attr]
                [(expert[name].onloaded_tensors(), expert[name].weight_format) for expert in self._experts]  # type: ignore[index]
            )
            for name in (*self._first, "down_proj")
        }
        return None if any(stack.reason for stack in stacks.values()) else stacks


def _source(layer: QuantizedLinear) -> tuple:
    """Returns what a layer's place in a stack depends on."""
    places = [parameter.data_ptr() for parameter in layer._parameters.values() if parameter is not None]
    return (
        layer.fetch,
        layer.on_cpu,
        layer.kernel,
        layer.accelerated,
        layer.scheme,
        layer.is_offloaded,
        places,
    )
