"""Automatic device maps: placement of units within the memory limits of `max_memory`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hfq.loading.matching.match import CheckpointMatch
from hfq.modules.experts import QuantizedExperts
from hfq.modules.flat_buffer import flat_layout
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.embedding_rows import can_read_rows
from hfq.offload.unit import UnquantizedParameter
from hfq.offload.unit_layout import lay_out
from hfq.placement.budget import Budget, Kind, Unit, plan_devices
from hfq.placement.device_map import check_device
from hfq.tensor_spec import TensorInfo

__all__ = ["computing_device", "gather_units", "map_of", "plan_map"]

logger = logging.get_logger("hfq")


def computing_device(max_memory: Mapping[int | str, int]) -> int | str | None:
    """Returns the key of `max_memory` for the execution device: its accelerator, else `"cpu"`.

    Returns None if several accelerators share the model.
    """
    accelerators = [key for key, limit in max_memory.items() if key not in ("cpu", "disk") and limit > 0]
    return None if len(accelerators) > 1 else next(iter(accelerators), "cpu")


def plan_map(
    model: PreTrainedModel,
    match: CheckpointMatch,
    dtypes: Mapping[str, torch.dtype],
    max_memory: Mapping[int | str, int],
    expert_cache_nbytes: int = 0,
) -> tuple[dict[str, Any], Budget]:
    """Plans a device map from the stored bytes and the memory that offloading needs.

    Args:
        model: The meta model with its quantized modules.
        match: Places of its tensors in the checkpoint.
        dtypes: Dtype of each unquantized tensor after the load.
        max_memory: Bytes that each device may hold, with transformers' keys; at most one accelerator.
        expert_cache_nbytes: Size of the cache for offloaded experts, in bytes.

    Returns:
        The device map, and the budget that it was planned with.

    Raises:
        PlacementError: The model does not fit, or a device is missing.
    """
    computing = computing_device(max_memory)
    main = check_device(computing)
    capacities = {
        check_device(key): int(limit)
        for key, limit in max_memory.items()
        if key in (computing, "cpu", "disk")
    }
    budget = plan_devices(gather_units(model, match, dtypes), capacities, main, expert_cache_nbytes)
    logger.info("hfq: placed by max_memory: %s", budget)
    return map_of(budget, model, computing), budget


def map_of(budget: Budget, model: PreTrainedModel, computing: int | str | None) -> dict[str, Any]:
    """Returns the device map of a budget.

    Modules that the budget does not offload are on `computing`.
    """
    offloaded = {name: device for name, device in budget.devices.items() if device != budget.main}
    staying = [name for name, device in budget.devices.items() if device == budget.main]
    device_map: dict[str, Any] = {"": computing, **offloaded}
    device_map |= {
        name: computing for name in staying if any(name.startswith(f"{other}.") for other in offloaded)
    }
    for target, source in model.all_tied_weights_keys.items():
        device = offloaded.get(source.rpartition(".")[0])
        if device is not None:
            device_map.setdefault(target.rpartition(".")[0], device)
    return device_map


@dataclass
class _Part:
    """Kind, bytes in memory, and stored tensors of a unit while it is collected."""

    kind: Kind
    nbytes: int = 0
    stored: list[TensorInfo] = field(default_factory=list)


def gather_units(
    model: PreTrainedModel, match: CheckpointMatch, dtypes: Mapping[str, torch.dtype]
) -> list[Unit]:
    """Returns the units that can be placed separately, in module order, with their bytes.

    The root, `""`, holds the buffers, which stay on the execution device. Units that cannot be offloaded are
    fixed: a new head, or a parameter that transformers merges from several stored tensors. Tied weights are
    one unit, named after their source and listed at the module that reads them whole.

    Args:
        model: The meta model with its quantized modules.
        match: Places of its tensors in the checkpoint.
        dtypes: Dtype of each unquantized tensor after the load.
    """
    parts: dict[str, _Part] = {"": _Part("fixed", sum(buffer.nbytes for buffer in model.buffers()))}
    ties, counted_at = model.all_tied_weights_keys, _places_of_tied(model)
    for path, module, around in _walk(model):
        if isinstance(module, QuantizedModule):
            part = parts.setdefault(*_unit(around, path, "other"))
            part.nbytes += flat_layout(module.infos)[1]
            part.stored += module.infos.values()
            continue
        for local, parameter in module._parameters.items():
            name = f"{path}.{local}" if path else local
            source = ties.get(name, name)
            if parameter is None or counted_at.get(source, source) != name:
                continue
            info = _stored(source, model, match)
            if info is None or source in match.merged:
                unit = _unit(None, source, "fixed")
            elif source != name:
                unit = _unit(None, source.rpartition(".")[0], "other")
            else:
                is_table = can_read_rows(UnquantizedParameter(module, local, info))
                is_leaf = bool(path) and not any(module.children())
                unit = _unit(around, path if is_leaf else name, "embedding" if is_table else "other")
            part = parts.setdefault(*unit)
            part.nbytes += parameter.numel() * dtypes.get(name, parameter.dtype).itemsize
            part.stored += [info] if info is not None else []
    return [Unit(name, part.nbytes, part.kind, lay_out(part.stored).nbytes) for name, part in parts.items()]


def _unit(around: tuple[str, Kind] | None, name: str, kind: Kind) -> tuple[str, _Part]:
    """Returns the enclosing unit, or a new unit."""
    name, kind = around or (name, kind)
    return name, _Part(kind)


def _walk(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, tuple[str, Kind] | None]]:
    """Yields every module with its path, and name and kind of its enclosing layer or experts."""
    whole = set(model._no_split_modules or ())
    around: dict[str, tuple[str, Kind]] = {}
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        if isinstance(module, QuantizedExperts):
            around[path] = path, "experts"
        elif parent in around:
            around[path] = around[parent]
        elif type(module).__name__ in whole:
            around[path] = path, "block"
        yield path, module, around.get(path)


def _places_of_tied(model: PreTrainedModel) -> dict[str, str]:
    """Returns the name that counts the bytes of tied weights, by the name of their source.

    It is the last name whose module reads the weights whole.
    """
    return {
        source: target
        for target, source in model.all_tied_weights_keys.items()
        if not isinstance(model.get_submodule(target.rpartition(".")[0]), nn.Embedding)
    }


def _stored(source: str, model: PreTrainedModel, match: CheckpointMatch) -> TensorInfo | None:
    """Returns the stored tensor of a parameter, or of one that is tied to it."""
    tied = (target for target, other in model.all_tied_weights_keys.items() if other == source)
    return next((match.unquantized[name] for name in (source, *tied) if name in match.unquantized), None)
