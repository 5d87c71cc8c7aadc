"""The plan of a load: the device of every tensor, in bytes.

Pure data, computed from file headers before any weight is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from hfq.placement.budget import Unit, buffer_nbytes
from hfq.placement.device_map import covering_device
from hfq.tables import Displayed, Table

__all__ = ["ModuleDevice", "Plan", "PlanEntry"]


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One stored tensor.

    Attributes:
        name: Name in the model.
        device: Device that stores it: `cpu`, `disk`, `cuda:0`, ….
        execution_device: Device that computes with it.
        nbytes: Bytes on `device`. For an unquantized tensor in memory, after the cast to the model's dtype.
        quantized: True if the tensor belongs to a quantized module.
    """

    name: str
    device: str
    execution_device: str
    nbytes: int
    quantized: bool

    @property
    def is_moved(self) -> bool:
        """True if the tensor is onloaded for every forward pass."""
        return self.device == "disk" or self.device != self.execution_device


@dataclass(frozen=True, slots=True)
class ModuleDevice:
    """Tensors of one module on one device.

    Attributes:
        module: Name in the model; empty for the model itself.
        device: Device that stores its tensors.
        execution_device: Device that computes with them.
        nbytes: Bytes of the tensors on `device`.
        quantized_nbytes: Bytes of quantized tensors among them.
    """

    module: str
    device: str
    execution_device: str
    nbytes: int
    quantized_nbytes: int


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """The device of every tensor, and the sums over them."""

    entries: tuple[PlanEntry, ...]

    def nbytes_by_device(self) -> dict[str, int]:
        """Returns the bytes stored on each device."""
        total: Counter[str] = Counter()
        for entry in self.entries:
            total[entry.device] += entry.nbytes
        return dict(total)

    def buffers(self, units: Sequence[Unit], read_ahead_nbytes: int = 0) -> dict[str, int]:
        """Returns the least bytes of the offload buffer of each accelerator that has one.

        Args:
            units: Units of the model, in the order in which they compute.
            read_ahead_nbytes: Bytes that may be prefetched beyond the next unit.
        """
        names = {unit.name: unit.name for unit in units}
        sizes: dict[str, Counter[str]] = {}
        for entry in self.entries:
            device = entry.execution_device
            if entry.device in ("cpu", "disk") and device not in ("cpu", "disk"):
                sizes.setdefault(device, Counter())[covering_device(entry.name, names) or ""] += entry.nbytes
        found = {}
        for device, held in sizes.items():
            streamed = [unit for unit in units if unit.is_offloaded and unit.name in held]
            onloaded = [min(held[unit.name], unit.unit_onloaded_nbytes) for unit in streamed]
            found[device] = buffer_nbytes(onloaded, read_ahead_nbytes)
        return {device: nbytes for device, nbytes in found.items() if nbytes}

    def modules(self, order: Iterable[str] = ()) -> list[ModuleDevice]:
        """Returns the tensors of each module on each device.

        Args:
            order: Module names that come first, in this order; the others follow in the order of the plan.
        """
        total: dict[tuple[str, str, str], list[int]] = {}
        for entry in self.entries:
            held = total.setdefault(
                (entry.name.rpartition(".")[0], entry.device, entry.execution_device), [0, 0]
            )
            held[0] += entry.nbytes
            held[1] += entry.nbytes * entry.quantized
        places = {name: place for place, name in enumerate(order)}
        keys = sorted(total, key=lambda key: places.get(key[0], len(places)))
        return [ModuleDevice(*key, *total[key]) for key in keys]

    def onloaded_nbytes(self) -> int:
        """Returns the bytes that one forward pass of every module onloads."""
        return sum(entry.nbytes for entry in self.entries if entry.is_moved)

    def resident_nbytes(self) -> int:
        """Returns the bytes stored in memory of any device."""
        return sum(entry.nbytes for entry in self.entries if entry.device != "disk")

    def to_dict(self) -> dict:
        """Returns the plan as JSON-ready data."""
        return {
            "devices": self.nbytes_by_device(),
            "onloaded_nbytes": self.onloaded_nbytes(),
            "tensors": [asdict(entry) for entry in self.entries],
        }

    def _table(self) -> Table:
        tensors, onloaded = Counter(entry.device for entry in self.entries), Counter[str]()
        for entry in self.entries:
            onloaded[entry.device] += entry.nbytes * entry.is_moved
        rows = [
            (device, f"{tensors[device]:,}", f"{nbytes:,}", f"{onloaded[device]:,}")
            for device, nbytes in self.nbytes_by_device().items()
        ]
        header = ("device", "tensors", "bytes stored", "bytes onloaded per forward")
        return Table("hfq plan", str(self), header, rows)

    def __str__(self) -> str:
        devices = ", ".join(f"{device} {nbytes:,} B" for device, nbytes in self.nbytes_by_device().items())
        moved = self.onloaded_nbytes()
        return f"{devices}; {f'{moved:,} B onloaded per forward pass' if moved else 'nothing is offloaded'}"
