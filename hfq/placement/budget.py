"""Placements under memory limits: devices, offload buffers, and onloaded bytes.

Pure data: no function here reads weights.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hfq.errors import PlacementError

__all__ = [
    "READ_AHEAD_NBYTES",
    "Budget",
    "Shortage",
    "Unit",
    "buffer_nbytes",
    "default_cache_nbytes",
    "find_budget",
    "layer_buffer_nbytes",
    "layers_onloaded",
    "least_cache_nbytes",
    "plan_devices",
    "store_units",
    "units_leaving",
]

READ_AHEAD_NBYTES = 192 << 20
"""Bytes that may be prefetched beyond the next unit, where memory allows."""

Kind = Literal["block", "embedding", "experts", "other", "fixed"]


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that are placed together on one device.

    Attributes:
        name: Key of the unit in a device map.
        nbytes: Bytes in memory.
        kind: How the unit is onloaded. A `block` (a decoder layer without its experts) and `other` (a module
            outside decoder layers, such as a head or a norm) are onloaded whole. `experts` are onloaded when
            a token is routed to them. Of an `embedding`, only the rows of the tokens are read. A `fixed` unit
            cannot leave the execution device.
        buffer_nbytes: Bytes in the offload buffer, in whole pages and in the stored dtype; None if equal to
            `nbytes`.
        routed_nbytes: Of `experts`: bytes of those that a token is routed to, which are onloaded together.
    """

    name: str
    nbytes: int
    kind: Kind
    buffer_nbytes: int | None = None
    routed_nbytes: int = 0

    @property
    def unit_onloaded_nbytes(self) -> int:
        """Bytes in the offload buffer, which one forward pass copies."""
        return self.nbytes if self.buffer_nbytes is None else self.buffer_nbytes

    @property
    def is_offloaded(self) -> bool:
        """True if the unit is onloaded whole for each forward pass when it is offloaded."""
        return self.kind in ("block", "other")


@dataclass(frozen=True)
class Budget:
    """A device for every unit, and the memory that this requires.

    Attributes:
        devices: Device of each unit.
        executes: Execution device of each unit.
        main: The first execution device.
        capacities: Bytes that each device may hold; a device without an entry has no limit.
        stored_nbytes: Bytes of weights stored on each device.
        buffers: Bytes of the offload buffer on each device that has one.
        expert_caches: Bytes for routed experts on each execution device that computes offloaded ones.
        onloaded_nbytes: Bytes that one forward pass onloads.
        on_demand_nbytes: Bytes of all offloaded experts, the most that one forward pass onloads of them.
    """

    devices: Mapping[str, str]
    executes: Mapping[str, str]
    main: str
    capacities: Mapping[str, int]
    stored_nbytes: Mapping[str, int]
    buffers: Mapping[str, int]
    expert_caches: Mapping[str, int]
    onloaded_nbytes: int
    on_demand_nbytes: int

    def taken(self, device: str) -> int:
        """Returns the bytes that a device holds, including its offload buffer and its expert cache."""
        parts = (self.stored_nbytes, self.buffers, self.expert_caches)
        return sum(part.get(device, 0) for part in parts)

    def headroom(self) -> dict[str, int]:
        """Returns the unused bytes of each device that has a limit."""
        return {device: capacity - self.taken(device) for device, capacity in self.capacities.items()}

    def read_ahead_nbytes(self) -> int:
        """Returns the bytes that may be prefetched beyond the planned buffers, within all limits."""
        left = self.headroom()
        return max(0, min((READ_AHEAD_NBYTES, *(left[device] for device in self.buffers if device in left))))

    def with_default_caches(
        self, units: Sequence[Unit], context_nbytes: int = 0, host_nbytes: int = 0
    ) -> Budget:
        """Returns the same budget with expert caches of the default size.

        They are on the devices that compute offloaded experts, and take nothing from read-ahead. On the CPU
        they also take the memory of the experts that stay, since a cache keeps those that are used.

        Args:
            units: Units of the model.
            context_nbytes: Bytes of each accelerator for the KV cache and the activations.
            host_nbytes: Bytes of the host that its cache leaves.
        """
        budget = self._without_experts(units)
        experts: Counter[str] = Counter()
        for unit in units:
            device = budget.executes.get(unit.name, budget.main)
            if unit.kind == "experts" and budget.devices[unit.name] != device:
                experts[device] += unit.nbytes
        read_ahead = self.read_ahead_nbytes() if self.buffers else 0
        left = replace(budget, expert_caches={}).headroom()
        caches = {
            device: default_cache_nbytes(
                left.get(device, 0) - read_ahead,
                nbytes,
                host_nbytes if device == "cpu" else context_nbytes,
                least_cache_nbytes(units, device),
            )
            for device, nbytes in experts.items()
        }
        return replace(budget, expert_caches=caches)

    def _without_experts(self, units: Sequence[Unit]) -> Budget:
        """Returns the same budget with all experts on disk, if the CPU cannot keep all of them."""
        gone = [unit for unit in units if unit.kind == "experts" and self.devices[unit.name] == "cpu"]
        nbytes = sum(unit.nbytes for unit in gone)
        room = self.headroom().get("disk", math.inf)
        if self.main != "cpu" or not self.on_demand_nbytes or nbytes > room:
            return self
        stored = Counter(self.stored_nbytes)
        stored.update({"cpu": -nbytes, "disk": nbytes})
        return replace(
            self,
            devices={**self.devices, **{unit.name: "disk" for unit in gone}},
            stored_nbytes=dict(stored),
            on_demand_nbytes=self.on_demand_nbytes + nbytes,
        )

    def __str__(self) -> str:
        left = self.headroom()
        parts = []
        for device in dict.fromkeys((self.main, *self.stored_nbytes, *self.buffers)):
            buffer = f" and an offload buffer of {self.buffers[device]:,} B" if device in self.buffers else ""
            room = f", {left[device]:,} B left" if device in left else ""
            parts.append(f"{device}: {self.stored_nbytes.get(device, 0):,} B of weights{buffer}{room}")
        parts.append(
            f"{self.onloaded_nbytes:,} B onloaded per forward pass"
            if self.onloaded_nbytes
            else "nothing onloaded per forward pass"
        )
        if self.on_demand_nbytes:
            caches = [f"cache of {nbytes:,} B on {device}" for device, nbytes in self.expert_caches.items()]
            parts.append(", ".join([f"up to {self.on_demand_nbytes:,} B of routed experts", *caches]))
        return "; ".join(parts)


