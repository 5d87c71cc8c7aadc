"""The timeline of one pass: lanes of reading, copying and computing, block by block."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hfq.benchmarks.report import Table
from hfq.offload.spans import Span
from hfq.plots.drawing import COLOURS, INK, MUTED
from hfq.plots.section import Picture, as_size

__all__ = ["Lanes", "busy_seconds", "last_pass", "lay_rows", "timeline_picture"]

_WIDTH = 11.0
_LANES = (("read", "reading"), ("copy", "copying"), ("compute", "computing"))
_SHADES: Mapping[str, tuple[str, str]] = {
    "read": (COLOURS[0], COLOURS[5]),
    "copy": (COLOURS[3], "#e3b4cf"),
    "compute": (COLOURS[2], "#5cc2a0"),
    "other": (MUTED, "#b4bac2"),
}
_DARK = (COLOURS[0],)
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


@dataclass(frozen=True)
class Lanes:
    """Spans over time; neighbouring blocks differ in shade.

    Attributes:
        spans: What is drawn, from second 0 on.
        seconds: How long all of it took.
        blocks: The streamed blocks, in the order of the model.
    """

    spans: Sequence[Span]
    seconds: float
    blocks: Sequence[str]

    @functools.cached_property
    def others(self) -> list[str]:
        """The parts that are not streamed, in the order in which they computed."""
        return list(dict.fromkeys(span.name for span in self.spans if span.lane == "other"))

    def draw(self, figure: Any) -> None:
        """Draws it into an empty figure of matplotlib."""
        lanes = [(lane, title) for lane, title in _LANES if any(span.lane in _drawn_in(lane) for span in self.spans)]
        figure.set_size_inches(_WIDTH, 1.6 + 0.95 * len(lanes))
        axes = figure.subplots()
        unit, name = next(((size, name) for size, name in _UNITS if self.seconds >= size), _UNITS[-1])
        for place, (lane, _) in enumerate(reversed(lanes)):
            self._draw_lane(axes, lane, place, unit)
        axes.set_yticks(range(len(lanes)), [title for _, title in reversed(lanes)])
        axes.set_ylim(-0.5, len(lanes) - 0.5)
        axes.set_xlim(0, self.seconds / unit)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(f"time since the pass began, {name} (numbers are those of layers)")
        figure.legend(handles=self._handles(lanes), loc="outside lower left", ncols=4, fontsize=9)

    def _draw_lane(self, axes: Any, lane: str, place: int, unit: float) -> None:
        spans = [span for span in self.spans if span.lane in _drawn_in(lane)]
        rows = lay_rows(spans)
        height = 0.8 / (max(rows, default=0) + 1)
        for span, row in zip(spans, rows, strict=True):
            colour, hatch = self._style(span)
            bottom = place - 0.4 + row * height
            start, width = span.start / unit, (span.end - span.start) / unit
            axes.broken_barh(
                [(start, width)], (bottom, height * 0.94), facecolor=colour, edgecolor=INK, linewidth=0, hatch=hatch
            )
            label = _number(span.name) if span.lane != "wait" else ""
            if label and height > 0.15 and width * unit / self.seconds * (_WIDTH - 1.3) * 72 > 6 * len(label) + 2:
                ink = "white" if colour in _DARK else "black"
                middle = start + width / 2, bottom + height * 0.47
                axes.text(*middle, label, ha="center", va="center", fontsize=8, color=ink)

    def _style(self, span: Span) -> tuple[str, str | None]:
        if span.lane == "wait":
            return COLOURS[1], "////"
        names = self.others if span.lane == "other" else self.blocks
        return _SHADES[span.lane][names.index(span.name) % 2 if span.name in names else 0], None

    def _handles(self, lanes: Sequence[tuple[str, str]]) -> list[Any]:
        from matplotlib.patches import Patch

        found = {span.lane for span in self.spans}
        handles = [Patch(color=_SHADES[lane][0], label=f"{title} a streamed block") for lane, title in lanes if lane in found]
        if "other" in found:
            handles.append(Patch(color=MUTED, label="computing what is not streamed"))
        if "wait" in found:
            handles.append(Patch(facecolor=COLOURS[1], edgecolor=INK, linewidth=0, hatch="////", label="waiting for a block"))
        return handles


def last_pass(spans: Sequence[Span]) -> tuple[list[Span], float]:
    """The spans of the last pass that was recorded, from its beginning on and cut to it, and its seconds; all where there is none."""
    passes = [span for span in spans if span.lane == "pass"]
    rest = [span for span in spans if span.lane != "pass"]
    start, end = min((span.start for span in rest), default=0.0), max((span.end for span in rest), default=0.0)
    if passes:
        start, end = passes[-1].start, passes[-1].end
    cut = [
        Span(span.lane, span.name, max(span.start, start) - start, min(span.end, end) - start, span.nbytes)
        for span in rest
        if span.end > start and span.start < end
    ]
    return cut, end - start


def lay_rows(spans: Iterable[Span]) -> list[int]:
    """The row of each span, so that no two of one row overlap; spans are given by their start."""
    ends: list[float] = []
    rows = []
    for span in spans:
        row = next((row for row, end in enumerate(ends) if end <= span.start), len(ends))
        ends[row : row + 1] = [span.end]
        rows.append(row)
    return rows


def busy_seconds(spans: Iterable[Span]) -> float:
    """How long at least one of the spans was under way."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def timeline_picture(spans: Sequence[Span], blocks: Sequence[str]) -> Picture | None:
    """The last pass with its table; None where nothing was recorded."""
    shown, seconds = last_pass(spans)
    if not shown or seconds <= 0:
        return None
    parts = {
        lane: busy_seconds(span for span in shown if span.lane == lane)
        for lane in ("read", "copy", "compute", "other", "wait")
    }
    said = {
        "read": "reading",
        "copy": "copying",
        "compute": "computing streamed blocks",
        "other": "computing the rest",
        "wait": "waiting",
    }
    words = ", ".join(f"{said[lane]} {taken * 1e3:.3g} ms" for lane, taken in parts.items() if taken)
    alt = f"Lanes over the {seconds * 1e3:.3g} ms of one pass, a bar for each block in each lane: {words}."
    return Picture(
        "timeline", "Timeline of one pass", alt, Lanes(shown, seconds, blocks), _table(shown, blocks, parts, seconds),
    )  # fmt: skip


