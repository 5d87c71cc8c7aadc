"""Blocks: what is brought to its device as one, and how its parts are lent views of the region it lies in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from hfq.modules.flat_buffer import FlatBuffer
from hfq.modules.offloaded_parameter import OffloadedParameter
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.unit_layout import UnitLayout
from hfq.tensor_spec import Segment, TensorInfo

__all__ = [
    "Binding",
    "OffloadUnit",
    "DenseParameter",
    "OffloadedWeights",
    "is_on_disk",
    "owners_within",
    "rests_on_disk",
]

T = TypeVar("T")

_VIEWS = 16
"""For how many places of a block its views are kept."""

OffloadedWeights = tuple["DenseParameter", nn.Parameter]


@dataclass(frozen=True)
class DenseParameter:
    """A parameter that is not packed and does not rest where it computes; cast to its own dtype when it is
    brought there.

    `home` is where it rests: `disk`, or `cpu` where an accelerator computes.
    """

    module: nn.Module
    local: str
    info: TensorInfo
    home: str = "disk"

    def give(self, value: torch.Tensor) -> nn.Parameter:
        """Puts a value in the parameter's place, and returns what was there."""
        resting = self.module._parameters[self.local]
        self.module._parameters[self.local] = value if isinstance(value, nn.Parameter) else _frozen(value)
        return resting  # type: ignore[return-value]

    def bring_to(self, name: str, device: torch.device) -> None:
        """Tells the parameter where it will be brought."""
        parameter = self.module._parameters[self.local]
        if isinstance(parameter, OffloadedParameter):
            parameter.name, parameter.brought_to = name, device

    @property
    def dtype(self) -> torch.dtype:
        """What it is cast to."""
        return self.module._parameters[self.local].dtype  # type: ignore[union-attr]

    def is_away(self) -> bool:
        """Whether the module has the parameter, and it is not lent now."""
        parameter = self.module._parameters[self.local]
        return parameter is not None and parameter.is_meta


@dataclass(frozen=True)
class OffloadUnit:
    """A module whose forward needs these offloaded parts, and no other module's forward in between."""

    name: str
    module: nn.Module
    packed: tuple[QuantizedModule, ...]
    dense: tuple[DenseParameter, ...]

    def moved(self, device: torch.device) -> tuple[QuantizedModule, ...]:
        """The packed modules that must be brought to a device; the others rest in memory it computes with."""
        return tuple(module for module in self.packed if device.type != "cpu" or is_on_disk(module))

    def bring_to(self, device: torch.device) -> None:
        """Tells every part where it will be brought."""
        for module in self.moved(device):
            module.brought_to = device
        for slot in self.dense:
            slot.bring_to(f"{self.name}.{slot.local}", device)

    def infos(self, device: torch.device) -> list[TensorInfo]:
        """The stored tensors that must be brought to a device."""
        packed = [info for module in self.moved(device) for info in module.infos.values()]
        return [*packed, *(slot.info for slot in self.dense)]


def is_on_disk(module: QuantizedModule) -> bool:
    """Whether a packed module rests on disk."""
    return any(tensor.is_meta for tensor in module.resting_tensors().values())


def rests_on_disk(unit: OffloadUnit) -> bool:
    """Whether any part of a block rests on disk."""
    return any(is_on_disk(module) for module in unit.packed) or any(
        slot.home == "disk" for slot in unit.dense
    )


class Binding:
    """Lends the parts of one block views of the region that it lies in.

    The views are made once for each place in the ring. While autograd records, dense parameters are copies:
    it keeps them for the backward, when the region holds another block. A packed layer keeps its module
    instead, and reads its row again.

    Args:
        unit: The block.
        layout: Where its tensors lie in a region.
        device: Where it computes.
        ring: The memory that regions lie in; views of a region apart from it would keep that in memory, and
            are not kept.
    """

    def __init__(
        self, unit: OffloadUnit, layout: UnitLayout, device: torch.device, ring: torch.Tensor
    ) -> None:
        self.unit = unit
        self._layout = layout
        self._ring = ring.untyped_storage().data_ptr()
        self._moved = unit.moved(device)
        self._staying = tuple(module for module in unit.packed if module not in self._moved)
        self._views: dict[int, tuple[list[Mapping[str, torch.Tensor]], list[nn.Parameter]]] = {}
        self._resting: list[OffloadedWeights] = []
        self._is_lent = False

    def during(self, region: torch.Tensor, forward: Callable[[], T]) -> T:
        """What `forward` gives while every part has its view of a region; afterwards all are on meta again,
        or what they were.
        """
        before = len(self._resting)
        try:
            self._lend(region)
            return forward()
        finally:
            self._take_back(before)

    def recover(self) -> None:
        """Takes back what an interrupted forward has left lent: its views would show another block's
        bytes.
        """
        if self._resting or self._is_lent:
            self._take_back(0)

    def _lend(self, region: torch.Tensor) -> None:
        self._is_lent = True
        packed, dense = self._of(region)
        for module, tensors in zip(self._moved, packed, strict=True):
            module.onload(tensors)
        for module in self._staying:
            module.onload(module.resting_tensors())
        for slot, view in zip(self.unit.dense, dense, strict=True):
            if slot.is_away():
                dtype = slot.dtype
                is_kept = torch.is_grad_enabled()
                value = view.detach().to(dtype, copy=True) if is_kept or view.dtype != dtype else view
                self._resting.append((slot, slot.module._parameters[slot.local]))  # type: ignore[arg-type]
                slot.give(value)

    def _take_back(self, before: int) -> None:
        """Leaves parts on meta again, so that a late use of them fails and does not read another block's
        bytes.
        """
        while len(self._resting) > before:
            slot, parameter = self._resting[-1]
            slot.module._parameters[slot.local] = parameter
            self._resting.pop()
        for module in self.unit.packed:
            module.offload()
        self._is_lent = False

    def _of(self, region: torch.Tensor) -> tuple[list[Mapping[str, torch.Tensor]], list[nn.Parameter]]:
        place = region.data_ptr()
        if place not in self._views:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            with torch.inference_mode(False):
                packed: list[Mapping[str, torch.Tensor]] = [
                    self._tensors(region, module.infos) for module in self._moved
                ]
                dense = [_frozen(self._tensors(region, {"it": slot.info})["it"]) for slot in self.unit.dense]
            if region.untyped_storage().data_ptr() != self._ring:
                return packed, dense
            self._views[place] = packed, dense
        return self._views[place]

    def _tensors(self, region: torch.Tensor, infos: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
        segments = {
            local: Segment(self._layout.places[info], info.nbytes, info.dtype, info.shape)
            for local, info in infos.items()
        }
        return FlatBuffer(region, segments).tensors()


def owners_within(unit: OffloadUnit) -> dict[nn.Module, list[DenseParameter]]:
    """The modules within a block that own its dense parameters.

    They matter where a block's forward runs without its wrapper, as when transformers recomputes it for
    gradient checkpointing (`GradientCheckpointingLayer.forward_with_checkpointing`, 5.23): each part is then
    read when its own module is called.
    """
    owners: dict[nn.Module, list[DenseParameter]] = {}
    for slot in unit.dense:
        if slot.module is not unit.module:
            owners.setdefault(slot.module, []).append(slot)
    return owners


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
