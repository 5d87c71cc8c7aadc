"""`hfq plot FILE…`: draws charts of JSON results, and one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["plot"]


def plot(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="JSON from hfq.report(model).save(FILE), hfq plan, hfq evaluate, or a benchmark.",
        ),
    ],
    output_dir: Annotated[Path, typer.Option(help="Folder for the charts.", metavar="FOLDER")] = Path(
        "hfq-plots"
    ),
    html: Annotated[
        bool, typer.Option("--html", help="Also write report.html: all charts and tables in one file.")
    ] = False,
) -> None:
    """Draws placement maps, timelines, quality against size, and benchmarks.

    Every chart is a PNG. A timeline is also written as NAME.trace.json for Perfetto
    (https://ui.perfetto.dev).
    """
    from hfq.plots.documents import write_report

    for file in write_report(files, output_dir, html):
        print(file)