def plan_devices(
    units: Sequence[Unit], capacities: Mapping[str, int], main: str, expert_cache_nbytes: int = 0
) -> Budget:
    """Assigns a device to every unit, so that one forward pass onloads as little as possible.

    No device holds more than its limit. The execution device is filled first: modules outside decoder layers
    (smallest first), then decoder layers, then experts, then embeddings. An accelerator keeps layers that are
    spread evenly over the model; the CPU keeps the first ones. The rest goes to the CPU in the same order,
    and then to disk. A unit that does not fit is passed over. If layers are equal, more memory never
    increases the bytes onloaded.

    Args:
        units: Units of the model, in the order in which they compute.
        capacities: Bytes that each device may hold. A missing `"disk"` has no limit; any other missing device
            holds nothing.
        main: Execution device: `"cpu"`, or the accelerator.
        expert_cache_nbytes: Bytes of the cache for routed experts on the execution device, used if experts
            are offloaded. It is at least `least_cache_nbytes`.

    Raises:
        PlacementError: Not even the smallest placement fits; `fix` names limits that do.
    """
    everything = {main: sum(unit.nbytes for unit in units)}
    cache = max(expert_cache_nbytes, least_cache_nbytes(units, main))
    return find_budget(capacities, lambda limits: _plan(units, limits, main, cache), everything)


def layers_onloaded(device: str) -> int:
    """Returns the number of layers whose routed experts have memory at the same time.

    While the experts of a layer compute on the CPU, those of the next one are read ahead. Where an
    accelerator computes, no expert is read ahead of its router.

    Args:
        device: The execution device, or its type.
    """
    return 2 if device == "cpu" else 1


def least_cache_nbytes(units: Iterable[Unit], device: str) -> int:
    """Returns the least bytes of the expert cache of an execution device.

    They hold the experts that a token is routed to in the largest layer, for each of `layers_onloaded`.
    """
    return layers_onloaded(device) * max((unit.routed_nbytes for unit in units), default=0)


def default_cache_nbytes(left: int, experts_nbytes: int, context_nbytes: int, least_nbytes: int) -> int:
    """Returns the bytes of the expert cache of a device, if the user gives none.

    Args:
        left: Bytes of the device besides weights, offload buffer, and read-ahead.
        experts_nbytes: Bytes of the offloaded experts that it computes.
        context_nbytes: Bytes of its KV cache and activations.
        least_nbytes: The least bytes of the cache.
    """
    return max(least_nbytes, min(left - context_nbytes, experts_nbytes))


@dataclass(frozen=True)
class Shortage:
    """Reason why a plan fails.

    Attributes:
        device: Device that is too small.
        needed: Least bytes that it would have to hold.
        what: Contents that need these bytes.
        way: Change of capacities that may help.
    """

    device: str
    needed: int
    what: str
    way: Mapping[str, int]


