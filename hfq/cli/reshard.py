"""`hfq reshard MODEL OUT`: copies a checkpoint with one contiguous range per decoder layer."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from hfq.cli.model_argument import Model, Out, Revision, model_folder

if TYPE_CHECKING:
    from hfq.checkpoint import Checkpoint
    from hfq.checkpoint.reshard import ReshardReport

__all__ = ["reshard"]


def reshard(
    model: Model,
    out: Out,
    revision: Revision = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON summary of the new checkpoint.")
    ] = False,
) -> None:
    """Copies a checkpoint with one aligned shard per decoder layer, for single direct reads."""
    from hfq.checkpoint import Checkpoint

    report = _reshard(Checkpoint.open(model_folder(model, revision)), out)
    if as_json:
        print(json.dumps({"path": out, **asdict(report)}, indent=2))
        return
    print(f"{out}: {report.decoder_layers} decoder layers in {report.files} files, {report.nbytes:,} bytes")
    if report.left_out:
        print(f"not copied: {', '.join(map(ascii, report.left_out))}")


def _reshard(source: Checkpoint, out: str) -> ReshardReport:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from hfq.checkpoint.reshard import reshard_checkpoint

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reshard", total=sum(info.nbytes for info in source.tensors.values()))
        return reshard_checkpoint(source, out, lambda nbytes: bar.advance(task, nbytes))
