"""A catalog of machines with their cost, from a YAML file that users edit.

Pure data.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfq.checkpoint.small_file import read_yaml
from hfq.errors import PlacementError, SetupError, nearest
from hfq.placement.estimate.estimate import ModelSizes, Workload, estimate_placement
from hfq.placement.estimate.hardware import Hardware, parse_gpus, parse_size
from hfq.placement.estimate.profile import Profile
from hfq.placement.estimate.roofline import TERMS

__all__ = ["SHIPPED", "Catalog", "Machine", "rank_machines", "read_catalog"]

SHIPPED = "shipped"
_FILE = Path(__file__).parent / "catalog.yaml"
_GPU_FIELDS = ("memory", "memory_rate")
_MACHINE_FIELDS = ("name", "gpus", "cpu", "memory_rate", "link_rate", "disk_rate", "cost", "source")


@dataclass(frozen=True)
class Machine:
    """One machine.

    Attributes:
        name: Name of the machine.
        hardware: Its memory.
        profile: Its rates, which are published limits and not measured.
        cost: Cost of one hour, in the catalog's unit.
        note: Source of the figures.
    """

    name: str
    hardware: Hardware
    profile: Profile
    cost: float
    note: str


@dataclass(frozen=True)
class Catalog:
    """All machines of a file.

    Attributes:
        date: Date of the file.
        machines: The machines.
        gpus: Memory of each accelerator by name, in bytes.
        gpu_rates: Memory bandwidth of each accelerator by name, in bytes per second.
    """

    date: str
    machines: tuple[Machine, ...]
    gpus: Mapping[str, int]
    gpu_rates: Mapping[str, float]

    def memory_rate(self, text: str) -> float | None:
        """Returns the memory bandwidth of a name such as `RTX-4090×2`, in bytes per second.

        None if the catalog does not have this name.
        """
        kind = re.split(r"\s*[×*]", text.strip())[0].casefold()
        return next((rate for name, rate in self.gpu_rates.items() if name.casefold() == kind), None)


def read_catalog(file: str | Path) -> Catalog:
    """Reads a catalog; `shipped` is the file of examples that comes with hfq.

    Raises:
        SetupError: The file cannot be read, or a field is missing or invalid.
    """
    path = _FILE if str(file) == SHIPPED else Path(file)
    try:
        stored = read_yaml(path)
    except OSError as error:
        raise SetupError(
            "The catalog cannot be read.",
            file=path,
            expected=f"a YAML file, or {SHIPPED}",
            found=error.strerror,
            fix=f"Pass a file that exists, or --catalog {SHIPPED}.",
        ) from error
    except (ImportError, ValueError) as error:
        raise _refused(path, f"{type(error).__name__}: {error}", "a YAML file") from error
    try:
        return _catalog(path, stored)
    except ValueError as error:  # an integer that is too long to print
        raise _refused(path, f"{type(error).__name__}: {error}", "short numbers") from error


def _catalog(path: Path, stored: Any) -> Catalog:
    _check_fields(path, "the catalog", stored, ("date", "gpus", "machines"))
    gpus, entries = stored["gpus"], stored["machines"]
    if not isinstance(gpus, dict) or not all(isinstance(name, str) for name in gpus):
        raise _refused(path, f"gpus: {type(gpus).__name__}", "a mapping of names")
    _check_list(path, "machines", entries)
    for name, gpu in gpus.items():
        _check_fields(path, f"accelerator {name}", gpu, _GPU_FIELDS)
    memories = {name: _size(path, f"memory of {name}", gpu["memory"]) for name, gpu in gpus.items()}
    machines = tuple(_machine(path, entry, gpus, memories) for entry in entries)
    rates = {name: _rate(path, name, "memory_rate", gpu["memory_rate"]) for name, gpu in gpus.items()}
    return Catalog(_text(path, "date", stored["date"]), machines, memories, rates)


def rank_machines(catalog: Catalog, sizes: ModelSizes, workload: Workload) -> list[dict]:
    """Returns the model's cost on each machine, the cheapest tokens first.

    Machines on which the model does not fit, or has no known speed, come last, with the reason. For a machine
    with several accelerators, the plan uses one of them and the host's memory, since hfq offloads with one
    accelerator.
    """
    ranked, refused = [], []
    for machine in catalog.machines:
        entry: dict[str, Any] = {"name": machine.name, "cost": machine.cost, "note": machine.note}
        try:
            found = estimate_placement(sizes, machine.hardware, workload, machine.profile)
        except PlacementError as error:
            refused.append(entry | {"refused": error.found or error.message})
            continue
        rate = found.prediction.tokens_per_second
        if rate is None:
            refused.append(entry | {"refused": "no speed is known"})
            continue
        ranked.append(
            entry
            | {
                "tokens_per_second": rate,
                "cost_of_a_million_tokens": machine.cost / 3600 / rate * 1e6,
                "dominant": TERMS[found.prediction.dominant],
                "devices": dict(found.budget.stored_nbytes),
            }
        )
    ranked.sort(key=lambda entry: (entry["cost_of_a_million_tokens"], entry["name"]))
    return ranked + refused


def _machine(path: Path, entry: Any, gpus: Mapping[str, Mapping], memories: Mapping[str, int]) -> Machine:
    _check_fields(path, "a machine", entry, _MACHINE_FIELDS)
    name, cost = _text(path, "name", entry["name"]), entry["cost"]
    if isinstance(cost, bool) or not isinstance(cost, (int, float)) or not 0 < cost < 1e9:
        raise _refused(path, f"cost: {cost!r}", f"a positive number as the cost of {name}")
    rates = {field: _rate(path, name, field, entry[field]) for field in ("memory_rate", "disk_rate")}
    link = None if entry["link_rate"] is None else _rate(path, name, "link_rate", entry["link_rate"])
    _check_list(path, f"gpus of {name}", entry["gpus"])
    named = [_text(path, f"gpus of {name}", text) for text in entry["gpus"]]
    try:
        used = parse_gpus(named, memories)
    except PlacementError as error:
        raise _refused(path, f"gpus of {name}: {error.message}", str(error.expected)) from error
    memory, device = rates["memory_rate"], None
    if used:
        first = named[0]
        kind = next((known for known in gpus if first.casefold().startswith(known.casefold())), None)
        if kind is None:
            raise _refused(path, first, f"an accelerator of this file.{nearest(first, gpus)}")
        device = _rate(path, kind, "memory_rate", gpus[kind]["memory_rate"])
    source = "published limits of the catalog"
    profile = Profile(
        source, rates["disk_rate"], memory / 2, memory, host_to_device=link, device_memory=device
    )
    return Machine(
        name,
        Hardware(used, _size(path, f"cpu of {name}", entry["cpu"])),
        profile,
        float(cost),
        _text(path, "source", entry["source"]),
    )


def _rate(path: Path, name: str, field: str, value: Any) -> float:
    """Returns the bytes per second of a rate such as `3350 GB`."""
    return float(_size(path, f"{field} of {name}", value))


def _size(path: Path, what: str, value: Any) -> int:
    """Returns the bytes of a size such as `24GB`, of memory or per second."""
    try:
        return parse_size(_text(path, what, value), what)
    except PlacementError as error:
        raise _refused(path, f"{what}: {str(value)!r}", "bytes with a unit, such as 1008GB") from error


def _text(path: Path, what: str, value: Any) -> str:
    """Returns a value that is text, a number, or a date as text."""
    if not isinstance(value, (str, int, float, datetime.date)):
        raise _refused(path, f"{what}: {type(value).__name__}", "text")
    return str(value)


def _check_list(path: Path, what: str, value: Any) -> None:
    if not isinstance(value, list):
        raise _refused(path, f"{what}: {type(value).__name__}", "a list")


def _check_fields(path: Path, what: str, entry: Any, fields: tuple[str, ...]) -> None:
    if not isinstance(entry, dict):
        raise _refused(path, f"{what}: {type(entry).__name__}", "a mapping")
    missing = [field for field in fields if field not in entry]
    if missing:
        raise _refused(path, f"{what} has no {', '.join(missing)}", ", ".join(fields))


def _refused(path: Path, found: str, expected: str) -> SetupError:
    return SetupError(
        "The catalog cannot be used.",
        file=path,
        expected=expected,
        found=found,
        fix="Fix the named entry; hfq/placement/estimate/catalog.yaml is an example.",
    )
