"""Placements under memory limits: devices, offload buffers, and onloaded bytes.

Pure data: no function here reads weights.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hfq.errors import PlacementError

__all__ = ["READ_AHEAD_NBYTES", "Budget", "Unit", "plan_devices", "buffer_nbytes"]

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
    """

    name: str
    nbytes: int
    kind: Kind
    buffer_nbytes: int | None = None

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
        main: Execution device.
        capacities: Bytes that each device may hold; a device without an entry has no limit.
        stored_nbytes: Bytes of weights stored on each device.
        buffers: Bytes of the offload buffer on each device that has one.
        expert_cache_nbytes: Bytes reserved on the execution device for routed experts.
        onloaded_nbytes: Bytes that one forward pass onloads.
        on_demand_nbytes: Bytes of all offloaded experts, the most that one forward pass onloads of them.
    """

    devices: Mapping[str, str]
    main: str
    capacities: Mapping[str, int]
    stored_nbytes: Mapping[str, int]
    buffers: Mapping[str, int]
    expert_cache_nbytes: int
    onloaded_nbytes: int
    on_demand_nbytes: int

    def taken(self, device: str) -> int:
        """Returns the bytes that a device holds, including its offload buffer and its expert cache."""
        cache = self.expert_cache_nbytes if device == self.main else 0
        return self.stored_nbytes.get(device, 0) + self.buffers.get(device, 0) + cache

    def headroom(self) -> dict[str, int]:
        """Returns the unused bytes of each device that has a limit."""
        return {device: capacity - self.taken(device) for device, capacity in self.capacities.items()}

    def read_ahead_nbytes(self) -> int:
        """Returns the bytes that may be prefetched beyond the planned buffers, within all limits."""
        left = self.headroom()
        return max(0, min((READ_AHEAD_NBYTES, *(left[device] for device in self.buffers if device in left))))

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
            cache = f", cache of {self.expert_cache_nbytes:,} B" if self.expert_cache_nbytes else ""
            parts.append(f"up to {self.on_demand_nbytes:,} B of routed experts{cache}")
        return "; ".join(parts)


def plan_devices(
    units: Sequence[Unit], capacities: Mapping[str, int], main: str, expert_cache_nbytes: int = 0
) -> Budget:
    """Assigns a device to every unit, so that one forward pass onloads as little as possible.

    No device holds more than its limit. The execution device is filled first: modules outside decoder layers
    (smallest first), then decoder layers in model order, then experts, then embeddings. The rest goes to the
    CPU in the same order, and then to disk. More memory never increases the bytes onloaded.

    Args:
        units: Units of the model, in the order in which they compute.
        capacities: Bytes that each device may hold. A missing `"disk"` has no limit; any other missing device
            holds nothing.
        main: Execution device: `"cpu"`, or the accelerator.
        expert_cache_nbytes: Bytes of the cache for routed experts on the execution device, used if experts
            are offloaded.

    Raises:
        PlacementError: Not even the smallest placement fits; `fix` names limits that do.
    """
    planned = _plan(units, capacities, main, expert_cache_nbytes)
    if isinstance(planned, Budget):
        return planned
    everything = {main: sum(unit.nbytes for unit in units)}
    ways: list[Mapping[str, int]] = [{**capacities, **planned.way}, {**capacities, **everything}]
    ways.append({device: limit for device, limit in capacities.items() if device != "disk"})
    helping = [way for way in ways if isinstance(_plan(units, way, main, expert_cache_nbytes), Budget)]
    distinct = list(dict.fromkeys(map(_as_max_memory, helping)))
    raise PlacementError(
        f"max_memory is too small on {planned.device} for this model, even with full offloading. "
        f"Nothing was loaded.",
        expected=f"at least {planned.needed:,} B on {planned.device} ({planned.what})",
        found=f"{capacities.get(planned.device, 0):,} B",
        fix=f"Pass {', or '.join(distinct)}, if the machine has that much memory.",
    )


@dataclass(frozen=True)
class _Shortage:
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


def _plan(units: Sequence[Unit], capacities: Mapping[str, int], main: str, cache: int) -> Budget | _Shortage:
    total, limit = sum(unit.nbytes for unit in units), capacities.get(main, 0)
    offloaded: Sequence[Unit] = ()
    if total > limit:
        reserved = cache if any(unit.kind == "experts" for unit in units) else 0
        leaving = _leaving(units, limit - reserved, _buffer)
        if isinstance(leaving, int):
            needed = min(leaving + reserved, total)
            return _Shortage(
                main, needed, "weights that cannot be offloaded, and the offload buffer", {main: needed}
            )
        offloaded = leaving
    stored, buffer = offloaded, _buffer(offloaded)
    if main != "cpu" and "cpu" in capacities:
        leaving = _leaving(offloaded, capacities["cpu"], lambda streamed: buffer if streamed else 0)
        if isinstance(leaving, int):
            return _Shortage(
                "cpu", leaving, "the offload buffer between disk and accelerator", {"cpu": leaving}
            )
        stored = leaving
    on_disk = sum(unit.nbytes for unit in stored)
    if on_disk > capacities.get("disk", math.inf):
        stored_on_host = {"cpu": sum(unit.nbytes for unit in offloaded)} if main != "cpu" else {main: total}
        return _Shortage("disk", on_disk, "weights that fit on no other device", stored_on_host)
    buffers = {main: buffer} if buffer else {}
    if main != "cpu" and any(unit.is_offloaded for unit in stored):
        buffers["cpu"] = buffer
    return _account(units, capacities, main, offloaded, stored, buffers, cache)


def _leaving(
    units: Sequence[Unit], capacity: int, buffer_of: Callable[[Sequence[Unit]], int]
) -> list[Unit] | int:
    """Returns the units that do not fit next to their offload buffer, or the least capacity.

    The units that stay are the longest prefix of the order of preference that fits. A fixed order, without
    filling gaps with smaller units, ensures that more capacity never onloads more bytes.
    """
    fixed = sum(unit.nbytes for unit in units if unit.kind == "fixed")

    def need(kept: int) -> int:
        gone = {unit.name for unit in order[kept:]}
        return (
            fixed
            + sum(unit.nbytes for unit in order[:kept])
            + buffer_of([unit for unit in units if unit.name in gone])
        )

    leaves = sorted((unit for unit in units if unit.kind == "other"), key=lambda unit: unit.nbytes)
    order = [*leaves, *(unit for unit in units if unit.kind == "block")]
    needs = []
    for kept in range(len(order), -1, -1):
        needs.append(need(kept))
        if needs[-1] <= capacity:
            break
    else:
        return min(needs)
    start = _start_of_idle(order[:kept])
    if any(unit.nbytes for unit in order[start:kept]):
        kept = start
    gone, room = {unit.name for unit in order[kept:]}, capacity - need(kept)
    for kind in ("experts", "embedding"):
        for unit in units:
            if unit.kind == kind and unit.nbytes <= room:
                room -= unit.nbytes
            elif unit.kind == kind:
                gone.add(unit.name)
    return [unit for unit in units if unit.name in gone]


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


def _buffer(units: Sequence[Unit]) -> int:
    """Returns the bytes of the offload buffer of these units, across consecutive forward passes."""
    return buffer_nbytes([unit.unit_onloaded_nbytes for unit in units if unit.is_offloaded])


def _account(
    units: Sequence[Unit],
    capacities: Mapping[str, int],
    main: str,
    offloaded: Sequence[Unit],
    stored: Sequence[Unit],
    buffers: Mapping[str, int],
    cache: int,
) -> Budget:
    devices = {unit.name: main for unit in units}
    devices |= {unit.name: "cpu" for unit in offloaded}
    devices |= {unit.name: "disk" for unit in stored}
    stored_nbytes: Counter[str] = Counter()
    for unit in units:
        stored_nbytes[devices[unit.name]] += unit.nbytes
    experts = sum(unit.nbytes for unit in offloaded if unit.kind == "experts")
    moved = sum(unit.unit_onloaded_nbytes for unit in offloaded if unit.is_offloaded)
    return Budget(
        devices, main, dict(capacities), dict(stored_nbytes), buffers, cache if experts else 0, moved, experts
    )


def _as_max_memory(capacities: Mapping[str, int]) -> str:
    """Returns the limits as written in a call: `{0: 123, "cpu": 456}`."""
    limits = (
        f"{device.partition(':')[2] or json.dumps(device)}: {limit}" for device, limit in capacities.items()
    )
    return f"max_memory={{{', '.join(limits)}}}"
