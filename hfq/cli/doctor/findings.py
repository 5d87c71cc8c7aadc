"""The lines of the report of `hfq doctor`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: What it is about.
        status: `ok`, `note`, `warning` or `error`.
        text: What was found.
        fix: What can be done about it; empty where nothing need be.
    """

    section: str
    status: str
    text: str
    fix: str = ""
