"""Bar charts and scatter charts of benchmarks and evaluations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hfq.plots.chart_labels import label_points

__all__ = ["Chart", "Lines", "Scatter"]

_HATCHES = (None, "///", "...", "xxx")
_LABEL_POINTS = 22
"""Width of a number above a bar, in points."""


@dataclass(frozen=True)
class Chart:
    """Groups of bars, one bar of each series in a group.

    Attributes:
        title: The title.
        groups: Names of the groups.
        series: Values by series, one for each group; None is drawn as "not available".
        line: Value of the line across all groups.
        scale: Scale of the values: `linear` or `log`.
    """

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    line: float = 1.0
    scale: str = "linear"

    def draw(self, figure: Any) -> None:
        """Draws the chart into an empty figure of matplotlib."""
        from matplotlib import rcParams

        series = {
            name: values for name, values in self.series.items() if any(value is not None for value in values)
        }
        size = min(max(1.5 + 0.42 * len(self.groups) * len(series), 5.5), 14)
        figure.set_size_inches(size, 4.2 + 0.2 * -(-len(series) // 4))
        axes = figure.subplots()
        width, colours = 0.8 / max(len(series), 1), rcParams["axes.prop_cycle"].by_key()["color"]
        is_narrow = 72 * (size - 1) / max(len(self.groups), 1) * width < _LABEL_POINTS
        for index, (name, values) in enumerate(series.items()):
            hatch = _HATCHES[index // len(colours) % len(_HATCHES)]  # repeated colors get a hatch
            style = {"label": name, "align": "edge", "color": colours[index % len(colours)], "hatch": hatch}
            shown = [
                (group + index * width, value) for group, value in enumerate(values) if value is not None
            ]
            bars = axes.bar([place for place, _ in shown], [height for _, height in shown], width, **style)
            axes.bar_label(bars, fmt="%.3g", fontsize=7, rotation=90 if is_narrow else 0, padding=2)
            for group, value in enumerate(values):
                if value is None:
                    middle = group + (index + 0.5) * width
                    axes.annotate(
                        "not available",
                        (middle, 0),
                        xycoords=("data", "axes fraction"),
                        xytext=(0, 3),
                        textcoords="offset points",
                        rotation=90,
                        ha="center",
                        va="bottom",
                        fontsize=6,
                        color="gray",
                    )
        axes.margins(y=0.12)
        axes.axhline(self.line, color="gray", linewidth=0.8, linestyle="--")
        is_long = sum(map(len, self.groups)) > 9 * size  # too many letters to fit side by side
        tilted = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"} if is_long else {}
        axes.set_xticks([group + 0.4 for group in range(len(self.groups))], self.groups, **tilted)
        axes.set_yscale(self.scale)
        axes.set_ylabel(_quantity(self.title), fontsize=8)
        axes.set_title(self.title, fontsize=10)
        if series:
            figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns the chart as JSON-ready data."""
        return {"kind": "Chart"} | asdict(self)


def _quantity(title: str) -> str:
    """Returns the quantity that a title names: `a: b over c (lower is better)` → `b over c`."""
    return re.sub(r" *\([^()]*\)$", "", title.rpartition(": ")[2])


@dataclass(frozen=True)
class Scatter:
    """Named points: (name, x, y)."""

    title: str
    x: str
    y: str
    points: Sequence[tuple[str, float, float]]

    def draw(self, figure: Any) -> None:
        """Draws the chart into an empty figure of matplotlib."""
        figure.set_size_inches(7, 4)
        axes = figure.subplots()
        for _, x, y in self.points:
            axes.scatter([x], [y])
        axes.set_xlabel(self.x)
        axes.set_ylabel(self.y)
        axes.margins(0.12)
        axes.xaxis.set_major_formatter("{x:,.10g}")
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.set_title(self.title)
        label_points(figure, axes, self.points)

    def to_dict(self) -> dict[str, Any]:
        """Returns the chart as JSON-ready data."""
        return {"kind": "Scatter"} | asdict(self)


@dataclass(frozen=True)
class Lines:
    """Lines through points (x, y), one line of each series.

    Attributes:
        title: The title.
        x: Label of the x axis, with its unit.
        y: Label of the y axis, with its unit.
        series: Points by series, in the order of x.
    """

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float, float]]]

    def draw(self, figure: Any) -> None:
        """Draws the chart into an empty figure of matplotlib."""
        figure.set_size_inches(7, 4)
        axes = figure.subplots()
        for marker, (name, points) in zip("osv^Dx*+" * len(self.series), self.series.items(), strict=False):
            axes.plot([x for x, _ in points], [y for _, y in points], marker=marker, label=name)
        axes.set_xlabel(self.x)
        axes.set_ylabel(self.y)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_title(self.title)
        axes.legend(frameon=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns the chart as JSON-ready data."""
        return {"kind": "Lines"} | asdict(self)
