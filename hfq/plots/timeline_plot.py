"""Timeline of one pass: tracks of reading, copying, and computing, with a bar per unit."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hfq.offload.spans import Span, overlap_levels
from hfq.plots.drawing import COLOURS, INK, MUTED
from hfq.plots.section import Picture, as_size
from hfq.tables import Table

__all__ = ["TimelinePlot", "busy_seconds", "last_pass", "timeline_picture"]

_WIDTH = 11.0
_TRACKS = {"reading": ("read",), "copying": ("copy",), "computing": ("compute", "other", "wait")}
"""Kinds of spans on each track."""

_COLUMNS = {
    "reading": ("read",),
    "copying": ("copy",),
    "waiting": ("wait",),
    "computing": ("compute", "other"),
}
"""Kinds of spans in each column of the table."""

_WORDS = {
    "read": "reading",
    "copy": "copying",
    "compute": "computing offloaded units",
    "other": "computing the rest",
    "wait": "waiting",
}
_SHADES: Mapping[str, tuple[str, str]] = {
    "read": (COLOURS[0], COLOURS[5]),
    "copy": (COLOURS[3], "#e3b4cf"),
    "compute": (COLOURS[2], "#5cc2a0"),
    "other": (MUTED, "#b4bac2"),
}
_DARK = (COLOURS[0],)
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True)
class TimelinePlot:
    """Spans over time. Neighboring units differ in shade.

    Attributes:
        spans: Spans of one pass, which starts at second 0, ordered by start.
        seconds: Duration of the pass.
        units: Offloaded units, in model order.
    """

    spans: Sequence[Span]
    seconds: float
    units: Sequence[str]

    @functools.cached_property
    def others(self) -> list[str]:
        """Modules that are not offloaded, in execution order."""
        return list(dict.fromkeys(span.name for span in self.spans if span.track == "other"))

    def draw(self, figure: Any) -> None:
        """Draws the timeline into an empty matplotlib figure."""
        tracks = {
            title: [span for span in self.spans if span.track in kinds] for title, kinds in _TRACKS.items()
        }
        tracks = {
            title: spans for title, spans in reversed(tracks.items()) if spans
        }  # drawn from the bottom up
        figure.set_size_inches(_WIDTH, 1.6 + 0.95 * len(tracks))
        axes = figure.subplots()
        unit, name = next(((size, name) for size, name in _UNITS if self.seconds >= size), _UNITS[-1])
        for place, spans in enumerate(tracks.values()):
            self._draw_track(axes, spans, place, unit)
        axes.set_yticks(range(len(tracks)), list(tracks))
        axes.set_ylim(-0.5, len(tracks) - 0.5)
        axes.set_xlim(0, self.seconds / unit)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(f"time since the start of the pass, {name} (numbers are layer numbers)")
        figure.legend(handles=self._handles(), loc="outside lower left", ncols=4, fontsize=9)

    def _draw_track(self, axes: Any, spans: Sequence[Span], place: int, unit: float) -> None:
        levels = overlap_levels(spans)
        height = 0.8 / (max(levels) + 1)
        for span, level in zip(spans, levels, strict=True):
            color, hatch = self._style(span)
            bottom = place - 0.4 + level * height
            start, width = span.start / unit, (span.end - span.start) / unit
            bar: dict[str, Any] = {"facecolor": color, "edgecolor": INK, "linewidth": 0, "hatch": hatch}
            axes.broken_barh([(start, width)], (bottom, height * 0.94), **bar)
            label = _layer_number(span.name) if span.track != "wait" else ""
            points = width * unit / self.seconds * (_WIDTH - 1.3) * 72
            if label and height > 0.15 and points > 6 * len(label) + 2:
                ink = "white" if color in _DARK else "black"
                middle = start + width / 2, bottom + height * 0.47
                axes.text(*middle, label, ha="center", va="center", fontsize=8, color=ink)

    def _style(self, span: Span) -> tuple[str, str | None]:
        if span.track == "wait":
            return COLOURS[1], "////"
        names = self.others if span.track == "other" else self.units
        return _SHADES[span.track][names.index(span.name) % 2 if span.name in names else 0], None

    def _handles(self) -> list[Any]:
        """Returns the legend entries, one per kind of span."""
        from matplotlib.patches import Patch

        hatched: dict[str, Any] = {"facecolor": COLOURS[1], "edgecolor": INK, "linewidth": 0, "hatch": "////"}
        entries = {
            "read": Patch(color=_SHADES["read"][0], label="reading an offloaded unit"),
            "copy": Patch(color=_SHADES["copy"][0], label="copying an offloaded unit"),
            "compute": Patch(color=_SHADES["compute"][0], label="computing an offloaded unit"),
            "other": Patch(color=_SHADES["other"][0], label="computing other modules"),
            "wait": Patch(**hatched, label="waiting for a unit"),
        }
        found = {span.track for span in self.spans}
        return [patch for kind, patch in entries.items() if kind in found]


def last_pass(spans: Sequence[Span]) -> tuple[list[Span], float]:
    """Returns the spans of the last recorded pass, cut to it, and its duration in seconds.

    They start at 0. Without a recorded pass, all spans are returned.
    """
    passes = [span for span in spans if span.track == "pass"]
    rest = [span for span in spans if span.track != "pass"]
    start = min((span.start for span in rest), default=0.0)
    end = max((span.end for span in rest), default=0.0)
    if passes:
        start, end = passes[-1].start, passes[-1].end
    cut = [
        replace(span, start=max(span.start, start) - start, end=min(span.end, end) - start)
        for span in rest
        if span.end > start and span.start < end
    ]
    return cut, end - start


def busy_seconds(spans: Iterable[Span]) -> float:
    """Returns the seconds during which at least one of the spans was active."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def timeline_picture(spans: Sequence[Span], units: Sequence[str]) -> Picture | None:
    """Returns the last pass with its table, or None if nothing was recorded."""
    shown, seconds = last_pass(spans)
    if not shown or seconds <= 0:
        return None
    busy = {kind: busy_seconds(span for span in shown if span.track == kind) for kind in _WORDS}
    words = ", ".join(f"{_WORDS[kind]} {taken * 1e3:.3g} ms" for kind, taken in busy.items() if taken)
    alt = f"Tracks over the {seconds * 1e3:.3g} ms of one pass, with a bar per unit on each track: {words}."
    plot, table = TimelinePlot(shown, seconds, units), _table(shown, units, seconds)
    return Picture("timeline", "Timeline of one pass", alt, plot, table)


