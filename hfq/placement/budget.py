"""Homes under byte budgets: what stays where it computes, what is streamed to it, and the ring that this
needs. Pure data.
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
"""What streaming reads ahead beyond the next block, where there is room for it."""

Kind = Literal["block", "embedding", "experts", "other", "fixed"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a model that has one home.

    Attributes:
        name: Its key in a device map.
        nbytes: Its bytes in memory.
        kind: How it reaches its device from another home. A `block` is streamed whole, without its experts,
            and so are the leaves outside of blocks (`other`, as a head or a norm); `experts` are fetched when
            they are routed to; of an `embedding` a few rows are read; what is `fixed` cannot leave the device
            that computes.
        buffer_nbytes: Its bytes while it is streamed, where they differ: whole pages, in the dtype it is
            stored in.
    """

    name: str
    nbytes: int
    kind: Kind
    buffer_nbytes: int | None = None

    @property
    def unit_onloaded_nbytes(self) -> int:
        """What it takes in the ring, and what each forward moves."""
        return self.nbytes if self.buffer_nbytes is None else self.buffer_nbytes

    @property
    def is_offloaded(self) -> bool:
        """Whether it is brought whole to its device for each forward, when it rests elsewhere."""
        return self.kind in ("block", "other")


@dataclass(frozen=True)
class Budget:
    """A home for every unit, and what that takes.

    Attributes:
        devices: The home of each unit.
        main: The device that computes.
        capacities: The bytes that each home may hold; a home that is not there has no limit.
        stored_nbytes: The bytes that rest in each home.
        buffers: The bytes of the ring on each device that has one.
        expert_cache_nbytes: The bytes kept free on the main device for routed experts.
        onloaded_nbytes: The bytes that one forward streams to the main device.
        on_demand_nbytes: The bytes of the experts that rest elsewhere: the most that one forward fetches of
            them.
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
        """The bytes that a home holds, its ring and its cache of experts included."""
        cache = self.expert_cache_nbytes if device == self.main else 0
        return self.stored_nbytes.get(device, 0) + self.buffers.get(device, 0) + cache

    def headroom(self) -> dict[str, int]:
        """The bytes that are left in each home that has a limit."""
        return {device: capacity - self.taken(device) for device, capacity in self.capacities.items()}

    def read_ahead_nbytes(self) -> int:
        """What may be read ahead beyond the rings that are counted: nothing that a limit forbids."""
        left = self.headroom()
        return max(0, min((READ_AHEAD_NBYTES, *(left[device] for device in self.buffers if device in left))))

    def __str__(self) -> str:
        left = self.headroom()
        parts = []
        for device in dict.fromkeys((self.main, *self.stored_nbytes, *self.buffers)):
            buffer = f" and a ring of {self.buffers[device]:,} B" if device in self.buffers else ""
            room = f", {left[device]:,} B left" if device in left else ""
            parts.append(f"{device}: {self.stored_nbytes.get(device, 0):,} B resting{buffer}{room}")
        parts.append(
            f"{self.onloaded_nbytes:,} B streamed a forward"
            if self.onloaded_nbytes
            else "nothing is streamed"
        )
        if self.on_demand_nbytes:
            cache = f", cache of {self.expert_cache_nbytes:,} B" if self.expert_cache_nbytes else ""
            parts.append(f"up to {self.on_demand_nbytes:,} B of experts when they are routed to{cache}")
        return "; ".join(parts)


def plan_devices(
    units: Sequence[Unit], capacities: Mapping[str, int], main: str, expert_cache_nbytes: int = 0
) -> Budget:
    """Gives every unit a home, so that no home holds more than it may and one forward streams as little as
    possible.

    What fits on the main device stays there: leaves outside of blocks, smallest first, then blocks in the
    order of the model, then experts, then embeddings. The rest goes to the CPU in the same order, and then to
    disk. More memory never moves more bytes.

    Args:
        units: The parts of the model, in the order in which they compute.
        capacities: The bytes that each home may hold. A missing `"disk"` has no limit, what else is missing
            holds nothing.
        main: The device that computes: `"cpu"`, or the accelerator.
        expert_cache_nbytes: What the cache of routed experts takes on the main device, where experts rest
            elsewhere.

    Raises:
        PlacementError: Not even the smallest choice fits; `fix` names limits that do.
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
        f"max_memory is too small on {planned.device} for this model, even if all is streamed that can be. "
        f"Nothing was loaded.",
        expected=f"at least {planned.needed:,} B on {planned.device} ({planned.what})",
        found=f"{capacities.get(planned.device, 0):,} B",
        fix=f"pass {', or '.join(distinct)}, if the machine has that much",
    )


@dataclass(frozen=True)
class _Shortage:
    """Why a plan fails: the least that a home would have to hold, of what, and a change of capacities that
    may help.
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
            return _Shortage(main, needed, "what stays there, and the ring", {main: needed})
        offloaded = leaving
    stored, buffer = offloaded, _buffer(offloaded)
    if main != "cpu" and "cpu" in capacities:
        leaving = _leaving(offloaded, capacities["cpu"], lambda streamed: buffer if streamed else 0)
        if isinstance(leaving, int):
            return _Shortage("cpu", leaving, "the ring between disk and accelerator", {"cpu": leaving})
        stored = leaving
    on_disk = sum(unit.nbytes for unit in stored)
    if on_disk > capacities.get("disk", math.inf):
        stored_on_host = {"cpu": sum(unit.nbytes for unit in offloaded)} if main != "cpu" else {main: total}
        return _Shortage("disk", on_disk, "what fits nowhere else", stored_on_host)
    buffers = {main: buffer} if buffer else {}
    if main != "cpu" and any(unit.is_offloaded for unit in stored):
        buffers["cpu"] = buffer
    return _account(units, capacities, main, offloaded, stored, buffers, cache)


def _leaving(
    units: Sequence[Unit], capacity: int, buffer_of: Callable[[Sequence[Unit]], int]
) -> list[Unit] | int:
    """The units that do not fit beside the ring that they need, in the order given; or the least capacity
    that would do.

    What stays is the longest start of the order of preference that fits. Fixing the order, and not filling
    gaps with smaller blocks, is what makes more capacity never move more bytes.
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
    """Where the last units begin of which nothing is moved: to keep them spares nothing, and takes room from
    what would be moved.
    """
    start = len(units)
    while start and not units[start - 1].unit_onloaded_nbytes:
        start -= 1
    return start


def buffer_nbytes(sizes: Sequence[int], read_ahead_nbytes: int = 0) -> int:
    """The bytes in which any block of a cyclic order rests beside the next: the largest sum of two
    neighbours, and read-ahead.

    Between two blocks there is nothing to read; where blocks are small, that time counts, and reading more
    than one of them ahead fills it. Read-ahead never makes the ring hold more than half of a pass: what stays
    is for a placement to say.

    Args:
        sizes: The blocks in their order.
        read_ahead_nbytes: How much more may be read ahead.
    """
    if len(sizes) < 3:
        return sum(sizes)
    least = max(size + sizes[index - 1] for index, size in enumerate(sizes))
    return max(least, min(least + read_ahead_nbytes, sum(sizes) // 2))


def _buffer(units: Sequence[Unit]) -> int:
    """The ring of these units, over the end of a forward into the next one."""
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
    """As it is written in a call: {0: 123, "cpu": 456}."""
    limits = (
        f"{device.partition(':')[2] or json.dumps(device)}: {limit}" for device, limit in capacities.items()
    )
    return f"max_memory={{{', '.join(limits)}}}"
