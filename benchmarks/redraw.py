"""`python -m benchmarks.redraw FILE.json …`: draws the charts of recorded results again, without measuring."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hfq.errors import SetupError
from hfq.plots.benches import read_chart
from hfq.plots.fields import Fields
from hfq.tables import draw_chart

__all__ = ["redraw"]


def redraw(file: Path) -> Path:
    """Writes the chart of a result next to it, and returns the path of the picture.

    Raises:
        HfqError: The file has no chart, or matplotlib is not installed.
    """
    document = json.loads(file.read_text(encoding="utf-8"))
    picture = file.with_suffix(".png")
    if not draw_chart(read_chart(Fields(document, file).object("chart")), document["facts"], picture):
        raise SetupError(
            f"{picture} cannot be drawn.",
            expected="matplotlib",
            found="it is not installed",
            fix="pip install hfq[plots]",
        )
    return picture


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(redraw(Path(name)))
