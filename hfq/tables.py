"""Tables, targets, and reports: results of measurements as markdown, JSON, and a plot."""

from __future__ import annotations

import html
import io
import json
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from hfq.output_file import write_output_file

__all__ = ["Displayed", "Report", "ReportChart", "Table", "Target", "as_rate", "as_size", "draw_chart"]

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True)
class Target:
    """A target for one measured number.

    Attributes:
        what: The name of the measured quantity.
        value: The measured value, or None if it was not measured.
        bound: The target.
        at_least: True if a larger value is better.
    """

    what: str
    value: float | None
    bound: float
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return (
            "met" if (self.value >= self.bound if self.at_least else self.value <= self.bound) else "not met"
        )

    def __str__(self) -> str:
        found = "-" if self.value is None else f"{self.value:.3f}"
        return (
            f"{self.what}: {found} (target {'>=' if self.at_least else '<='} {self.bound:g}: {self.verdict})"
        )


@dataclass(frozen=True)
class Table:
    """A table with a title and a note that explains its numbers."""

    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return f"## {self.title}\n\n{self.note}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def to_html(self) -> str:
        """Returns the table as HTML for a notebook; the note stands below it."""
        cells = ["".join(f"<th>{html.escape(cell)}</th>" for cell in self.header)]
        cells += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self.rows]
        rows = "".join(f"<tr>{line}</tr>" for line in cells)
        caption = f"<caption>{html.escape(self.title)}</caption>"
        return f"<table>{caption}{rows}</table><pre>{html.escape(self.note)}</pre>"


class Displayed(ABC):
    """Base of results that print as text in a terminal and show a table in a notebook."""

    @abstractmethod
    def _table(self) -> Table:
        """Returns the table that a notebook shows."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self._table().to_html()


class ReportChart(Protocol):
    """A chart in a report, drawn by matplotlib and written as JSON."""

    @property
    def title(self) -> str: ...

    def draw(self, figure: Any) -> None: ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Report:
    """The result of one benchmark."""

    title: str
    facts: Mapping[str, str]
    tables: Sequence[Table]
    targets: Sequence[Target]
    records: Sequence[dict[str, Any]]
    chart: ReportChart
    targets_note: str = "Medians over the rounds."

    def to_markdown(self, plot: str | None = None) -> str:
        """Returns the report as a Markdown page.

        Args:
            plot: The file name of the plot, relative to the page; None for a page without one.
        """
        facts = "".join(f"- {what}: {fact}\n" for what, fact in self.facts.items())
        targets = Table(
            "Targets",
            self.targets_note,
            ("what", "measured", "target", ""),
            [
                (
                    t.what,
                    "-" if t.value is None else f"{t.value:.3f}",
                    f"{'>=' if t.at_least else '<='} {t.bound:g}",
                    t.verdict,
                )
                for t in self.targets
            ],
        )
        held = [targets.to_markdown()] if self.targets else []
        picture = [] if plot is None else [f"![{self.chart.title}]({plot})\n"]
        tables = [table.to_markdown() for table in self.tables]
        return "\n".join([f"# {self.title}\n", facts, *held, *picture, *tables])

    def to_json(self) -> str:
        targets = [asdict(target) | {"verdict": target.verdict} for target in self.targets]
        tables = [asdict(table) for table in self.tables]
        document = {
            "title": self.title,
            "facts": dict(self.facts),
            "targets": targets,
            "targets_note": self.targets_note,
        }
        return json.dumps(
            document | {"tables": tables, "chart": self.chart.to_dict(), "records": list(self.records)},
            indent=1,
        )

    def write(self, folder: Path, name: str) -> None:
        """Writes `name`.md, `name`.json and, if matplotlib is installed, `name`.png."""
        folder.mkdir(parents=True, exist_ok=True)
        is_drawn = draw_chart(self.chart, self.facts, folder / f"{name}.png")
        text = self.to_markdown(f"{name}.png" if is_drawn else None)
        note = "" if is_drawn else "\nNo plot: matplotlib is not installed (`pip install hfq[plots]`).\n"
        write_output_file(folder / f"{name}.md", text + note)
        write_output_file(folder / f"{name}.json", self.to_json() + "\n")


def as_rate(rate: float | None) -> str:
    """Returns a rate in bytes per second as text."""
    return "not measured" if rate is None else f"{rate / 1e9:.2f} GB/s"


def as_size(nbytes: float) -> str:
    """Returns bytes with three significant digits: `4.5 GB`, or `-` for none."""
    if nbytes == 0:
        return "-"
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if nbytes >= 0.9995 * scale), (1, "B"))
    value = nbytes / scale
    return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"


def draw_chart(chart: ReportChart, facts: Mapping[str, str], file: Path) -> bool:
    """Writes a chart with its model, machine, and date as a PNG file.

    Returns:
        False if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(layout="constrained")
    chart.draw(figure)
    width = int(figure.get_size_inches()[0] * 17)  # letters of 6 points
    said = [facts[name] for name in ("model", "models", "processor", "date") if name in facts]
    figure.suptitle(textwrap.fill(" · ".join(said), width, max_lines=3), fontsize=6, color="gray")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_output_file(file, picture.getvalue())
    return True
