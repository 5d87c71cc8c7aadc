"""`hfq reshard MODEL OUT`: copies a checkpoint with one contiguous range per decoder layer."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from hfq.cli.model_argument import Model, Out, Revision, model_folder
from hfq.cli.progress_bar import progress_bar
from hfq.cli.push_to_hub import Private, PushToHub, Upload
from hfq.tables import as_size

if TYPE_CHECKING:
    from hfq.checkpoint import Checkpoint
    from hfq.checkpoint.reshard import ReshardReport

__all__ = ["reshard"]


def reshard(
    model: Model,
    out: Out,
    revision: Revision = None,
    push_to_hub: PushToHub = None,
    private: Private = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON summary of the new checkpoint.")
    ] = False,
) -> None:
    """Copies a checkpoint with one aligned shard per decoder layer, for single direct reads."""
    from hfq.checkpoint import Checkpoint

    source = Checkpoint.open(model_folder(model, revision))
    upload = Upload(push_to_hub, private, model)
    report = _reshard(source, out)
    url = upload.finish(out)
    if as_json:
        print(json.dumps({"path": out, "url": url, **asdict(report)}, indent=2))
        return
    print(f"{out}: {report.decoder_layers} decoder layers in {report.files} files, {as_size(report.nbytes)}")
    if report.left_out:
        print(f"not copied: {', '.join(map(ascii, report.left_out))}")
    if url is not None:
        print(f"uploaded to {url}")


def _reshard(source: Checkpoint, out: str) -> ReshardReport:
    from hfq.checkpoint.reshard import reshard_checkpoint

    total = sum(info.nbytes for info in source.tensors.values())
    with progress_bar(total, is_bytes=True) as bar:
        return reshard_checkpoint(source, out, bar.advance)
