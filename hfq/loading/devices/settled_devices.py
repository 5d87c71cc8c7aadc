"""Devices of a model's quantized modules and unquantized tensors, by a device map."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hfq.loading.automatic_map import places_of_tied
from hfq.modules.quantized_module import QuantizedModule
from hfq.placement.device_map import (
    ancestors,
    check_device,
    execution_device,
    execution_devices,
    execution_map,
    leaf_map,
    resolve_devices,
)

__all__ = ["SettledDevices"]

Check = Callable[[Any, str], str]


class SettledDevices:
    """Device and execution device of every quantized module and every unquantized tensor.

    Args:
        model: The model with its quantized modules.
        quantized: The quantized modules by name.
        unquantized: Names of all other tensors, in the order of the model.
        device_map: The map of the user, or an inferred map; None for no map.
        check: Returns the device of a value of the map, as for `resolve_devices`.

    Attributes:
        stored: Device of each quantized module and each unquantized tensor, by name.
        executes: Execution device of each of them, by name.
        main: The first execution device.
        by_tensor: Devices of the tensors of quantized modules by tensor name; empty unless the map names
            such tensors.

    Raises:
        PlacementError: As `resolve_devices` and `execution_devices`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        quantized: Mapping[str, QuantizedModule],
        unquantized: Sequence[str],
        device_map: Mapping[str, Any] | None,
        check: Check | None = None,
    ) -> None:
        self._ties, self._modules = model.all_tied_weights_keys, dict(model.named_modules())
        self._readers, self._whole = places_of_tied(model), set(model._no_split_modules or ())
        self._quantized = quantized
        self.by_tensor: dict[str, str] = {}
        self.stored = self._resolve(unquantized, device_map, check)
        # a device of the map may store nothing, if everything of it is offloaded
        asked = {key: (check or check_device)(value, key) for key, value in (device_map or {}).items()}
        self.main = execution_device([*self._in_order_of_model(), *asked.values()])
        self._units: dict[str, str] = {}
        self.executes = self._settle_execution(execution_device([asked.get("", "cpu"), self.main]))

    def execution_device_of(self, module: str) -> torch.device:
        """Returns the execution device of a unit, or of a module in or above a unit."""
        path = module
        while path and path not in self._units:
            path = path.rpartition(".")[0]
        within = (device for unit, device in self._units.items() if unit.startswith(f"{module}."))
        return torch.device(self._units[path] if path else next(within, self.main))

    @property
    def units(self) -> Mapping[str, str]:
        """Execution device of each unit; empty if all units compute on the CPU."""
        return self._units

    def execution_map(self, device_map: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the map of execution devices for transformers and accelerate."""
        firsts = {name: f"{name}.{next(iter(module.infos))}" for name, module in self._quantized.items()}
        stored = {firsts.get(name, name): device for name, device in self.stored.items()}
        found = execution_map(device_map, stored, self.main)
        if len({*found.values(), *self.executes.values()}) == 1:
            return found
        executes = {firsts.get(name, name): device for name, device in self.executes.items()}
        return leaf_map(executes, found, self.main, self._modules, self._units)

    def _resolve(
        self, unquantized: Sequence[str], device_map: Mapping[str, Any] | None, check: Check | None
    ) -> dict[str, str]:
        names, modules = [*sorted(self._quantized), *unquantized], self._modules
        if {"", *modules, *names}.issuperset(device_map or ()):
            devices = resolve_devices(device_map, names, modules, check)
        else:
            devices = self._resolve_tensors(unquantized, device_map, check)
        for target, source in self._ties.items():
            devices[target] = devices.get(source, devices[target])
        return devices

    def _resolve_tensors(
        self, unquantized: Sequence[str], device_map: Mapping[str, Any] | None, check: Check | None
    ) -> dict[str, str]:
        """Resolves a map that names tensors of quantized modules, or nothing of the model."""
        owners = {
            f"{name}.{local}": name
            for name in sorted(self._quantized)
            for local in self._quantized[name].infos
        }
        devices = resolve_devices(device_map, [*sorted(owners), *unquantized], self._modules, check)
        self.by_tensor = {name: devices.pop(name) for name in owners}
        first = {owner: self.by_tensor[name] for name, owner in reversed(owners.items())}
        return {**{name: first[name] for name in sorted(first)}, **devices}

    def _in_order_of_model(self) -> list[str]:
        """Returns the devices in the order in which the model reaches them."""
        found = [*dict.fromkeys(self.stored.values())]
        if len(found) == 1:
            return found
        places = {path: place for place, path in enumerate(self._modules)}

        def place_of(name: str) -> int:
            parents = (*ancestors(name), name) if name in self._quantized else ancestors(name)
            return max((places.get(path, 0) for path in parents), default=0)

        return [self.stored[name] for name in sorted(self.stored, key=place_of)]

    def _settle_execution(self, first: str) -> dict[str, str]:
        """Returns the execution device of every name.

        Tied weights compute where a module reads them whole.

        Args:
            first: The execution device of the first units, if they are offloaded.
        """
        if self.main == "cpu":
            self._modules = {}  # the execution map then has one device
            return dict.fromkeys(self.stored, self.main)
        owned: dict[str, list[str]] = {}
        for name in self.stored:
            parents = self._readers.get(name, name).split(".")
            paths = (".".join(parents[:count]) for count in range(1, len(parents) + 1))
            owner = next((path for path in paths if path in self._quantized), ".".join(parents[:-1]))
            owned.setdefault(owner, []).append(name)
        units: dict[str, list[str]] = {}
        around = ""
        for path, module in self._modules.items():
            if not (around and path.startswith(f"{around}.")):
                around = path if type(module).__name__ in self._whole else ""
            names = [name for name in owned.get(path, ()) if name not in self._ties]
            if names:
                units.setdefault(around or path, []).extend(names)
        executes = execution_devices(self.stored, first, units.items())
        self._units = {unit: executes[names[0]] for unit, names in units.items()}
        executes |= {target: executes.get(source, self.main) for target, source in self._ties.items()}
        return {name: executes.get(name, self.main) for name in self.stored}
