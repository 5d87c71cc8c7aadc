"""The HTML page of `hfq plot`: one file without scripts or network access."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from hfq.plots.drawing import draw_svg
from hfq.plots.section import Picture, Section
from hfq.tables import Table
from hfq.version import __version__

__all__ = ["make_page"]

_MAX_OPEN_ROWS = 24
_MAX_COLUMNS_BESIDE = 5
_MAX_POINTS_BESIDE = 640.0
_NUMBER = re.compile(r"^(-|[-+]?[\d,]*\.?\d+(e[-+]?\d+)?( ?(%|s|ms|B|[kMGT]B|GB/s|tokens/s))?)$")


def make_page(sections: Sequence[Section], draw: Callable[[Picture, str], str] = draw_svg) -> str:
    """Returns the page of all sections.

    Args:
        sections: The sections, one per file, in the order of the page.
        draw: Returns a picture as an `<svg>` element. Its second argument prefixes every id.

    Raises:
        SetupError: matplotlib is not installed.
    """
    template = _environment().get_template("page.html.jinja")
    return template.render(sections=sections, draw=draw, version=__version__, max_open_rows=_MAX_OPEN_ROWS)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hfq.plots", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        split_code=_split_code,
        split_note=_split_note,
        numeric_columns=_numeric_columns,
        fits_beside_table=_fits_beside_table,
    )
    return environment


def _split_code(text: str) -> list[str]:
    """Splits text at its pairs of backticks; every second piece is code."""
    return re.split(r"`([^`]+)`", text)


def _split_note(text: str) -> list[tuple[str, list[str]]]:
    """Splits a note into paragraphs, each with the items of the list that follows it."""
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        lead, *items = re.split(r"^- ", paragraph, flags=re.MULTILINE)
        paragraphs.append((lead.strip(), [item.strip() for item in items]))
    return paragraphs


def _numeric_columns(table: Table) -> list[bool]:
    """Returns, for each column, True if it has cells and all of them are numbers."""
    columns = range(len(table.header))
    return [bool(table.rows) and all(_NUMBER.match(row[column]) for row in table.rows) for column in columns]


def _fits_beside_table(picture: Picture, svg: str) -> bool:
    """True if a wide screen has room for the picture and its table side by side."""
    if picture.table is None or len(picture.table.header) > _MAX_COLUMNS_BESIDE:
        return False
    width = re.search(r'\bwidth="([\d.]+)pt"', svg)
    return width is None or float(width[1]) <= _MAX_POINTS_BESIDE
