"""`hfq report FILE…`: pictures and one HTML page of what benches, evaluations, plans and `hfq.report` wrote
as JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="JSON of hfq.report(model).save(FILE), hfq plan, hfq eval, or a benchmark.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write into.", metavar="FOLDER")] = Path(
        "hfq-report"
    ),
    html: Annotated[
        bool, typer.Option("--html", help="Write report.html, too: all pictures and tables in one file.")
    ] = False,
) -> None:
    """Draw placement maps, timelines, quality against size and benchmarks, as PNG and as one HTML page.

    Timelines are also written as NAME.trace.json, which Perfetto (https://ui.perfetto.dev) opens.
    """
    from hfq.plots.documents import write_report

    for file in write_report(files, out, html):
        print(file)
