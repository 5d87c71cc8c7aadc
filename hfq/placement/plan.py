"""The plan: which tensor rests where, in bytes. Pure data, computed from headers before any weight byte is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

__all__ = ["ModuleHome", "Plan", "PlanEntry"]


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One stored tensor.

    Attributes:
        name: Its name in the model.
        home: Where it rests: `cpu`, `disk`, `cuda:0`, ….
        device: Where it computes.
        nbytes: Its bytes at home (a dense tensor that rests in memory: after the cast to the model's dtype).
        packed: Whether it belongs to a packed row.
    """

    name: str
    home: str
    device: str
    nbytes: int
    packed: bool

    @property
    def is_moved(self) -> bool:
        """Whether it is brought to its device for every forward."""
        return self.home == "disk" or self.home != self.device


@dataclass(frozen=True, slots=True)
class ModuleHome:
    """What one module has in one home.

    Attributes:
        module: Its name in the model; empty for the model itself.
        home: Where its tensors rest.
        device: Where they compute.
        nbytes: Their bytes at home.
        packed_nbytes: Of these, the bytes of packed rows.
    """

    module: str
    home: str
    device: str
    nbytes: int
    packed_nbytes: int


@dataclass(frozen=True)
class Plan:
    """Every tensor's home, and the sums over them."""

    entries: tuple[PlanEntry, ...]

    def nbytes_by_home(self) -> dict[str, int]:
        """The bytes that rest in each home."""
        total: Counter[str] = Counter()
        for entry in self.entries:
            total[entry.home] += entry.nbytes
        return dict(total)

    def modules(self, order: Iterable[str] = ()) -> list[ModuleHome]:
        """What each module has in each home: in the order of these names, the others behind them in the order of the plan."""
        total: dict[tuple[str, str, str], list[int]] = {}
        for entry in self.entries:
            held = total.setdefault((entry.name.rpartition(".")[0], entry.home, entry.device), [0, 0])
            held[0] += entry.nbytes
            held[1] += entry.nbytes * entry.packed
        places = {name: place for place, name in enumerate(order)}
        keys = sorted(total, key=lambda key: places.get(key[0], len(places)))
        return [ModuleHome(*key, *total[key]) for key in keys]

    def moved_nbytes(self) -> int:
        """The bytes that one forward of every module moves to its device."""
        return sum(entry.nbytes for entry in self.entries if entry.is_moved)

    def resident_nbytes(self) -> int:
        """The bytes that rest in memory of any device."""
        return sum(entry.nbytes for entry in self.entries if entry.home != "disk")

    def to_dict(self) -> dict:
        """The plan as JSON-ready data."""
        return {
            "homes": self.nbytes_by_home(),
            "moved_nbytes": self.moved_nbytes(),
            "tensors": [asdict(entry) for entry in self.entries],
        }

    def __str__(self) -> str:
        homes = ", ".join(f"{home} {nbytes:,} B" for home, nbytes in self.nbytes_by_home().items())
        moved = self.moved_nbytes()
        return f"{homes}; {f'{moved:,} B moved a forward' if moved else 'nothing moves'}"
