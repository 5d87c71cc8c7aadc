"""Experts of a layer that compute together, without a call for each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from hfq.kernels.registry import Kernel
from hfq.modules.changes import changes
from hfq.modules.linear import QuantizedLinear
from hfq.modules.offloaded_parameter import OffloadedParameter

__all__ = ["StackedExperts", "is_plain", "multiply_as_stacked", "needs_gradient"]

Gate = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def is_plain(layer: nn.Module) -> bool:
    """Returns True if calling a layer only multiplies."""
    return (
        type(layer) is QuantizedLinear
        and "forward" not in vars(layer)
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )


def needs_gradient(hidden_states: torch.Tensor, top_k_weights: torch.Tensor) -> bool:
    """Returns True if a gradient flows through experts, or through their weights to a router."""
    return torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad)


def multiply_as_stacked(layer: nn.Module, rows: torch.Tensor, kernel: Kernel, size: int) -> torch.Tensor:
    """Multiplies rows by one expert, with the bits of a stack if it has the kernel.

    Args:
        layer: A projection of an expert.
        rows: [count, in_features].
        kernel: See `StackedExperts.rows_of_block`.
        size: See `StackedExperts.rows_of_block`.
    """
    multiply = None if kernel.experts is None else kernel.experts.multiply_rows
    if multiply is None or not is_plain(layer) or layer.scheme is not None or layer.on_cpu is not None:
        return layer(rows)
    if (layer.kernel if rows.is_cpu else layer.accelerated) is not kernel:
        return layer(rows)
    return multiply(rows, layer.onloaded_tensors(), layer.weight_format, size)


@dataclass
class _Kept:
    """The products of a module of experts, and what they depend on.

    Attributes:
        number: `changes()` at the last comparison.
        kernel: The kernel that multiplies.
        device: The device that computes.
        layers: The layers of each expert.
        sources: What each layer's place depends on, see `_source`.
        products: The products; None if experts compute one by one.
        places: The parameters of each expert, and their addresses.
    """

    number: int
    kernel: Kernel
    device: torch.device
    layers: list[list[nn.Module]]
    sources: list[tuple]
    products: Callable[..., torch.Tensor | None] | None = None
    places: list[tuple[list[nn.Parameter], list[int]]] = field(default_factory=list)

    def holds(self, experts: nn.ModuleList, routed: Iterable[int]) -> bool:
        """Returns True if the routed experts are the same modules, in the same memory."""
        modules = list(experts._modules.values())
        for expert in routed:
            if list(modules[expert]._modules.values()) != self.layers[expert]:
                return False
            if self.places:
                parameters, places = self.places[expert]
                if list(map(torch.Tensor.data_ptr, parameters)) != places:
                    return False
        return True


class StackedExperts:
    """The products of a module of experts, replaced if a layer changes.

    Args:
        experts: The layers of each expert, by local name.
        first: The projections that multiply an expert's input, in the order of their outputs.
        gate: Returns the input of `down_proj` for the outputs of `first`.
        is_joined: True if `gate` reads the outputs of `first` one after the other.
    """

    def __init__(
        self,
        experts: nn.ModuleList,
        first: Sequence[str],
        gate: Gate,
        is_joined: bool,
    ) -> None:
        self._experts, self._first, self._gate, self._is_joined = experts, first, gate, is_joined
        self._kept: _Kept | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_kept": None}  # a copy makes its own

    def rows_of_block(
        self, hidden_states: torch.Tensor, top_k_weights: torch.Tensor
    ) -> tuple[Kernel, int] | None:
        """Returns the kernel and the rows of a block, or None if experts compute one by one."""
        layer = next(iter(self._experts[0].values()))  # type: ignore[operator]
        kernel = getattr(layer, "kernel" if hidden_states.is_cpu else "accelerated", None)
        experts = getattr(kernel, "experts", None)
        is_float = hidden_states.dtype in (torch.float32, torch.bfloat16, torch.float16)
        if kernel is None or experts is None or not is_float or not hidden_states.numel():
            return None
        is_autocast = torch.is_autocast_enabled(hidden_states.device.type)
        if is_autocast or needs_gradient(hidden_states, top_k_weights):
            return None
        tokens, top_k = top_k_weights.shape
        size = experts.block_size(tokens, top_k, len(self._experts), hidden_states.dtype)
        return None if size is None else (kernel, size)

    def compute(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        kernel: Kernel,
        size: int,
    ) -> torch.Tensor | None:
        """Returns the weighted sum of the experts' outputs, or None if experts compute one by one.

        Args:
            hidden_states: [tokens, hidden].
            top_k_index: The experts of each token, integers [tokens, top_k].
            top_k_weights: Their weights, [tokens, top_k].
            kernel: See `rows_of_block`.
            size: See `rows_of_block`.
        """
        count = len(self._experts)
        routed: Iterable[int] = range(count)
        if not kernel.experts.needs_all:  # type: ignore[union-attr]
            routed = [each for each in set(top_k_index.flatten().tolist()) if 0 <= each < count]
        products = self._find(kernel, hidden_states.device, routed)
        if products is None:
            return None
        return products(hidden_states, top_k_index, top_k_weights, self._gate, size)

    def _find(
        self, kernel: Kernel, device: torch.device, routed: Iterable[int]
    ) -> Callable[..., torch.Tensor | None] | None:
        """Returns the products; None if the layers cannot be multiplied together."""
        kept, number = self._kept, changes()
        if (
            kept is None
            or kept.kernel is not kernel
            or kept.device != device
            or kept.number != number
            or not kept.holds(self._experts, routed)
        ):
            kept = self._kept = self._made(kept, number, kernel, device)
        return kept.products

    def _made(self, kept: _Kept | None, number: int, kernel: Kernel, device: torch.device) -> _Kept:
        """Returns the products for the layers as they are, or `kept` if they did not change."""
        experts: list[list] = [list(expert._modules.values()) for expert in self._experts]
        layers = [layer for expert in experts for layer in expert]
        if not all(map(is_plain, layers)):
            return _Kept(number, kernel, device, experts, [])
        sources = [(layer, _source(layer), kernel, device) for layer in layers]
        if kept is not None and kept.sources == sources:
            kept.number = number
            return kept
        made = _Kept(number, kernel, device, experts, sources)
        if any(_is_apart(layer, kernel, device) for layer in layers):
            return made
        *first, down = [
            [(expert[name].onloaded_tensors(), expert[name].weight_format) for expert in self._experts]  # type: ignore[index]
            for name in (*self._first, "down_proj")
        ]
        products = kernel.experts.products(first, down, self._is_joined)  # type: ignore[union-attr]
        if products.reason is None:
            made.products = products
            held = [[each for layer in expert for each in layer.parameters()] for expert in experts]
            made.places = [(own, [each.data_ptr() for each in own]) for own in held]
        return made


def _is_apart(layer: QuantizedLinear, kernel: Kernel, device: torch.device) -> bool:
    """Returns True if a layer cannot be multiplied by a kernel together with others."""
    return (
        layer.is_offloaded
        or layer.fetch is not None
        or layer.on_cpu is not None
        or layer.scheme is not None
        or layer.storage_kind == "shard"
        or layer.compute_device != device
        or (layer.kernel if device.type == "cpu" else layer.accelerated) is not kernel
    )


def _source(layer: QuantizedLinear) -> tuple:
    """Returns what a layer's place in a stack depends on."""
    stored = [parameter for parameter in layer._parameters.values() if parameter is not None]
    places = [None if _is_empty(parameter) else parameter.data_ptr() for parameter in stored]
    return (
        layer.fetch,
        layer.on_cpu,
        layer.kernel,
        layer.accelerated,
        layer.scheme,
        layer.is_offloaded,
        places,
    )


def _is_empty(parameter: nn.Parameter) -> bool:
    # asking an offloaded parameter for anything of torch is slow
    return type(parameter) is OffloadedParameter or parameter.is_meta
