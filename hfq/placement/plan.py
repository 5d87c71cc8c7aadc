"""The plan: which tensor rests where, in bytes. Pure data, computed from headers before any weight byte is
read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from hfq.tables import Displayed, Table

__all__ = ["ModuleDevice", "Plan", "PlanEntry"]


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One stored tensor.

    Attributes:
        name: Its name in the model.
        device: The device that it is stored on: `cpu`, `disk`, `cuda:0`, ….
        execution_device: The device that computes with it.
        nbytes: Its bytes there (a dense tensor that rests in memory: after the cast to the model's dtype).
        quantized: Whether it belongs to a packed row.
    """

    name: str
    device: str
    execution_device: str
    nbytes: int
    quantized: bool

    @property
    def is_moved(self) -> bool:
        """Whether it is brought to its device for every forward."""
        return self.device == "disk" or self.device != self.execution_device


@dataclass(frozen=True, slots=True)
class ModuleDevice:
    """What one module has in one home.

    Attributes:
        module: Its name in the model; empty for the model itself.
        device: The device that its tensors are stored on.
        execution_device: The device that computes with them.
        nbytes: Their bytes there.
        quantized_nbytes: Of these, the bytes of packed rows.
    """

    module: str
    device: str
    execution_device: str
    nbytes: int
    quantized_nbytes: int


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """Every tensor's home, and the sums over them."""

    entries: tuple[PlanEntry, ...]

    def nbytes_by_device(self) -> dict[str, int]:
        """The bytes that rest in each home."""
        total: Counter[str] = Counter()
        for entry in self.entries:
            total[entry.device] += entry.nbytes
        return dict(total)

    def modules(self, order: Iterable[str] = ()) -> list[ModuleDevice]:
        """What each module has in each home: in the order of these names, the others behind them in the order
        of the plan.
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
        """The bytes that one forward of every module moves to its device."""
        return sum(entry.nbytes for entry in self.entries if entry.is_moved)

    def resident_nbytes(self) -> int:
        """The bytes that rest in memory of any device."""
        return sum(entry.nbytes for entry in self.entries if entry.device != "disk")

    def to_dict(self) -> dict:
        """The plan as JSON-ready data."""
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
        return f"{devices}; {f'{moved:,} B moved a forward' if moved else 'nothing moves'}"