def find_budget(
    capacities: Mapping[str, int],
    plan: Callable[[Mapping[str, int]], Budget | Shortage],
    everything: Mapping[str, int],
) -> Budget:
    """Returns the budget that `plan` finds within these limits.

    Args:
        capacities: Bytes that each device may hold.
        plan: Returns a budget, or the reason why there is none.
        everything: Limits under which no weights are offloaded.

    Raises:
        PlacementError: There is none; `fix` names limits for which there is one.
    """
    planned = plan(capacities)
    if isinstance(planned, Budget):
        return planned
    ways: list[Mapping[str, int]] = [{**capacities, **planned.way}, {**capacities, **everything}]
    ways.append({device: limit for device, limit in capacities.items() if device != "disk"})
    helping = [way for way in ways if isinstance(plan(way), Budget)]
    distinct = list(dict.fromkeys(map(_as_max_memory, helping)))
    raise PlacementError(
        f"max_memory is too small on {planned.device} for this model, even with full offloading. "
        f"Nothing was loaded.",
        expected=f"at least {planned.needed:,} B on {planned.device} ({planned.what})",
        found=f"{capacities.get(planned.device, 0):,} B",
        fix=f"Pass {', or '.join(distinct)}, if the machine has that much memory.",
    )


def _plan(units: Sequence[Unit], capacities: Mapping[str, int], main: str, cache: int) -> Budget | Shortage:
    leaving = units_leaving(units, capacities.get(main, 0), cache, is_spread=main != "cpu")
    if isinstance(leaving, int):
        what = "weights that cannot be offloaded, the offload buffer, and the expert cache"
        return Shortage(main, leaving, what, {main: leaving})
    return store_units(units, capacities, {unit.name: main for unit in units}, leaving, cache)


def units_leaving(units: Sequence[Unit], limit: int, cache: int, is_spread: bool = True) -> list[Unit] | int:
    """Returns the units that an execution device cannot keep, or the least limit for it.

    Args:
        units: Units that it computes, in order.
        limit: Bytes that it may hold.
        cache: Bytes of its expert cache, used if experts are offloaded.
        is_spread: True to spread the offloaded layers evenly between those that stay, so that an accelerator
            copies one while it computes several. False to keep the first layers.
    """
    total = sum(unit.nbytes for unit in units)
    if total <= limit:
        return []
    reserved = cache if any(unit.kind == "experts" for unit in units) else 0
    leaving = _leaving(units, limit - reserved, layer_buffer_nbytes, is_spread)
    return min(leaving + reserved, total) if isinstance(leaving, int) else leaving


def store_units(
    units: Sequence[Unit],
    capacities: Mapping[str, int],
    executes: Mapping[str, str],
    offloaded: Sequence[Unit],
    cache: int,
) -> Budget | Shortage:
    """Stores offloaded units on the CPU, and what does not fit there on disk.

    Args:
        units: Units of the model, in the order in which they compute.
        capacities: Bytes that each device may hold.
        executes: Execution device of each unit.
        offloaded: Units that their execution devices do not keep.
        cache: Bytes of the expert cache of each execution device that computes offloaded experts.
    """
    parts = {
        device: [unit for unit in offloaded if executes[unit.name] == device]
        for device in {*executes.values()}
    }
    order = dict.fromkeys(executes.values())
    buffers = {device: nbytes for device in order if (nbytes := layer_buffer_nbytes(parts[device]))}
    main = next(iter(order), "cpu")
    stored, through = offloaded, sum(buffers.values())
    if main != "cpu" and "cpu" in capacities:
        leaving = _leaving(offloaded, capacities["cpu"], lambda streamed: through if streamed else 0)
        if isinstance(leaving, int):
            return Shortage(
                "cpu", leaving, "the offload buffer between disk and accelerator", {"cpu": leaving}
            )
        stored = leaving
    on_disk = sum(unit.nbytes for unit in stored)
    if on_disk > capacities.get("disk", math.inf):
        host = "cpu" if main != "cpu" else main
        held = offloaded if main != "cpu" else units
        way = {host: sum(unit.nbytes for unit in held)}
        return Shortage("disk", on_disk, "weights that fit on no other device", way)
    if main != "cpu" and any(unit.is_offloaded for unit in stored):
        buffers["cpu"] = through
    caching = dict.fromkeys(executes[unit.name] for unit in offloaded if unit.kind == "experts")
    caches = dict.fromkeys(caching, cache) if cache else {}
    return _account(units, capacities, executes, main, offloaded, stored, buffers, caches)


