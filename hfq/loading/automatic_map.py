"""Automatic device maps: the units of a skeleton, planned under the byte budgets that `max_memory` sets."""

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
    """The key of `max_memory` that computes: its accelerator, else `"cpu"`; None where several accelerators
    share a model.
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
    """Plans a device map by the stored bytes and by the memory that offloading needs.

    Args:
        model: The skeleton with its packed modules, on meta.
        match: Where its tensors are stored.
        dtypes: The dtype of each dense tensor once loaded.
        max_memory: The bytes that each device may hold, by transformers' keys; at most one accelerator among
            them.
        expert_cache_nbytes: What the cache of routed experts takes where they are offloaded.

    Returns:
        The device map, and the budget that it was planned under.

    Raises:
        PlacementError: Nothing fits, or a device is missing.
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
    """The device map that a budget means: all that is not said otherwise is `computing`."""
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
    """A unit while it is gathered: what it is, its bytes in memory, and what is stored of it."""

    kind: Kind
    nbytes: int = 0
    stored: list[TensorInfo] = field(default_factory=list)


def gather_units(
    model: PreTrainedModel, match: CheckpointMatch, dtypes: Mapping[str, torch.dtype]
) -> list[Unit]:
    """The parts of a model that have a home of their own, in the order of its modules, with their bytes.

    The root, `""`, stands for the buffers, which stay where the model computes. What cannot be offloaded (a
    new head, a parameter that transformers makes of several stored tensors) is fixed. Tied weights are one
    unit under the name of their source, at the place of the module that reads them whole.

    Args:
        model: The skeleton with its packed modules, on meta.
        match: Where its tensors are stored.
        dtypes: The dtype of each dense tensor once loaded.
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
    """The unit that lies around something, or one of its own."""
    name, kind = around or (name, kind)
    return name, _Part(kind)


def _walk(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, tuple[str, Kind] | None]]:
    """Every module by its path, with the name and kind of the block or the experts that it is or lies in."""
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
    """The name at which the one copy of tied weights is counted: the last that is read whole, if any. By
    their source.
    """
    return {
        source: target
        for target, source in model.all_tied_weights_keys.items()
        if not isinstance(model.get_submodule(target.rpartition(".")[0]), nn.Embedding)
    }


def _stored(source: str, model: PreTrainedModel, match: CheckpointMatch) -> TensorInfo | None:
    """Where a parameter is stored: under its own name, or under one that is tied to it."""
    tied = (target for target, other in model.all_tied_weights_keys.items() if other == source)
    return next((match.unquantized[name] for name in (source, *tied) if name in match.unquantized), None)
