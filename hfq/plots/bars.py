"""Horizontal stacked bars in bytes, with a mark at each limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hfq.plots.drawing import COLOURS, INK, MUTED
from hfq.plots.section import Picture, as_size
from hfq.tables import Table

__all__ = ["Bars", "bars_picture"]


@dataclass(frozen=True)
class Bars:
    """One bar per name.

    Attributes:
        names: Names of the bars, from top to bottom.
        parts: {part: bytes in each bar}.
        limits: Limit of each bar in bytes. None for no limit.
    """

    names: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    limits: Sequence[float | None]

    def draw(self, figure: Any) -> None:
        """Draws the bars into an empty matplotlib figure."""
        from matplotlib.lines import Line2D
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        figure.set_size_inches(8, 1.7 + 0.42 * len(self.names))
        axes = figure.subplots()
        left = [0.0] * len(self.names)
        handles: list[Any] = []
        for place, (part, sizes) in enumerate(self.parts.items()):
            if any(sizes):
                colour = (*COLOURS, MUTED)[place % (len(COLOURS) + 1)]
                handles.append(
                    axes.barh(range(len(self.names)), sizes, 0.66, left=left, color=colour, label=part)
                )
                left = [before + size for before, size in zip(left, sizes, strict=True)]
        widest = max(left, default=0.0)
        near = [limit for limit in self.limits if limit is not None and limit <= 1.6 * widest]
        for place, limit in enumerate(self.limits):
            if limit is not None and limit in near:
                axes.plot([limit, limit], [place - 0.45, place + 0.45], color=INK, linewidth=2)
        if near:
            handles.append(Line2D([], [], color=INK, linewidth=2, label="limit"))
        for place, total in enumerate(left):
            limit = self.limits[place]
            text = as_size(total) if limit is None else f"{as_size(total)} of {as_size(limit)}"
            beyond = max(total, limit if limit in near and limit is not None else 0.0)
            axes.text(beyond + 0.01 * (widest or 1), place, text, va="center", ha="left", fontsize=9)
        axes.set_yticks(range(len(self.names)), self.names)
        axes.set_ylim(len(self.names) - 0.4, -0.6)
        axes.set_xlim(0, max([widest, *near]) * 1.34 or 1)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: as_size(nbytes)))
        figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=9)


def bars_picture(name: str, title: str, bars: Bars, note: str, of: str) -> Picture:
    """Returns the bars with their table.

    Args:
        name: Name of the picture's file.
        title: Title.
        bars: The bars.
        note: Explanation of the table's numbers.
        of: Meaning of a bar, such as "device".
    """
    totals = [sum(sizes[place] for sizes in bars.parts.values()) for place in range(len(bars.names))]
    said = ", ".join(f"{bar} {as_size(total)}" for bar, total in zip(bars.names, totals, strict=True))
    rows = [
        (
            bar,
            *(f"{sizes[place]:,.0f}" for sizes in bars.parts.values()),
            f"{totals[place]:,.0f}",
            _limit(bars.limits[place]),
        )
        for place, bar in enumerate(bars.names)
    ]
    table = Table(title, note, (of, *bars.parts, "total", "limit"), rows)
    return Picture(name, title, f"One bar per {of}, stacked by the use of its bytes: {said}.", bars, table)


def _limit(limit: float | None) -> str:
    return "-" if limit is None else f"{limit:,.0f}"
