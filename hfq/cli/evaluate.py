"""`hfq evaluate MODEL… --text FILE`: measures the quality of checkpoints against their size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfq.cli.fitting_table import FittingTable
from hfq.cli.model_argument import TrustRemoteCode, model_folder
from hfq.cli.progress_bar import progress_bar
from hfq.cli.typed_options import check_dtype, parse_device_map

if TYPE_CHECKING:
    from hfq.evaluation.evaluate import Quality
    from hfq.tables import Report

__all__ = ["evaluate"]

_HEADER = (
    "checkpoint",
    "format",
    "bits/weight",
    "bits/quantized weight",
    "bytes",
    "perplexity",
    "KL mean",
    "KL p99",
    "top-1",
    "seconds",
)
_NOTE = (
    "Perplexity: exp of the mean negative log-likelihood of a token. KL: divergence of the next token, "
    "KL(reference || checkpoint), in nats. Top-1: share of tokens for which both models predict the same "
    "token. Bits per weight: bits of all stored tensors per weight. Bits per quantized weight: bits of "
    "quantized layers (codes, scales, zero points, indices, biases) per weight in them. Bytes: size of the "
    "safetensors files. Seconds: forward passes and scores, without loading."
)


Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...", help="Folders, GGUF files, or Hub ids of checkpoints, each with a tokenizer."
    ),
]
Text = Annotated[Path, typer.Option(metavar="FILE", help="UTF-8 text to measure perplexity on.")]
Revision = Annotated[
    str | None, typer.Option(metavar="REVISION", help="Branch, tag, or commit of every MODEL on the Hub.")
]
Reference = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Model to measure divergence from, for example the unquantized one."),
]
ReferenceRevision = Annotated[
    str | None,
    typer.Option(metavar="REVISION", help="Branch, tag, or commit of the reference on the Hub."),
]
MaxSeqLength = Annotated[
    int | None, typer.Option(help="Tokens per window (default: 512, or fewer if a model requires it).")
]
Stride = Annotated[
    int | None, typer.Option(help="Tokens between the starts of two windows (default: no overlap).")
]
BatchSize = Annotated[int, typer.Option(help="Windows per forward pass.")]
DeviceMap = Annotated[str, typer.Option(metavar="MAP", help="Device map: cpu, disk, auto, cuda:0, or JSON.")]
Dtype = Annotated[str, typer.Option(help="Dtype of activations: float32, bfloat16, float16, or auto.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
OutputDir = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Folder to write evaluation.md, evaluation.json, and evaluation.png into."
    ),
]


def evaluate(
    models: Models,
    text: Text,
    revision: Revision = None,
    reference: Reference = None,
    reference_revision: ReferenceRevision = None,
    max_seq_length: MaxSeqLength = None,
    stride: Stride = None,
    batch_size: BatchSize = 8,
    device_map: DeviceMap = "cpu",
    dtype: Dtype = "float32",
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    output_dir: OutputDir = None,
) -> None:
    """Measures perplexity, divergence, bits per weight, size, and time of checkpoints."""
    from hfq.evaluation.evaluate import evaluate
    from hfq.output_file import check_output_file

    parse_device_map(device_map)
    check_dtype(dtype)
    if output_dir is not None:
        check_output_file(output_dir / "evaluation.json")  # before minutes of forward passes
    folders = [model_folder(model, revision) for model in models]
    names = dict(zip(folders, models, strict=True))
    known = None if reference is None else model_folder(reference, reference_revision, "--reference-revision")
    with progress_bar(has_lines=True) as bar:
        found = evaluate(
            folders,
            text,
            reference=known,
            max_seq_length=max_seq_length,
            stride=stride,
            batch_size=batch_size,
            device_map=device_map,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            on_progress=lambda progress: bar.update(progress.step, progress.done, progress.total),
        )
    names |= {} if known is None or reference is None else {known: reference}
    rows = [replace(row, path=names.get(row.path, row.path)) for row in found]
    report = _report(rows, text, device_map, dtype)
    if output_dir is not None:
        report.write(output_dir, "evaluation")
    if as_json:
        print(report.to_json())
    else:
        _print(rows)


def _report(rows: list[Quality], text: Path, device_map: str, dtype: str) -> Report:
    from hfq.plots.charts import Scatter
    from hfq.tables import Report, Table

    names = _names(rows)
    has_reference = any(row.is_reference for row in rows)
    points = [
        (name, row.bits_per_weight, row.score.kl_mean if row.score.kl_mean is not None else 0.0)
        if has_reference
        else (name, row.bits_per_weight, row.score.perplexity)
        for name, row in zip(names, rows, strict=True)
    ]
    quality = "mean KL(reference || checkpoint), nats" if has_reference else "perplexity"
    facts = {
        "text": f"{text.name}, {rows[0].score.tokens:,} scored tokens",
        "device_map": device_map,
        "dtype": dtype,
        "reference": next((name for name, row in zip(names, rows, strict=True) if row.is_reference), "none"),
    }
    cells = [_cells(name, row) for name, row in zip(names, rows, strict=True)]
    chart = Scatter(
        "Quality against size (lower and further left is better)", "bits per weight", quality, points
    )
    return Report(
        "Quality against size",
        facts,
        [Table("Checkpoints", _NOTE, _HEADER, cells)],
        [],
        [r.to_dict() for r in rows],
        chart,
    )


def _names(rows: list[Quality]) -> list[str]:
    """Returns the names of the folders; full paths where two names are equal."""
    short = [Path(row.path).resolve().name for row in rows]
    return [name if short.count(name) == 1 else row.path for name, row in zip(short, rows, strict=True)]


def _cells(name: str, row: Quality) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    found = row.score
    return [
        f"{name} (reference)" if row.is_reference else name,
        row.formats,
        f"{row.bits_per_weight:.3f}",
        number(row.bits_per_quantized_weight, ".3f"),
        f"{row.nbytes:,}",
        f"{found.perplexity:.4f}",
        number(found.kl_mean, ".3e"),
        number(found.kl_p99, ".3e"),
        number(found.top1_agreement, ".2%"),
        number(row.seconds, ".1f"),
    ]


def _print(rows: list[Quality]) -> None:
    from hfq.cli.console import EscapingConsole

    table = FittingTable(*_HEADER, title=f"{rows[0].score.tokens:,} scored tokens")
    for name, row in zip(_names(rows), rows, strict=True):
        table.add_row(*_cells(name, row))
    EscapingConsole().print(table)
