"""Table that fits the terminal without cutting words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfq.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["FittingTable"]

_PADDING = 3  # of one column: two spaces and a border


class FittingTable:
    """Table whose columns wrap between words.

    Too narrow terminals get lines of `heading: value`.

    Args:
        headings: Headings of the columns.
        title: Line above the table; None for no title.
    """

    def __init__(self, *headings: str, title: str | None = None) -> None:
        self._headings = headings
        self._title = title
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Adds a row with one cell per column, without control characters."""
        self._rows.append(tuple(map(printable, cells)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        if self._title is not None:
            yield Text(self._title)
        widths = self._widths(options.max_width)
        if widths is None:
            for cells in self._rows:
                yield Text("\n".join(map(": ".join, zip(self._headings, cells, strict=True))) + "\n")
            return
        table = Table()
        for heading, width in zip(self._headings, widths, strict=True):
            table.add_column(Text(heading), width=width)
        for cells in self._rows:
            table.add_row(*map(Text, cells))
        yield table

    def _widths(self, available: int) -> list[int] | None:
        """Returns the width of each column; None if the longest words do not fit."""
        from rich.cells import cell_len

        columns = [list(column) for column in zip(self._headings, *self._rows, strict=True)]
        most = [max(map(cell_len, column)) for column in columns]
        widths = [
            max(cell_len(word) for text in column for word in (text.split() or [""])) for column in columns
        ]
        free = available - _PADDING * len(columns) - 1 - sum(widths)
        if free < 0:
            return None
        while free and widths != most:
            index = max(range(len(widths)), key=lambda each: most[each] - widths[each])
            widths[index] += 1
            free -= 1
        return widths
