"""A model over several accelerators, none of it anywhere else: contiguous parts of its order, as evenly as
limits allow. Pure data.
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
    """A device for every unit, and what that takes.

    Attributes:
        devices: The device of each unit.
        stored_nbytes: The bytes of weights on each device.
        kv: The bytes of the KV cache on each device.
    """

    devices: Mapping[str, str]
    stored_nbytes: Mapping[str, int]
    kv: Mapping[str, int]


def assign_units(units: Sequence[Unit], capacities: Mapping[str, int], kv: int, activations: int) -> Spread:
    """Deals the units out in their order; the KV cache goes where its layers are, activations are everywhere.

    Args:
        units: The parts of the model, in the order in which they compute.
        capacities: The bytes that each accelerator may hold, in the order in which they are filled.
        kv: The bytes of the whole KV cache.
        activations: The bytes of activations, on each device.

    Raises:
        PlacementError: The accelerators are too small together.
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
            "The model does not fit these accelerators together. Nothing was loaded.",
            expected=f"at least {sum(sizes):,} B of room",
            found=f"{sum(max(room, 0) for room in rooms.values()):,} B beside activations of {activations:,} "
            f"B on each",
            fix="add an accelerator, or offload with one accelerator and --cpu",
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
