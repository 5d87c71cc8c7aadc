"""Console that shows text of a checkpoint without its control characters.

Escape sequences could rename the terminal or hide text, and bidirectional characters could reorder it.
"""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

from hfq.errors import printable

__all__ = ["EscapingConsole", "escaped"]

_WIDTH = 150
"""Characters of a line where no terminal sets a width."""


class EscapingConsole(Console):
    """Console that prints markup as it is, and control characters as escapes such as `\\x1b`.

    A terminal or COLUMNS sets the width. Pipes and files get 150 characters.
    """

    def __init__(self) -> None:
        super().__init__(markup=False, highlight=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _WIDTH

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints objects; text without its control characters other than line ends."""
        super().print(*(escaped(item) if isinstance(item, str) else item for item in objects), **options)


def escaped(text: str) -> str:
    """Returns a text of several lines with control characters escaped."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
