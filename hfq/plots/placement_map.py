"""The placement map: which part of a model rests where, in bytes, in the order of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hfq.placement.plan import ModuleDevice
from hfq.plots.drawing import COLOURS
from hfq.plots.section import Picture, as_size
from hfq.tables import Table

__all__ = ["PlacementMap", "Unit", "device_colour", "placement_picture"]

_LAYER = re.compile(r"^(.*?\.\d+)(?:\.|$)")
_MOST_NAMES = 30
_OWN = {"cpu": COLOURS[0], "disk": COLOURS[4], "nvme": COLOURS[3]}


@dataclass(frozen=True)
class Unit:
    """A layer, or a module outside layers.

    Attributes:
        name: Its name in the model.
        by_device: {home: (bytes of packed rows, other bytes)}.
        devices: Where it computes.
        modules: How many modules with tensors it has.
    """

    name: str
    by_device: dict[str, tuple[int, int]]
    devices: tuple[str, ...]
    modules: int

    @property
    def nbytes(self) -> int:
        return sum(map(sum, self.by_device.values()))

    @property
    def short(self) -> str:
        """The end of its name, which says enough beside the others."""
        return (
            ".".join(self.name.split(".")[-2:] if self.name[-1:].isdigit() else self.name.split(".")[-1:])
            or "the model"
        )


def gather_units(modules: Iterable[ModuleDevice]) -> list[Unit]:
    """The modules of each layer as one, in their order."""
    by_device: dict[str, dict[str, list[int]]] = {}
    devices: dict[str, dict[str, None]] = {}
    names: dict[str, set[str]] = {}
    for module in modules:
        found = _LAYER.match(module.module)
        name = found[1] if found else module.module
        parts = by_device.setdefault(name, {}).setdefault(module.device, [0, 0])
        parts[0] += module.quantized_nbytes
        parts[1] += module.nbytes - module.quantized_nbytes
        devices.setdefault(name, {})[module.execution_device] = None
        names.setdefault(name, set()).add(module.module)
    return [
        Unit(
            name,
            {device: (parts[0], parts[1]) for device, parts in sizes.items()},
            tuple(devices[name]),
            len(names[name]),
        )
        for name, sizes in by_device.items()
    ]


def device_colour(device: str) -> str:
    """The colour of a home, the same on every picture."""
    if device in _OWN:
        return _OWN[device]
    number = re.search(r"\d+$", device)
    return (COLOURS[2], COLOURS[1], COLOURS[5])[int(number[0]) % 3 if number else 0]


@dataclass(frozen=True)
class PlacementMap:
    """A column for each unit, of the colours of the homes that its bytes rest in; what is not packed is
    paler.
    """

    units: Sequence[Unit]

    def draw(self, figure: Any) -> None:
        """Draws it into an empty figure of matplotlib."""
        from matplotlib.patches import Patch
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        count = len(self.units)
        figure.set_size_inches(min(max(6.5, 2 + 0.3 * count), 13), 4.2)
        axes = figure.subplots()
        devices = list(dict.fromkeys(device for unit in self.units for device in unit.by_device))
        bottom = [0.0] * count
        handles = []
        for device in devices:
            for kind, alpha in ((0, 1.0), (1, 0.45)):
                heights = [unit.by_device.get(device, (0, 0))[kind] for unit in self.units]
                if any(heights):
                    axes.bar(
                        range(count),
                        heights,
                        0.86,
                        bottom=bottom,
                        color=device_colour(device),
                        alpha=alpha,
                        linewidth=0,
                    )
                    bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
                    label = f"{device}, {('packed', 'not packed')[kind]}: {as_size(sum(heights))}"
                    handles.append(Patch(color=device_colour(device), alpha=alpha, label=label))
        step = -(-count // _MOST_NAMES)
        shown = [place for place in range(count) if place % step == 0]
        axes.set_xticks(
            shown,
            [self.units[place].short for place in shown],
            rotation=60,
            ha="right",
            rotation_mode="anchor",
        )
        axes.tick_params(axis="x", labelsize=8, length=2)
        axes.set_xlim(-0.7, count - 0.3)
        axes.set_ylim(0, 1.05 * max(bottom) or 1)
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: as_size(nbytes)))
        axes.set_ylabel("bytes at home")
        figure.legend(handles=handles, loc="outside lower left", ncols=2, fontsize=9)


def placement_picture(modules: Sequence[ModuleDevice]) -> Picture:
    """The map of a model's modules, with its table."""
    units = gather_units(modules)
    totals: dict[str, int] = {}
    for unit in units:
        for device, parts in unit.by_device.items():
            totals[device] = totals.get(device, 0) + sum(parts)
    said = ", ".join(f"{nbytes:,} bytes rest on {device}" for device, nbytes in totals.items())
    alt = (
        f"A column for each of {len(units)} parts of the model, as high as its bytes, in the colours of "
        f"its homes: {said}."
    )
    return Picture(
        "placement", "Placement map: which part rests where", alt, PlacementMap(units), _table(units)
    )


def _table(units: Sequence[Unit]) -> Table:
    """A row for each part and home; neighbouring layers that are alike are one row."""
    rows: list[tuple[str, ...]] = []
    start = 0
    for place, unit in enumerate(units):
        following = units[place + 1] if place + 1 < len(units) else None
        if following is not None and (unit.by_device, unit.devices) == (
            following.by_device,
            following.devices,
        ):
            continue
        count, name = place - start + 1, unit.name or "the model"
        name = name if count == 1 else f"{units[start].name} to {name} ({count})"
        for device, (quantized, other) in unit.by_device.items():
            sizes = (f"{quantized:,}", f"{other:,}", f"{(quantized + other) * count:,}")
            rows.append(
                (
                    name,
                    device
                    if unit.devices == (device,)
                    else f"{device}, computes on {', '.join(unit.devices)}",
                    *sizes,
                )
            )
        start = place + 1
    header = ("part", "home", "packed bytes, each", "other bytes, each", "bytes in all")
    note = (
        "Bytes at home, as the plan of the load counts them. Neighbouring layers that are alike stand in "
        "one row."
    )
    return Table("Which part rests where", note, header, rows)