def _leaving(
    units: Sequence[Unit],
    capacity: int,
    buffer_of: Callable[[Sequence[Unit]], int],
    is_spread: bool = False,
) -> list[Unit] | int:
    """Returns the units that do not fit next to their offload buffer, or the least capacity.

    The units that stay are the longest prefix of the order of preference that fits, and each later unit that
    fits besides: a large head that does not fit keeps no layer out.
    """
    fixed = sum(unit.nbytes for unit in units if unit.kind == "fixed")

    def need(kept: Sequence[Unit]) -> int:
        names = {unit.name for unit in kept}
        gone = [unit for unit in units if unit.is_offloaded and unit.name not in names]
        return fixed + sum(unit.nbytes for unit in kept) + buffer_of(gone)

    leaves = sorted((unit for unit in units if unit.kind == "other"), key=lambda unit: unit.nbytes)
    blocks = [unit for unit in units if unit.kind == "block"]
    order = [*leaves, *(_spread(blocks) if is_spread else blocks)]
    needs = []
    for count in range(len(order), -1, -1):
        needs.append(need(order[:count]))
        if needs[-1] <= capacity:
            break
    else:
        return min(needs)
    kept = _fill(order[:count], order[count:], lambda kept: need(kept) <= capacity)
    staying, room = {unit.name for unit in kept}, capacity - need(kept)
    for kind in ("experts", "embedding"):
        for unit in units:
            if unit.kind == kind and unit.nbytes <= room:
                room -= unit.nbytes
                staying.add(unit.name)
    return [unit for unit in units if unit.kind != "fixed" and unit.name not in staying]


def _fill(kept: Sequence[Unit], others: Sequence[Unit], fits: Callable[[Sequence[Unit]], bool]) -> list[Unit]:
    """Returns the kept units and all others that fit besides, until none does."""
    filled = [*kept]
    start = _start_of_idle(filled)
    if any(unit.nbytes for unit in filled[start:]):
        del filled[start:]
    waiting = [unit for unit in others if unit.unit_onloaded_nbytes]
    while (found := next((unit for unit in waiting if fits([*filled, unit])), None)) is not None:
        filled.append(found)
        waiting.remove(found)
    return filled


def _spread(units: Sequence[Unit]) -> list[Unit]:
    """Returns units in an order, from the first on, of which every prefix is spread evenly."""
    bits = max(len(units) - 1, 1).bit_length()
    places = sorted(range(len(units)), key=lambda place: int(f"{place:0{bits}b}"[::-1], 2))
    return [units[place] for place in places]


def _start_of_idle(units: Sequence[Unit]) -> int:
    """Returns the start of the trailing units of which nothing is onloaded.

    Keeping these saves no copies, and takes memory from units that are onloaded.
    """
    start = len(units)
    while start and not units[start - 1].unit_onloaded_nbytes:
        start -= 1
    return start


def buffer_nbytes(sizes: Sequence[int], read_ahead_nbytes: int = 0) -> int:
    """Returns the bytes that hold any two consecutive units of a cyclic order, plus read-ahead.

    No read can start between two units. Where units are small, that time counts, and reading more than one
    unit ahead fills it. Read-ahead never lets the buffer hold more than half of a pass: only the placement
    decides which units stay in memory.

    Args:
        sizes: Bytes of the units in their order.
        read_ahead_nbytes: Bytes that may be prefetched in addition.
    """
    if len(sizes) < 3:
        return sum(sizes)
    least = max(size + sizes[index - 1] for index, size in enumerate(sizes))
    return max(least, min(least + read_ahead_nbytes, sum(sizes) // 2))


def layer_buffer_nbytes(units: Sequence[Unit]) -> int:
    """Returns the bytes of the offload buffer of these units, across consecutive forward passes."""
    return buffer_nbytes([unit.unit_onloaded_nbytes for unit in units if unit.is_offloaded])


def _account(
    units: Sequence[Unit],
    capacities: Mapping[str, int],
    executes: Mapping[str, str],
    main: str,
    offloaded: Sequence[Unit],
    stored: Sequence[Unit],
    buffers: Mapping[str, int],
    caches: Mapping[str, int],
) -> Budget:
    devices = dict(executes)
    devices |= {unit.name: "cpu" for unit in offloaded}
    devices |= {unit.name: "disk" for unit in stored}
    stored_nbytes: Counter[str] = Counter()
    for unit in units:
        stored_nbytes[devices[unit.name]] += unit.nbytes
    experts = sum(unit.nbytes for unit in offloaded if unit.kind == "experts")
    moved = sum(unit.unit_onloaded_nbytes for unit in offloaded if unit.is_offloaded)
    held = dict(stored_nbytes)
    return Budget(devices, dict(executes), main, dict(capacities), held, buffers, caches, moved, experts)


def _as_max_memory(capacities: Mapping[str, int]) -> str:
    """Returns the limits as written in a call: `{0: 123, "cpu": 456}`."""
    limits = (
        f"{device.partition(':')[2] or json.dumps(device)}: {limit}" for device, limit in capacities.items()
    )
    return f"max_memory={{{', '.join(limits)}}}"
