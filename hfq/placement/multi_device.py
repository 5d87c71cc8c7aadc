"""Placement over several accelerators, with CPU memory and disk where they are too small.

Each accelerator computes one contiguous part of the model. Pure data.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hfq.placement.budget import (
    Budget,
    Shortage,
    Unit,
    find_budget,
    layer_buffer_nbytes,
    least_cache_nbytes,
    store_units,
    units_leaving,
)

__all__ = ["plan_accelerators"]

_EVEN = (1, 1.1, 1.25, 1.5, 2, 3, math.inf)
"""Sizes of the parts that are tried in turn, as multiples of an even part."""

_MOST_SHORTER = 3
"""Number of shorter parts that are tried after the longest one."""


def plan_accelerators(
    units: Sequence[Unit],
    capacities: Mapping[str, int],
    *,
    strategy: str = "auto",
    expert_cache_nbytes: int = 0,
    layer_nbytes: int = 0,
    device_nbytes: int = 0,
) -> Budget:
    """Assigns to every unit an execution device and a device that stores it.

    Accelerators that can hold the model together hold parts as even as their limits allow. `"sequential"`
    fills each before the next; `"balanced_low_0"` gives the first only what the others cannot hold.
    Accelerators that are too small offload. The one that offloads the most offloads as little as possible,
    since all of them onload side by side. The CPU stores what is offloaded, and disk the rest.

    The first layer of each part but the first stays on its accelerator, so that a device map alone says where
    each unit computes (`hfq.placement.device_map.execution_devices`). If the last accelerator is too small
    for the head, or an accelerator would have room for an offloaded layer, other orders of the parts are
    tried. If no parts are possible, the largest one computes the whole model, and the others hold nothing.

    Args:
        units: Units of the model, in the order in which they compute.
        capacities: Bytes that each device may hold, the accelerators in the order of their parts. A missing
            `"disk"` has no limit; a missing `"cpu"` holds nothing.
        strategy: An automatic device map: `"auto"`, `"balanced"`, `"balanced_low_0"`, or `"sequential"`.
        expert_cache_nbytes: Bytes of the cache for routed experts on each accelerator, used if it computes
            offloaded experts.
        layer_nbytes: Bytes that a decoder layer needs on its execution device besides its weights, such as
            its KV cache.
        device_nbytes: Bytes that each accelerator needs besides, such as activations.

    Raises:
        PlacementError: The model does not fit; `fix` names limits that do.
    """

    first = next(device for device in capacities if device not in ("cpu", "disk"))
    cache = max(expert_cache_nbytes, least_cache_nbytes(units, first))

    def plan(limits: Mapping[str, int]) -> Budget | Shortage:
        parts = _Parts(_group(units), limits, cache, layer_nbytes, device_nbytes)
        found: list[tuple[float, Budget]] = []
        shortages: list[Shortage] = []
        for candidate in parts.candidates(strategy):
            budget = parts.store(candidate)
            if isinstance(budget, Shortage):
                shortages.append(budget)
            elif not parts.has_room(candidate):
                return budget
            else:
                found.append((max(map(parts.offloaded_nbytes, candidate)), budget))
        if found:
            return min(found, key=lambda pair: pair[0])[1]
        alone = parts.alone()
        return shortages[0] if isinstance(alone, Shortage) and shortages else alone

    blocks = sum(unit.kind == "block" for unit in units)
    needed = sum(unit.nbytes for unit in units) + layer_nbytes * blocks + device_nbytes
    return find_budget(capacities, plan, {first: needed})


def _group(units: Sequence[Unit]) -> list[list[Unit]]:
    """Returns the units in groups, such as a decoder layer and its experts, in order."""
    groups: list[list[Unit]] = []
    for unit in units:
        last = groups[-1][0].name if groups else ""
        if last and (unit.name.startswith(f"{last}.") or last.startswith(f"{unit.name}.")):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return groups


class _Part(NamedTuple):
    """Groups that one accelerator computes, from `start` to before `end`."""

    device: str
    start: int
    end: int


@dataclass
class _Parts:
    """Search for the part of each accelerator.

    Attributes:
        groups: Units that are not divided between accelerators, in order.
        capacities: Bytes that each device may hold.
        cache: Bytes of an expert cache.
        layer_nbytes: Bytes of each decoder layer besides its weights.
        device_nbytes: Bytes of each accelerator besides its layers.
    """

    groups: Sequence[Sequence[Unit]]
    capacities: Mapping[str, int]
    cache: int
    layer_nbytes: int
    device_nbytes: int
    _leaving: dict[_Part, list[Unit] | int] = field(default_factory=dict)

    @property
    def accelerators(self) -> list[str]:
        usable = (device for device, limit in self.capacities.items() if limit > 0)
        return [device for device in usable if device not in ("cpu", "disk")]

    def units(self, part: _Part) -> list[Unit]:
        return [unit for group in self.groups[part.start : part.end] for unit in group]

    def extra(self, part: _Part) -> int:
        """Returns the bytes that a part needs besides weights."""
        blocks = sum(unit.kind == "block" for unit in self.units(part))
        return self.device_nbytes + self.layer_nbytes * blocks

    def leaving(self, part: _Part) -> list[Unit] | int:
        """Returns the units that the accelerator of a part cannot keep, or the least limit for it."""
        if part not in self._leaving:
            extra = self.extra(part)
            found = units_leaving(self.units(part), self.capacities[part.device] - extra, self.cache)
            self._leaving[part] = found + extra if isinstance(found, int) else found
        return self._leaving[part]

    def offloaded_nbytes(self, part: _Part) -> float:
        """Returns the bytes that are offloaded, infinite if the part is not possible."""
        leaving = self.leaving(part)
        if isinstance(leaving, int):
            return math.inf
        first = next((unit for unit in self.units(part) if unit.is_offloaded), None)
        if part.start and first is not None and first in leaving:
            return math.inf
        return sum(unit.nbytes for unit in leaving if unit.kind != "embedding")

    def candidates(self, strategy: str) -> Iterator[list[_Part]]:
        """Yields possible parts: nothing offloaded, little on each accelerator, or all on one.

        The CPU may be too small for the offload buffers of several.
        """
        orders = self._orders()
        yield from filter(None, (self.resident(strategy, devices) for devices in orders))
        yield from filter(None, map(self.offloaded, orders))
        total = sum(map(self._group_nbytes, self.groups))
        for devices in orders:
            for offloading in devices:
                limits = [total if device == offloading else 0 for device in devices]
                yield from filter(None, [self._divide(devices, limits, self.offloaded_nbytes)])

    def _orders(self) -> list[list[str]]:
        """Returns the orders of the accelerators that are tried, the given one first.

        They are all orders of three accelerators, and those of more with another one as the last.
        """
        given = self.accelerators
        if len(given) <= 3:
            return [list(order) for order in itertools.permutations(given)]
        return [
            given,
            *([*given[:index], *given[index + 1 :], given[index]] for index in range(len(given) - 1)),
        ]

    def has_room(self, parts: Sequence[_Part]) -> bool:
        """Returns True if an accelerator has room for a unit that another one offloads."""
        taken = {part.device: self._taken_nbytes(part) for part in parts}
        for device in self.accelerators:
            room = self.capacities[device] - taken.get(device, self.device_nbytes)
            for other in parts:
                if other.device != device and any(
                    unit.is_offloaded and unit.nbytes + self.layer_nbytes * (unit.kind == "block") <= room
                    for unit in self.leaving(other)  # type: ignore[union-attr]
                ):
                    return True
        return False

    def _taken_nbytes(self, part: _Part) -> int:
        """Returns the bytes of a part on its accelerator, with its buffer and expert cache."""
        leaving: list[Unit] = self.leaving(part)  # type: ignore[assignment]
        kept = sum(unit.nbytes for unit in self.units(part)) - sum(unit.nbytes for unit in leaving)
        cache = self.cache if any(unit.kind == "experts" for unit in leaving) else 0
        return self.extra(part) + kept + layer_buffer_nbytes(leaving) + cache

    def resident(self, strategy: str, devices: Sequence[str]) -> list[_Part] | None:
        """Returns parts, in this order, of which nothing is offloaded; None if there are none."""
        multiples = (math.inf,) if strategy == "sequential" else _EVEN
        total = sum(map(self._group_nbytes, self.groups))
        first = self.accelerators[:1] if strategy == "balanced_low_0" else []
        for names in [[name for name in devices if name not in first], devices] if first else [devices]:
            for multiple in multiples:
                limits = [min(total, total / max(len(names), 1) * multiple)] * len(names)
                found = self._divide(names, limits, self._held_nbytes)
                if found is not None:
                    return found
        return None

    def _group_nbytes(self, group: Sequence[Unit]) -> int:
        return sum(unit.nbytes for unit in group) + self.layer_nbytes * _blocks(group)

    def _held_nbytes(self, part: _Part) -> float:
        nbytes = sum(unit.nbytes for unit in self.units(part)) + self.extra(part)
        return nbytes - self.device_nbytes if nbytes <= self.capacities[part.device] else math.inf

    def offloaded(self, devices: Sequence[str]) -> list[_Part] | None:
        """Returns the parts, in this order, that offload the least; None if there are none."""

        def divide(limits: Sequence[float]) -> list[_Part] | None:
            return self._divide(devices, limits, self.offloaded_nbytes)

        sizes = [sum(unit.nbytes for unit in group) for group in self.groups]
        layers = [size for group, size in zip(self.groups, sizes, strict=True) if _blocks(group)]
        step = max(1, min(layers, default=1) // 2)
        most = _least(sum(sizes), step, lambda limit: divide([limit] * len(devices)) is not None)
        limits = [most] * len(devices)
        found = divide(limits)
        if found is None:
            return None

        def is_enough(index: int, limit: float) -> bool:
            parts = divide([*limits[:index], limit, *limits[index + 1 :]])
            return parts is not None and len(parts) <= len(found)

        for index, device in enumerate(devices):  # the first ones may need less than the most
            limit = _least(most, step, functools.partial(is_enough, index))
            while limit >= 0 and is_enough(index, limit):  # a norm is less than a step
                limits[index] = limit
                parts = divide(limits) or found
                limit = sum(self.offloaded_nbytes(part) for part in parts if part.device == device) - 1
        return divide(limits)

    def _divide(
        self, devices: Sequence[str], limits: Sequence[float], cost: Callable[[_Part], float]
    ) -> list[_Part] | None:
        """Returns possible parts, each of at most this cost; None if groups are left.

        Each part is the longest one, or one of the next shorter ones after which another accelerator can
        begin: none can keep a large head as its first unit.
        """

        def fits(place: int, start: int, end: int) -> bool:
            return cost(_Part(devices[place], start, end)) <= limits[place]

        @functools.cache
        def divide(place: int, start: int) -> list[_Part] | None:
            if start == len(self.groups):
                return []
            if place == len(devices):
                return None
            longest, most = start, len(self.groups)
            while longest < most:
                end = (longest + most + 1) // 2
                longest, most = (end, most) if fits(place, start, end) else (longest, end - 1)
            others = range(place + 1, len(devices))
            ends = (
                end for end in range(longest - 1, start, -1) if any(fits(i, end, end + 1) for i in others)
            )
            for end in (longest, *itertools.islice(ends, _MOST_SHORTER)):
                rest = divide(place + 1, end)
                if rest is not None:
                    return [_Part(devices[place], start, end), *rest] if end > start else rest
            return None

        return divide(0, 0)

    def alone(self) -> Budget | Shortage:
        """Returns the budget of the largest accelerator alone, or why there is none."""
        accelerators = (name for name in self.capacities if name not in ("cpu", "disk"))
        device = max(accelerators, key=lambda name: self.capacities[name])
        part = _Part(device, 0, len(self.groups))
        leaving = self.leaving(part)
        if isinstance(leaving, int):
            what = "weights that cannot be offloaded, the offload buffer, and the expert cache"
            return Shortage(device, leaving, what, {device: leaving})
        return self.store([part])

    def store(self, parts: Sequence[_Part]) -> Budget | Shortage:
        """Returns the budget of these parts, or the device that is too small for it."""
        executes = {unit.name: part.device for part in parts for unit in self.units(part)}
        offloaded = [unit for part in parts for unit in self.leaving(part)]  # type: ignore[union-attr]
        units = [unit for group in self.groups for unit in group]
        return store_units(units, self.capacities, executes, offloaded, self.cache)


def _blocks(group: Sequence[Unit]) -> int:
    return sum(unit.kind == "block" for unit in group)


def _least(most: float, step: int, holds: Callable[[float], bool]) -> float:
    """Returns a limit that holds, at most `step` above the least one, or `most`."""
    least = -1.0
    while most - least > step:
        middle = (least + most) // 2
        if holds(middle):
            most = middle
        else:
            least = middle
    return most
