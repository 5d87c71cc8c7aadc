"""Placement map: the device of each part of a model, in bytes and in model order."""

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
        name: Name in the model.
        by_device: {device: (bytes of quantized weights, other bytes)}.
        devices: Execution devices.
        modules: Number of modules with tensors.
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
        """End of the name, which is enough to tell it from the others."""
        return (
            ".".join(self.name.split(".")[-2:] if self.name[-1:].isdigit() else self.name.split(".")[-1:])
            or "the model"
        )


def gather_units(modules: Iterable[ModuleDevice]) -> list[Unit]:
    """Returns one unit per layer, in model order."""
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
    """Returns the color of a device, the same in every chart."""
    if device in _OWN:
        return _OWN[device]
    number = re.search(r"\d+$", device)
    return (COLOURS[2], COLOURS[1], COLOURS[5])[int(number[0]) % 3 if number else 0]


@dataclass(frozen=True)
class PlacementMap:
    """A column per unit in the colors of its devices. Unquantized bytes are paler."""

    units: Sequence[Unit]

    def draw(self, figure: Any) -> None:
        """Draws the map into an empty matplotlib figure."""
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
                    label = f"{device}, {('quantized', 'unquantized')[kind]}: {as_size(sum(heights))}"
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
        axes.set_ylabel("bytes on the device")
        figure.legend(handles=handles, loc="outside lower left", ncols=2, fontsize=9)


def placement_picture(modules: Sequence[ModuleDevice]) -> Picture:
    """Returns the map of a model's modules, with its table."""
    units = gather_units(modules)
    totals: dict[str, int] = {}
    for unit in units:
        for device, parts in unit.by_device.items():
            totals[device] = totals.get(device, 0) + sum(parts)
    said = ", ".join(f"{nbytes:,} bytes on {device}" for device, nbytes in totals.items())
    alt = (
        f"One column for each of {len(units)} units of the model, as high as its bytes, in the colors of "
        f"its devices: {said}."
    )
    return Picture(
        "placement", "Placement map: the device of each unit", alt, PlacementMap(units), _table(units)
    )


def _table(units: Sequence[Unit]) -> Table:
    """Returns one row per unit and device. Identical neighboring layers share a row."""
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
                    device if unit.devices == (device,) else f"{device}, runs on {', '.join(unit.devices)}",
                    *sizes,
                )
            )
        start = place + 1
    header = ("unit", "device", "quantized bytes, each", "other bytes, each", "total bytes")
    note = "Bytes stored on the device, as counted by the plan. Identical neighboring layers share one row."
    return Table("The device of each unit", note, header, rows)
