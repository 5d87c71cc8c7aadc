"""Placement over several accelerators without offloading, in contiguous parts of the model.

Parts are as even as limits allow. Pure data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hfq.errors import PlacementError
from hfq.placement.budget import Unit

__all__ = ["Spread", "assign_units"]


@dataclass(frozen=True)
class Spread:
    """A device for every unit, and the memory that this requires.

    Attributes:
        devices: Device of each unit.
        stored_nbytes: Bytes of weights on each device.
        kv: Bytes of the KV cache on each device.
    """

    devices: Mapping[str, str]
    stored_nbytes: Mapping[str, int]
    kv: Mapping[str, int]


def assign_units(units: Sequence[Unit], capacities: Mapping[str, int], kv: int, activations: int) -> Spread:
    """Assigns units to accelerators in model order.

    The KV cache is placed with its layers; every device holds activations.

    Args:
        units: Units of the model, in the order in which they compute.
        capacities: Bytes that each accelerator may hold, in the order in which they are filled.
        kv: Bytes of the whole KV cache.
        activations: Bytes of activations on each device.

    Raises:
        PlacementError: The accelerators together are too small.
    """
    blocks = sum(unit.kind == "block" for unit in units)
    share = -(-kv // max(blocks, 1))
    sizes = [unit.nbytes + share * (unit.kind == "block") for unit in units]
    rooms = {device: capacity - activations for device, capacity in capacities.items()}
    even = sum(sizes) / max(len(rooms), 1)
    for target in (even, even * 1.1, even * 1.25, even * 1.5, float("inf")):
        devices = _assign(units, sizes, {device: min(room, target) for device, room in rooms.items()})
        if devices is not None:
            break
    else:
        raise PlacementError(
            "The model does not fit on these accelerators together. Nothing was loaded.",
            expected=f"at least {sum(sizes):,} B of memory",
            found=f"{sum(max(room, 0) for room in rooms.values()):,} B after activations of {activations:,} "
            f"B on each",
            fix="Add an accelerator, or offload with one accelerator and --cpu.",
        )
    stored_nbytes: Counter[str] = Counter()
    cached: Counter[str] = Counter()
    for unit in units:
        stored_nbytes[devices[unit.name]] += unit.nbytes
        cached[devices[unit.name]] += share * (unit.kind == "block")
    return Spread(devices, dict(stored_nbytes), dict(cached))


def _assign(units: Sequence[Unit], sizes: Sequence[int], rooms: Mapping[str, float]) -> dict[str, str] | None:
    remaining = iter(rooms.items())
    device, room = next(remaining)
    devices: dict[str, str] = {}
    for unit, nbytes in zip(units, sizes, strict=True):
        while nbytes > room:
            following = next(remaining, None)
            if following is None:
                return None
            device, room = following
        room -= nbytes
        devices[unit.name] = device
    return devices
