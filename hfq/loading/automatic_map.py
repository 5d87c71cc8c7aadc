"""Automatic device maps: placement of units within the memory limits of `max_memory`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import get_max_memory
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hfq.checkpoint.memory_limit import available_memory
from hfq.errors import PlacementError
from hfq.loading.context import load_context
from hfq.loading.kv_layers import context_nbytes
from hfq.loading.matching.match import CheckpointMatch
from hfq.modules.experts import QuantizedExperts
from hfq.modules.flat_buffer import flat_layout
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.embedding_rows import can_read_rows
from hfq.offload.experts.expert_reader import EXPERT_GAP_NBYTES
from hfq.offload.offloader import OffloadOptions
from hfq.offload.unit import UnquantizedParameter
from hfq.offload.unit_layout import lay_out, layout_nbytes
from hfq.placement.accelerators import free_nbytes, list_accelerators
from hfq.placement.budget import Budget, Kind, Unit, plan_devices
from hfq.placement.device_map import check_device, covering_device
from hfq.placement.multi_device import plan_accelerators
from hfq.tensor_spec import TensorInfo

__all__ = [
    "automatic_limits",
    "computing_devices",
    "experts_per_token",
    "gather_units",
    "map_of",
    "places_of_tied",
    "plan_map",
    "routed_experts",
]

logger = logging.get_logger("hfq")

_HOST_REST = 0.1
"""Share of the host's available memory that an expert cache of automatic size leaves to everything else."""


def computing_devices(max_memory: Mapping[int | str, int]) -> list[int | str]:
    """Returns the keys of the accelerators of `max_memory`, or of the CPU if it has none."""
    accelerators = [key for key, limit in max_memory.items() if key not in ("cpu", "disk") and limit > 0]
    return accelerators or ["cpu"]


def automatic_limits(max_memory: Mapping[int | str, int | str] | None) -> dict[int | str, int]:
    """Returns the bytes that each device may hold.

    Args:
        max_memory: As given to `from_pretrained`; None for 90 % of what accelerators have free, as
            transformers does with one accelerator, and for the available memory of the host. accelerate knows
            the memory of some kinds of accelerators alone, and no control groups, so hfq asks torch and the
            system.
    """
    limits = get_max_memory(None if max_memory is None else dict(max_memory))
    if max_memory is not None:
        return limits
    free = {index: free_nbytes(device) for index, device in enumerate(list_accelerators())}
    known = {index: nbytes for index, nbytes in free.items() if nbytes is not None}
    known = known or {key: limit for key, limit in limits.items() if isinstance(key, int)}
    host = {key: limit for key, limit in limits.items() if not isinstance(key, int)}
    available = available_memory()
    if available is not None and "cpu" in host:
        host["cpu"] = min(host["cpu"], available)
    return {index: int(nbytes * 0.9) for index, nbytes in known.items()} | host


def experts_per_token(config: Any) -> int | None:
    """Returns the number of experts that a token is routed to in each layer, or None if unknown."""
    names = (
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_top_k",
        "moe_topk",
        "moe_k",
        "top_k",
    )
    return next((count for name in names if isinstance(count := getattr(config, name, None), int)), None)


def routed_experts(model: PreTrainedModel) -> int:
    """Returns the number of experts that a token is routed to, or the offloader's default."""
    known = experts_per_token(model.config.get_text_config(decoder=True))
    return known or OffloadOptions.routed_experts


