"""`hfq convert SRC DST --to DIALECT`: the same numbers in another dialect, or an error that names what it
cannot hold.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hfq.checkpoint import Checkpoint
    from hfq.convert import ConvertReport

__all__ = ["convert"]


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The checkpoint's folder.")],
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="The folder to make; it must be absent or empty.")
    ],
    to: Annotated[str, typer.Option(help="gptq, gptq_v2, pack-quantized, fp8 or float-quantized.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Rewrite a checkpoint in another dialect that holds the same numbers, and read every layer back
    bit-equal.
    """
    from hfq.checkpoint import Checkpoint

    report = _convert(Checkpoint.open(source), target, to)
    if as_json:
        print(json.dumps({"path": str(target), "to": to, **asdict(report)}, indent=2))
        return
    print(
        f"{target}: {report.layers} layers as {to}, each read back bit-equal; {report.files} files, "
        f"{report.nbytes:,} bytes"
    )
    if report.left_out:
        print(f"left out: {', '.join(map(ascii, report.left_out))}")


def _convert(source: Checkpoint, target: Path, to: str) -> ConvertReport:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from hfq.convert import convert_checkpoint

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("convert", total=sum(info.nbytes for info in source.tensors.values()))
        return convert_checkpoint(source, target, to, lambda nbytes: bar.advance(task, nbytes))
