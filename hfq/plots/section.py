"""Content of one file: facts, charts with their tables, and further tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hfq.tables import Table

__all__ = ["Drawing", "Picture", "Section", "as_size"]

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Drawing(Protocol):
    """Anything that can be drawn into an empty matplotlib figure."""

    def draw(self, figure: Any) -> None: ...


@dataclass(frozen=True)
class Picture:
    """A drawing with a text alternative and a table of its numbers.

    Attributes:
        name: File name of the picture, unique within its section.
        title: Title.
        alt: Text alternative.
        drawing: Draws the picture.
        table: Its numbers. None if a table of the section contains them.
    """

    name: str
    title: str
    alt: str
    drawing: Drawing
    table: Table | None = None


@dataclass(frozen=True)
class Section:
    """Content of one file.

    Attributes:
        title: Title.
        facts: Facts as {name: text}.
        pictures: The pictures.
        tables: Tables that belong to no picture.
        trace: The recorded timeline as Chrome trace JSON. None if nothing was recorded.
    """

    title: str
    facts: Mapping[str, str]
    pictures: Sequence[Picture]
    tables: Sequence[Table] = ()
    trace: Mapping[str, Any] | None = None


def as_size(nbytes: float) -> str:
    """Returns bytes in the largest decimal unit with at least one digit before the point."""
    return next((f"{nbytes / size:.3g} {unit}" for size, unit in _UNITS if nbytes >= size), f"{nbytes:g} B")
