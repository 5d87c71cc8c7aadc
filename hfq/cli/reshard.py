"""`hfq pack SRC DST`: a copy of a checkpoint in which each block of the model is one contiguous range."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hfq.checkpoint import Checkpoint
    from hfq.checkpoint.reshard import ReshardReport

__all__ = ["pack"]


def pack(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The checkpoint's folder.")],
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="The folder to make; it must be absent or empty.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Copy a checkpoint with one aligned shard per block, which a streamer brings with one direct read."""
    from hfq.checkpoint import Checkpoint

    report = _pack(Checkpoint.open(source), target)
    if as_json:
        print(json.dumps({"path": str(target), **asdict(report)}, indent=2))
        return
    print(f"{target}: {report.blocks} blocks in {report.files} files, {report.nbytes:,} bytes")
    if report.left_out:
        print(f"left out: {', '.join(map(ascii, report.left_out))}")


def _pack(source: Checkpoint, target: Path) -> ReshardReport:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from hfq.checkpoint.reshard import reshard_checkpoint

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("pack", total=sum(info.nbytes for info in source.tensors.values()))
        return reshard_checkpoint(source, target, lambda nbytes: bar.advance(task, nbytes))