def _drawn_in(lane: str) -> tuple[str, ...]:
    return ("compute", "other", "wait") if lane == "compute" else (lane,)


def _number(name: str) -> str:
    """What stands on a bar: the number of a layer, else nothing."""
    found = re.search(r"\.(\d+)(?:\.|$)", f".{name}")
    return found[1] if found else ""


def _table(spans: Sequence[Span], blocks: Sequence[str], parts: Mapping[str, float], seconds: float) -> Table:
    by_name: dict[str, list[Span]] = {}
    for span in sorted(
        spans, key=lambda span: (span.name not in blocks, blocks.index(span.name) if span.name in blocks else 0)
    ):
        by_name.setdefault(span.name, []).append(span)
    rows = [_row(name, found) for name, found in by_name.items()]
    rows.append(("busy in all", _size(spans), *(f"{parts[lane] * 1e3:.3f}" for lane in ("read", "copy", "wait")),
                 f"{(parts['compute'] + parts['other']) * 1e3:.3f}"))  # fmt: skip
    note = (
        f"Milliseconds within the {seconds * 1e3:.3f} ms of the pass; where several threads read at once, time is counted once. "
        "What is read ahead for the next pass is in it, and what the pass before had read is not."
    )
    return Table("One pass by block", note, ("block", "bytes read", "reading", "copying", "waiting", "computing"), rows)


def _row(name: str, spans: Sequence[Span]) -> tuple[str, ...]:
    taken = {lane: busy_seconds(span for span in spans if span.lane in lanes) for lane, lanes in
             {"read": ("read",), "copy": ("copy",), "wait": ("wait",), "compute": ("compute", "other")}.items()}  # fmt: skip
    return (name, _size(spans), *(f"{value * 1e3:.3f}" if value else "-" for value in taken.values()))


def _size(spans: Iterable[Span]) -> str:
    nbytes = sum(span.nbytes for span in spans if span.lane == "read")
    return as_size(nbytes) if nbytes else "-"
