"""Offload units of a transformers model: its decoder layers and leaf modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from hfq.loading.matching.match import CheckpointMatch
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.unit import OffloadUnit, UnquantizedParameter
from hfq.tensor_spec import TensorInfo

__all__ = ["find_offload_units", "stored_place"]


def find_offload_units(
    model: PreTrainedModel,
    match: CheckpointMatch,
    quantized: Mapping[str, QuantizedModule],
    hidden: Iterable[str],
    devices: Mapping[str, str],
    execution_device: Callable[[str], torch.device],
) -> list[OffloadUnit]:
    """Returns the units of a model with their offloaded weights.

    Args:
        model: The loaded model; each module of a class in its `_no_split_modules` is one unit.
        match: Places of its tensors in the checkpoint.
        quantized: Offloaded quantized modules, keyed by module name. Experts among them are left
            out, since they are read when they are routed to.
        hidden: Names of the unquantized tensors that transformers did not load.
        devices: Device of every tensor, keyed by tensor name.
        execution_device: Returns the execution device of a module, given its name.
    """
    unquantized: dict[str, list[UnquantizedParameter]] = {}
    for name in sorted(hidden):
        module, _, local = name.rpartition(".")
        owner, info = model.get_submodule(module), stored_place(name, model, match)
        parameter = owner._parameters.get(local)
        if info is not None and parameter is not None:
            unquantized.setdefault(module, []).append(UnquantizedParameter(owner, local, info, devices[name]))
    quantized = {
        name: module for name, module in quantized.items() if match.quantized[name].target.kind != "expert"
    }
    found = _collect("", model, set(model._no_split_modules or ()), quantized, unquantized)
    return [dataclasses.replace(unit, device=execution_device(unit.name)) for unit in found]


def stored_place(name: str, model: PreTrainedModel, match: CheckpointMatch) -> TensorInfo | None:
    """Returns the stored tensor of a parameter, or of one that is tied to it.

    Returns None if neither is stored.
    """
    if name in match.unquantized:
        return match.unquantized[name]
    ties = model.all_tied_weights_keys
    group = {ties.get(name, name)} | {
        target for target, source in ties.items() if source == ties.get(name, name)
    }
    return next((match.unquantized[other] for other in sorted(group) if other in match.unquantized), None)


def _collect(
    name: str,
    module: nn.Module,
    whole: set[str],
    quantized: Mapping[str, QuantizedModule],
    unquantized: Mapping[str, list[UnquantizedParameter]],
) -> Iterable[OffloadUnit]:
    children = list(module.named_children())
    takes_weights = isinstance(
        module, nn.MultiheadAttention
    )  # it reads the weights of a child that it never calls
    if type(module).__name__ in whole or not children or takes_weights:
        linears = tuple(linear for key, linear in quantized.items() if _is_within(key, name))
        targets = tuple(
            target for key, targets in unquantized.items() if _is_within(key, name) for target in targets
        )
        if linears or targets:
            yield OffloadUnit(name, module, linears, targets)
        return
    if name in unquantized:
        yield OffloadUnit(name, module, (), tuple(unquantized[name]))
    for local, child in children:
        yield from _collect(f"{name}.{local}" if name else local, child, whole, quantized, unquantized)


def _is_within(module: str, unit: str) -> bool:
    return module == unit or module.startswith(f"{unit}.")
