"""`hfq convert MODEL OUT --to FORMAT`: writes the same weights in another format."""

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
    from hfq.convert import ConvertReport

__all__ = ["convert"]


def convert(
    model: Model,
    out: Out,
    to: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="Target format: gptq, gptq_v2, pack-quantized, mxfp4-pack-quantized, mxfp4 (of gpt-oss), "
            "fp8, float-quantized, or gguf.",
        ),
    ],
    template: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="GGUF file of the same model, whose metadata --to gguf copies."),
    ] = None,
    revision: Revision = None,
    push_to_hub: PushToHub = None,
    private: Private = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON summary.")] = False,
) -> None:
    """Rewrites a checkpoint in another format without changing any weight."""
    from hfq.checkpoint import Checkpoint

    source = Checkpoint.open(model_folder(model, revision))
    upload = Upload(push_to_hub, private, model)
    report = _convert(source, out, to, None if template is None else Checkpoint.open(model_folder(template)))
    url = upload.finish(out)
    if as_json:
        print(json.dumps({"path": out, "url": url, "to": to, **asdict(report)}, indent=2))
        return
    print(
        f"{out}: {report.layers} layers as {to}, each read back bit-identical; {report.files} files, "
        f"{as_size(report.nbytes)}"
    )
    if report.left_out:
        print(f"not copied: {', '.join(map(ascii, report.left_out))}")
    if url is not None:
        print(f"uploaded to {url}")


def _convert(source: Checkpoint, out: str, to: str, template: Checkpoint | None) -> ConvertReport:
    from hfq.convert import convert_checkpoint
    from hfq.loading.gguf.conversion import check_template, with_model_config

    if source.gguf is not None:
        source = with_model_config(source)
    total = sum(info.nbytes for info in source.tensors.values())
    with progress_bar(total, is_bytes=True) as bar:
        return convert_checkpoint(source, out, to, bar.advance, template, check_template)
