"""Lines of the report of `hfq doctor`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: Heading of the line.
        status: `ok`, `note`, `warning`, or `error`.
        text: The finding.
        fix: An action for the user; empty if none is needed.
    """

    section: str
    status: str
    text: str
    fix: str = ""
