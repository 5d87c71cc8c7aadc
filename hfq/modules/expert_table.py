"""Facts about the layers of each expert of a module, for calls that ask for many of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import nn

from hfq.formats import Format
from hfq.kernels.registry import Kernel
from hfq.modules.changes import changes
from hfq.modules.quantized_module import QuantizedModule
from hfq.modules.stacked_experts import is_plain

__all__ = ["ExpertTable", "first_projections"]

Layer = tuple[Any, Format]
"""A layer and its format."""


class ExpertTable:
    """The layers of each expert, with what decides how and where they compute.

    Asking the modules takes longer than multiplying by small ones. A table is true until `is_current` returns
    False.

    Args:
        experts: The layers of each expert, by local name.

    Attributes:
        offloaded: The layers of each expert that are onloaded for a call; None if one of them chooses its
            device for each call.
        projections: The layers of each expert in the order of `first_projections`, `down_proj` last; empty if
            an expert has others than the first one.
        kernels: The kernel of each expert whose layers only multiply by this kernel, else None.
        are_held: True for each expert whose layers are in memory for good.
    """

    def __init__(self, experts: nn.ModuleList) -> None:
        self._number = changes()  # before the facts
        modules = cast("list[nn.ModuleDict]", list(experts._modules.values()))
        names = (*first_projections(modules[0]), "down_proj")
        self._layers: list[list[nn.Module]] = [
            cast("list[nn.Module]", list(expert._modules.values())) for expert in modules
        ]
        self.offloaded = [_offloaded(layers) for layers in self._layers]
        self.projections = [_in_order(expert, names) for expert in modules]
        self.kernels = [
            _kernel_of(layers) if own else None
            for layers, own in zip(self._layers, self.projections, strict=True)
        ]
        self.are_held = [all(map(_is_held, layers)) for layers in self._layers]

    def is_current(self, experts: nn.ModuleList, routed: Iterable[int]) -> bool:
        """Returns True if no layer changed, and the routed experts have the same layers."""
        if self._number != changes():
            return False
        modules: list[Any] = list(experts._modules.values())
        if len(modules) != len(self._layers):
            return False
        for expert in routed:  # noqa: SIM110, since a generator is resumed for each expert
            if list(modules[expert]._modules.values()) != self._layers[expert]:
                return False
        return True

    def common_kernel(self, experts: Sequence[int], is_onloaded: bool) -> Kernel | None:
        """Returns the kernel that multiplies by all layers of these experts, or None.

        Args:
            experts: The experts.
            is_onloaded: True if offloaded layers are onloaded for the call.
        """
        kernel = self.kernels[experts[0]]
        for expert in experts:
            if self.kernels[expert] is not kernel or not (is_onloaded or self.are_held[expert]):
                return None
        return kernel


def first_projections(layers: nn.Module) -> tuple[str, ...]:
    """Returns the projections that multiply an expert's input, in the order of their outputs."""
    return tuple(name for name in ("gate_up_proj", "gate_proj", "up_proj") if name in layers)  # type: ignore[operator]


def _in_order(expert: nn.ModuleDict, names: Sequence[str]) -> tuple[Layer, ...]:
    """Returns an expert's layers in the order of their names; none if it has others."""
    layers: list[Any] = [expert._modules.get(name) for name in names]
    is_same = len(expert._modules) == len(names) and None not in layers
    return (
        tuple((layer, layer.weight_format) for layer in layers)
        if is_same and all(map(is_plain, layers))
        else ()
    )


def _offloaded(layers: Sequence[nn.Module]) -> list[QuantizedModule] | None:
    """Returns the layers that are onloaded for a call; None if that depends on the call."""
    found = [layer for layer in layers if isinstance(layer, QuantizedModule) and layer.is_offloaded]
    return found if all(layer.on_cpu is None for layer in found) else None


def _kernel_of(layers: Sequence[Any]) -> Kernel | None:
    """Returns the kernel of layers that only multiply by it, or None."""
    kernel = layers[0].kernel
    fits = all(layer.kernel is kernel and layer.scheme is None for layer in layers)
    return kernel if fits else None


def _is_held(layer: nn.Module) -> bool:
    return getattr(layer, "fetch", None) is None and not getattr(layer, "is_offloaded", False)
