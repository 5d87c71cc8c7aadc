"""What one file becomes: facts, pictures with their tables, and further tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hfq.tables import Table

__all__ = ["Drawing", "Picture", "Section", "as_size"]

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class Drawing(Protocol):
    """What can be drawn into an empty figure of matplotlib."""

    def draw(self, figure: Any) -> None: ...


@dataclass(frozen=True)
class Picture:
    """A drawing, what it says in words for those who do not see it, and the table of its numbers.

    Attributes:
        name: Names its file, among the pictures of its section.
        title: What it shows.
        alt: What is to be seen on it.
        drawing: Draws it.
        table: Its numbers; None where a table of the section has them.
    """

    name: str
    title: str
    alt: str
    drawing: Drawing
    table: Table | None = None


@dataclass(frozen=True)
class Section:
    """One file.

    Attributes:
        title: What it is about.
        facts: What is known of it, as text by what it is.
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
    """Bytes in the largest unit of ten that leaves one digit or more before the point."""
    return next((f"{nbytes / size:.3g} {unit}" for size, unit in _UNITS if nbytes >= size), f"{nbytes:g} B")