def plan_map(
    model: PreTrainedModel,
    match: CheckpointMatch,
    dtypes: Mapping[str, torch.dtype],
    max_memory: Mapping[int | str, int],
    expert_cache_nbytes: int | None = None,
    strategy: str = "auto",
) -> tuple[dict[str, Any], Budget]:
    """Plans a device map from the stored bytes and the memory that offloading needs.

    Args:
        model: The meta model with its quantized modules.
        match: Places of its tensors in the checkpoint.
        dtypes: Dtype of each unquantized tensor after the load.
        max_memory: Bytes that each device may hold, with transformers' keys.
        expert_cache_nbytes: Size of the cache for offloaded experts, in bytes; None for what is left
            besides a context (`context_nbytes`).
        strategy: The automatic device map, for several accelerators.

    Returns:
        The device map, and the budget that it was planned with.

    Raises:
        PlacementError: The model does not fit, or a device is missing.
    """
    keys = {check_device(key): key for key in [*computing_devices(max_memory), "cpu", "disk"]}
    capacities = {device: int(max_memory[key]) for device, key in keys.items() if key in max_memory}
    units, main = gather_units(model, match, dtypes), next(iter(keys))
    try:
        if len(computing_devices(max_memory)) > 1:
            budget = plan_accelerators(
                units, capacities, strategy=strategy, expert_cache_nbytes=expert_cache_nbytes or 0
            )
        else:
            budget = plan_devices(units, capacities, main, expert_cache_nbytes or 0)
    except PlacementError as error:
        context = load_context()
        if not context.is_active or context.max_memory is not None:
            raise
        raise PlacementError(
            "This machine has too little free memory for this model, even with full offloading. "
            "Nothing was loaded.",
            expected=error.expected,
            found=f"{error.found}, the limit that hfq derives from the free memory",
            fix="Free memory of the device" + ("." if main == "cpu" else ', or pass device_map="cpu".'),
        ) from error
    if expert_cache_nbytes is None and budget.on_demand_nbytes:
        nbytes, is_limited = context_nbytes(model), load_context().max_memory is not None
        rest = 0 if is_limited else nbytes + int(capacities.get("cpu", 0) * _HOST_REST)
        budget = budget.with_default_caches(units, nbytes, rest)
    logger.info("hfq: placed by max_memory: %s", budget)
    return map_of(budget, model, keys), budget


def map_of(budget: Budget, model: PreTrainedModel, keys: Mapping[str, int | str]) -> dict[str, Any]:
    """Returns the device map of a budget.

    Args:
        budget: Device of each unit.
        model: The model.
        keys: Value of each execution device in the map.
    """
    devices: dict[str, str] = {"": budget.main}
    for name in sorted(budget.devices, key=lambda name: name.count(".")):  # parents first
        if name and covering_device(name, devices) != budget.devices[name]:
            devices[name] = budget.devices[name]
    for target, source in model.all_tied_weights_keys.items():
        device = covering_device(source.rpartition(".")[0], devices)
        if device is not None and device != budget.main:
            devices.setdefault(target.rpartition(".")[0], device)
    return {name: keys.get(device, device) for name, device in devices.items()}


@dataclass
class _Part:
    """Kind, bytes in memory, and stored tensors of a unit while it is collected."""

    kind: Kind
    nbytes: int = 0
    stored: list[TensorInfo] = field(default_factory=list)
    experts: dict[str, list[TensorInfo]] = field(default_factory=dict)

    def routed_nbytes(self, count: int) -> int:
        """Returns the bytes of the places of this number of experts, on any device."""
        sizes = [
            max(layout_nbytes(infos, is_on_host, EXPERT_GAP_NBYTES) for is_on_host in (True, False))
            for infos in self.experts.values()
        ]
        return min(count, len(sizes)) * max(sizes, default=0)


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
    ties, counted_at = model.all_tied_weights_keys, places_of_tied(model)
    for path, module, around in _walk(model):
        if isinstance(module, QuantizedModule):
            part = parts.setdefault(*_unit(around, path, "other"))
            part.nbytes += flat_layout(module.infos)[1]
            part.stored += module.infos.values()
            if part.kind == "experts":
                part.experts.setdefault(path.rpartition(".")[0], []).extend(module.infos.values())
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
    routed = routed_experts(model)
    return [
        Unit(name, part.nbytes, part.kind, lay_out(part.stored).nbytes, part.routed_nbytes(routed))
        for name, part in parts.items()
    ]


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


def places_of_tied(model: PreTrainedModel) -> dict[str, str]:
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
