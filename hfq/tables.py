"""A benchmark's result: tables, targets and raw records, as markdown, JSON and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hfq.plots.chart_labels import label_points

__all__ = ["Chart", "Report", "Scatter", "Table", "Target", "as_rate", "median", "rotated", "select"]

_HATCHES = (None, "///", "...", "xxx")
_LABEL_POINTS = 22
"""How wide a number over a bar is."""

Record = dict
"""One measurement as it was taken: what was measured, and numbers in seconds and bytes."""


@dataclass(frozen=True)
class Target:
    """A number that a result is held against.

    Attributes:
        what: What is measured.
        value: What was measured; None where it was not.
        bound: The target.
        at_least: Whether a larger value is better.
    """

    what: str
    value: float | None
    bound: float
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "met" if (self.value >= self.bound if self.at_least else self.value <= self.bound) else "not met"

    def __str__(self) -> str:
        found = "-" if self.value is None else f"{self.value:.3f}"
        return f"{self.what}: {found} (target {'>=' if self.at_least else '<='} {self.bound:g}: {self.verdict})"


@dataclass(frozen=True)
class Table:
    """A titled table; `note` says what its numbers are."""

    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return f"## {self.title}\n\n{self.note}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


@dataclass(frozen=True)
class Chart:
    """Groups of bars, one bar of each series in a group; None leaves a bar out. `line` is drawn across all, on an axis of `scale`."""

    title: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    line: float = 1.0
    scale: str = "linear"

    def draw(self, figure) -> None:
        """Draws it into an empty figure of matplotlib."""
        from matplotlib import rcParams

        size = min(max(1.5 + 0.42 * len(self.groups) * len(self.series), 5.5), 14)
        figure.set_size_inches(size, 4 + 0.2 * -(-len(self.series) // 4))
        axes = figure.subplots()
        width, colours = 0.8 / max(len(self.series), 1), rcParams["axes.prop_cycle"].by_key()["color"]
        is_narrow = 72 * (size - 1) / max(len(self.groups), 1) * width < _LABEL_POINTS
        for index, (name, values) in enumerate(self.series.items()):
            places = [group + index * width for group, value in enumerate(values) if value is not None]
            heights, style = [value for value in values if value is not None], {"label": name, "align": "edge"}
            hatch = _HATCHES[index // len(colours) % len(_HATCHES)]  # a colour that comes again is hatched
            if not heights:
                continue
            bars = axes.bar(places, heights, width, color=colours[index % len(colours)], hatch=hatch, **style)
            axes.bar_label(bars, fmt="%.3g", fontsize=7, rotation=90 if is_narrow else 0, padding=2)
        axes.margins(y=0.12)
        axes.axhline(self.line, color="gray", linewidth=0.8, linestyle="--")
        is_long = sum(map(len, self.groups)) > 9 * size  # letters of names side by side
        tilted = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"} if is_long else {}
        axes.set_xticks([group + 0.4 for group in range(len(self.groups))], self.groups, **tilted)
        axes.set_yscale(self.scale)
        axes.set_title(self.title)
        figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)


@dataclass(frozen=True)
class Scatter:
    """Named points: (name, x, y)."""

    title: str
    x: str
    y: str
    points: Sequence[tuple[str, float, float]]

    def draw(self, figure) -> None:
        """Draws it into an empty figure of matplotlib."""
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


@dataclass(frozen=True)
class Report:
    """All of one benchmark's result."""

    title: str
    facts: Mapping[str, str]
    tables: Sequence[Table]
    targets: Sequence[Target]
    records: Sequence[Record]
    chart: Chart | Scatter
    targets_note: str = "Medians over the rounds."

    def to_markdown(self, plot: str | None = None) -> str:
        """The page; `plot` is the file of the plot beside it."""
        facts = "".join(f"- {what}: {fact}\n" for what, fact in self.facts.items())
        targets = Table(
            "Targets", self.targets_note, ("what", "measured", "target", ""),
            [
                (t.what, "-" if t.value is None else f"{t.value:.3f}", f"{'>=' if t.at_least else '<='} {t.bound:g}", t.verdict)
                for t in self.targets
            ],
        )  # fmt: skip
        picture = (
            f"![{self.chart.title}]({plot})" if plot else "No plot: matplotlib is not installed (`pip install hfq[bench]`)."
        )
        held = [targets.to_markdown()] if self.targets else []
        return "\n".join([f"# {self.title}\n", facts, *held, f"{picture}\n", *(t.to_markdown() for t in self.tables)])

    def to_json(self) -> str:
        targets = [asdict(target) | {"verdict": target.verdict} for target in self.targets]
        tables = [asdict(table) for table in self.tables]
        chart = {"kind": type(self.chart).__name__} | asdict(self.chart)
        document = {"title": self.title, "facts": dict(self.facts), "targets": targets, "targets_note": self.targets_note}
        return json.dumps(document | {"tables": tables, "chart": chart, "records": list(self.records)}, indent=1)

    def write(self, folder: Path, name: str) -> None:
        """Writes `name`.md, .json and, where matplotlib is installed, .png."""
        folder.mkdir(parents=True, exist_ok=True)
        plot = f"{name}.png" if _draw(self.chart, folder / f"{name}.png") else None
        (folder / f"{name}.md").write_text(self.to_markdown(plot), encoding="utf-8")
        (folder / f"{name}.json").write_text(self.to_json() + "\n", encoding="utf-8")


def select(records: Iterable[Record], **where: object) -> list[Record]:
    """The records in which every one of these keys has this value, failed ones left out."""
    return [r for r in records if "error" not in r and all(r.get(key) == value for key, value in where.items())]


def median(records: Iterable[Record], value: Callable[[Record], float], **where: object) -> float | None:
    """The median of a value over the selected records; None where there are none, or where none has the value."""
    try:
        values = [value(record) for record in select(records, **where)]
    except (KeyError, ZeroDivisionError):
        return None
    return statistics.median(values) if values else None


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The names in an order that begins elsewhere each round, so that no place in the order favours anybody."""
    cut = by % max(len(names), 1)
    return [*names[cut:], *names[:cut]]


def as_rate(rate: float | None) -> str:
    """Bytes per second as text."""
    return "not measured" if rate is None else f"{rate / 1e9:.2f} GB/s"


def _draw(chart: Chart | Scatter, file: Path) -> bool:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(layout="constrained")
    chart.draw(figure)
    figure.savefig(file, dpi=120)
    return True
