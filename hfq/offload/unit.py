"""Offload units: weights that are onloaded together, and their views of the offload buffer."""

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
    "UnquantizedParameter",
    "OffloadedWeights",
    "is_on_disk",
    "owners_within",
]

T = TypeVar("T")

_CPU = torch.device("cpu")
_VIEWS = 16
"""Number of buffer offsets for which a unit's views are kept."""

OffloadedWeights = tuple["UnquantizedParameter", nn.Parameter]


@dataclass(frozen=True)
class UnquantizedParameter:
    """An unquantized offloaded parameter; it is cast to its own dtype when it is onloaded.

    `device` is the device that stores it: `disk`, or `cpu` if an accelerator computes.
    """

    module: nn.Module
    local: str
    info: TensorInfo
    device: str = "disk"

    def give(self, value: torch.Tensor) -> nn.Parameter:
        """Replaces the parameter by a value, and returns the previous one."""
        offloaded = self.module._parameters[self.local]
        self.module._parameters[self.local] = value if isinstance(value, nn.Parameter) else _frozen(value)
        return offloaded  # type: ignore[return-value]

    def onload_to(self, name: str, device: torch.device) -> None:
        """Sets the device to which the parameter is onloaded."""
        parameter = self.module._parameters[self.local]
        if isinstance(parameter, OffloadedParameter):
            parameter.name, parameter.onload_device = name, device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which the parameter is cast."""
        return self.module._parameters[self.local].dtype  # type: ignore[union-attr]

    def is_offloaded(self) -> bool:
        """Returns True if the module has the parameter, and it is not onloaded now."""
        parameter = self.module._parameters[self.local]
        return parameter is not None and parameter.is_meta


@dataclass(frozen=True)
class OffloadUnit:
    """A module whose forward needs these offloaded weights, and runs no other unit.

    Attributes:
        device: The execution device.
    """

    name: str
    module: nn.Module
    quantized: tuple[QuantizedModule, ...]
    unquantized: tuple[UnquantizedParameter, ...]
    device: torch.device = _CPU

    @property
    def moved(self) -> tuple[QuantizedModule, ...]:
        """The quantized modules to onload."""
        return tuple(module for module in self.quantized if self.device.type != "cpu" or is_on_disk(module))

    def set_onload_device(self) -> None:
        """Tells all parts the device to which they are onloaded."""
        for module in self.moved:
            module.onload_to(self.device)
        paths = {module: path for path, module in self.module.named_modules(prefix=self.name)}
        for weight in self.unquantized:
            weight.onload_to(f"{paths.get(weight.module, self.name)}.{weight.local}", self.device)

    @property
    def infos(self) -> list[TensorInfo]:
        """The stored tensors to onload."""
        quantized = [info for module in self.moved for info in module.infos.values()]
        return [*quantized, *(weight.info for weight in self.unquantized)]


def is_on_disk(module: QuantizedModule) -> bool:
    """Returns True if a quantized module is stored on disk."""
    if type(next(iter(module._parameters.values()), None)) is OffloadedParameter:
        return True  # without asking torch, which is slow for such a parameter
    return any(tensor.is_meta for tensor in module.stored_tensors().values())


class Binding:
    """Gives the parts of one unit views of its buffer.

    The views are made once for each offset in the offload buffer. While autograd records, unquantized
    parameters are copies, since it keeps them for the backward, when the buffer holds another unit. A
    quantized
    layer keeps its module instead, and reads its weights again.

    Args:
        unit: The unit.
        layout: Offsets of its tensors in a buffer.
        buffer: The offload buffer. Views of other memory are not kept, since they would keep that memory
            allocated.
    """

    def __init__(self, unit: OffloadUnit, layout: UnitLayout, buffer: torch.Tensor) -> None:
        self.unit = unit
        self._layout = layout
        self._buffer = buffer.untyped_storage().data_ptr()
        self._moved = unit.moved
        self._staying = tuple(module for module in unit.quantized if module not in self._moved)
        self._views: dict[int, tuple[list[Mapping[str, torch.Tensor]], list[nn.Parameter]]] = {}
        self._offloaded: list[OffloadedWeights] = []
        self._is_loaned = False

    def during(self, buffer: torch.Tensor, forward: Callable[[], T]) -> T:
        """Calls `forward` while every part has its view of a buffer, and returns its result.

        Afterwards all parts are on meta again, or as they were before.
        """
        before = len(self._offloaded)
        try:
            self._lend(buffer)
            return forward()
        finally:
            self._return(before)

    def recover(self) -> None:
        """Removes the views of an interrupted pass, which would show another unit's bytes."""
        if self._offloaded or self._is_loaned:
            self._return(0)

    def _lend(self, buffer: torch.Tensor) -> None:
        self._is_loaned = True
        quantized, unquantized = self._of(buffer)
        for module, tensors in zip(self._moved, quantized, strict=True):
            module.onload(tensors)
        for module in self._staying:
            module.onload(module.stored_tensors())
        for weight, view in zip(self.unit.unquantized, unquantized, strict=True):
            if weight.is_offloaded():
                dtype = weight.dtype
                is_kept = torch.is_grad_enabled()
                value = view.detach().to(dtype, copy=True) if is_kept or view.dtype != dtype else view
                self._offloaded.append((weight, weight.module._parameters[weight.local]))  # type: ignore[arg-type]
                weight.give(value)

    def _return(self, before: int) -> None:
        """Puts the parts back on meta, so that a late use fails."""
        while len(self._offloaded) > before:
            weight, parameter = self._offloaded[-1]
            weight.module._parameters[weight.local] = parameter
            self._offloaded.pop()
        for module in self.unit.quantized:
            module.offload()
        self._is_loaned = False

    def _of(self, buffer: torch.Tensor) -> tuple[list[Mapping[str, torch.Tensor]], list[nn.Parameter]]:
        place = buffer.data_ptr()
        if place not in self._views:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            with torch.inference_mode(False):
                quantized: list[Mapping[str, torch.Tensor]] = [
                    self._tensors(buffer, module.infos) for module in self._moved
                ]
                unquantized = [
                    _frozen(self._tensors(buffer, {"it": weight.info})["it"])
                    for weight in self.unit.unquantized
                ]
            if buffer.untyped_storage().data_ptr() != self._buffer:
                return quantized, unquantized
            self._views[place] = quantized, unquantized
        return self._views[place]

    def _tensors(self, buffer: torch.Tensor, infos: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
        segments = {
            local: Segment(self._layout.places[info], info.nbytes, info.dtype, info.shape)
            for local, info in infos.items()
        }
        return FlatBuffer(buffer, segments).tensors()


def owners_within(unit: OffloadUnit) -> dict[nn.Module, list[UnquantizedParameter]]:
    """Returns the modules within a unit that own its unquantized parameters.

    They matter if a unit's forward runs without its wrapper, as when transformers recomputes it for gradient
    checkpointing (`GradientCheckpointingLayer.forward_with_checkpointing`, 5.23). Each part is then read when
    its own module is called.
    """
    owners: dict[nn.Module, list[UnquantizedParameter]] = {}
    for weight in unit.unquantized:
        if weight.module is not unit.module:
            owners.setdefault(weight.module, []).append(weight)
    return owners


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
