"""`hfq convert MODEL OUT --to FORMAT`: writes the same weights in another format."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfq.cli.model_argument import Model, Out, Revision, model_folder, model_headers
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
        typer.Option(
            metavar="FILE",
            help="GGUF file of the same model, or its Hub id, whose metadata --to gguf copies.",
        ),
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
    with _opened(template) as opened:
        report = _convert(source, out, to, opened)
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


@contextlib.contextmanager
def _opened(template: str | None) -> Iterator[Checkpoint | None]:
    """Yields a template; one on the Hub is downloaded only if tensors are copied from it."""
    from hfq.checkpoint import Checkpoint
    from hfq.checkpoint.index import split_gguf_path

    if template is None:
        yield None
        return
    with model_headers(template) as found:
        opened = Checkpoint.open(found.folder)
        if found.commit is None or opened.gguf is None or not opened.gguf.checked:
            yield opened
            return
    repo, named = split_gguf_path(template)
    file = named or Path(next(iter(opened.headers))).relative_to(opened.root).as_posix()
    yield Checkpoint.open(model_folder(f"{repo}/{file}", found.commit))


def _convert(source: Checkpoint, out: str, to: str, template: Checkpoint | None) -> ConvertReport:
    from hfq.convert import convert_checkpoint
    from hfq.loading.gguf.conversion import check_template, with_model_config

    if source.gguf is not None:
        source = with_model_config(source)
    total = sum(info.nbytes for info in source.tensors.values())
    with progress_bar(total, is_bytes=True) as bar:
        return convert_checkpoint(source, out, to, bar.advance, template, check_template)