def _layer_number(name: str) -> str:
    """Returns the layer number in the name of a module, or an empty string."""
    found = re.search(r"\.(\d+)(?:\.|$)", f".{name}")
    return found[1] if found else ""


def _table(spans: Sequence[Span], units: Sequence[str], seconds: float) -> Table:
    order = {name: place for place, name in enumerate(units)}
    by_name: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: order.get(span.name, len(order))):
        by_name.setdefault(span.name, []).append(span)
    rows = [_row(name, found, none="-") for name, found in by_name.items()]
    rows.append(_row("total busy", spans, none="0.000"))
    note = (
        f"Milliseconds within the {seconds * 1e3:.3f} ms of the pass. Time of concurrent reads "
        "counts once. Reads that prefetch for the next pass are included. "
        "Reads that an earlier pass prefetched are not."
    )
    return Table("One pass by unit", note, ("unit", "bytes read", *_COLUMNS), rows)


def _row(name: str, spans: Sequence[Span], none: str) -> tuple[str, ...]:
    """Returns a row of the table. `none` replaces a time of zero."""
    nbytes = sum(span.nbytes for span in spans if span.track == "read")
    busy = [busy_seconds(span for span in spans if span.track in kinds) for kinds in _COLUMNS.values()]
    times = (f"{taken * 1e3:.3f}" if taken else none for taken in busy)
    return (name, as_size(nbytes) if nbytes else "-", *times)
