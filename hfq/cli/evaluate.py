"""`hfq eval PATH… --text FILE`: what checkpoints keep of a text and of the model they were made from, against
their size.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hfq.evaluation.evaluate import Quality
    from hfq.tables import Report

__all__ = ["evaluate"]

_HEADER = (
    "checkpoint",
    "dialect",
    "bits/weight",
    "bits/packed weight",
    "bytes",
    "perplexity",
    "KL mean",
    "KL p99",
    "top-1",
    "seconds",
)
_NOTE = (
    "Perplexity: exp of the mean negative log-likelihood of a token. KL(reference || checkpoint) of the next "
    "token, in nats, and the "
    "share of tokens for which both hold the same one likeliest. Bits per weight: all stored tensors over "
    "all weights, and packed "
    "layers (codes, scales, zero points, indices, biases) over their own. Bytes: the safetensors files. "
    "Seconds: forwards and scores, "
    "without loading."
)


def evaluate(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="The checkpoints' folders, each with its tokenizer."),
    ],
    text: Annotated[Path, typer.Option(help="A text file in UTF-8.")],
    reference: Annotated[
        Path | None, typer.Option(help="The model to compare with, as the one they were made from.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens of a window; by default 512, or what the models take.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="How far apart windows begin; by default they do not overlap.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Windows of a forward.")] = 8,
    placement: Annotated[str, typer.Option(help="cpu, disk, auto, cuda:0, or a device map in JSON.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Of activations: float32, bfloat16, float16, or auto.")
    ] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write eval.md, eval.json and eval.png into this folder, too.")
    ] = None,
) -> None:
    """Score checkpoints on a text: perplexity, divergence from a reference, bits per weight, bytes,
    seconds.
    """
    from hfq.evaluation.evaluate import evaluate

    rows = evaluate(
        paths,
        text,
        reference=reference,
        sequence_length=sequence_length,
        stride=stride,
        batch_size=batch,
        placement=placement,
        dtype=dtype,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    report = _report(rows, text, placement, dtype)
    if out is not None:
        report.write(out, "eval")
    if as_json:
        print(report.to_json())
    else:
        _print(rows)


def _report(rows: list[Quality], text: Path, placement: str, dtype: str) -> Report:
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
        "placement": placement,
        "dtype of activations": dtype,
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
    """The folders' names; whole paths where two have the same."""
    short = [Path(row.path).resolve().name for row in rows]
    return [name if short.count(name) == 1 else row.path for name, row in zip(short, rows, strict=True)]


def _cells(name: str, row: Quality) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    found = row.score
    return [
        f"{name} (reference)" if row.is_reference else name,
        row.variants,
        f"{row.bits_per_weight:.3f}",
        number(row.bits_per_packed_weight, ".3f"),
        f"{row.nbytes:,}",
        f"{found.perplexity:.4f}",
        number(found.kl_mean, ".3e"),
        number(found.kl_p99, ".3e"),
        number(found.top1_agreement, ".2%"),
        number(row.seconds, ".1f"),
    ]


def _print(rows: list[Quality]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*_HEADER, title=f"{rows[0].score.tokens:,} scored tokens")
    for name, row in zip(_names(rows), rows, strict=True):
        table.add_row(*_cells(name, row))
    console = Console(markup=False)
    Console(width=max(console.width, 150), markup=False).print(table)
