"""`hfq compare A B`: whether two checkpoints, or two placements of one, are the same model."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfq.cli.model_argument import model_folder

if TYPE_CHECKING:
    from hfq.evaluation.compare import Comparison

__all__ = ["compare"]

_MOST_ROWS = 40


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="Folder or Hub id of a checkpoint.")],
    second: Annotated[
        str, typer.Argument(metavar="B", help="Another one, or the same one to compare two placements.")
    ],
    revision_a: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Branch, tag, or commit of A on the Hub.")
    ] = None,
    revision_b: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Branch, tag, or commit of B on the Hub.")
    ] = None,
    device_map_a: Annotated[
        str, typer.Option(metavar="MAP", help="Of A: cpu, disk, auto, cuda:0, or a device map as JSON.")
    ] = "cpu",
    device_map_b: Annotated[str, typer.Option(metavar="MAP", help="Of B.")] = "cpu",
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text whose first tokens are the prompt; by default fixed random ids."
        ),
    ] = None,
    logits: Annotated[bool, typer.Option(help="Also run both models on the prompt.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON, with the sha256 of every tensor.")
    ] = False,
) -> None:
    """Compares two models by bytes, numbers, and logits.

    The exit status is 0 if they are equal, 1 if they differ, and 2 if they cannot be compared.
    """
    from hfq.errors import HfqError
    from hfq.evaluation.compare import compare as run

    try:
        folders = model_folder(first, revision_a), model_folder(second, revision_b)
        found = run(*folders, device_map_a=device_map_a, device_map_b=device_map_b, text=text, logits=logits)
    except HfqError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    found = replace(found, first=first, second=second)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        _print(found)
    if not found.equal:
        raise typer.Exit(1)


def _print(found: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    console.print(f"A: {found.first}\nB: {found.second}\n{found.verdict}")
    console.print(f"{found.identical} of {found.weights} weights have the same bytes")
    if found.differences:
        table = Table("weight", "B is", "A", "B", "max abs", "relative L2")
        for each in found.differences[:_MOST_ROWS]:
            apart = each.distance
            numbers = ("-", "-") if apart is None else (f"{apart.max_abs:.3e}", f"{apart.relative_l2:.3e}")
            table.add_row(each.name, each.kind, each.first or "-", each.second or "-", *numbers)
        Console(width=max(console.width, 130), markup=False).print(table)
        kinds = Counter(each.kind for each in found.differences)
        console.print(
            f"{len(found.differences)} differ: "
            f"{', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
        )
    if found.logits is not None:
        logits = found.logits
        equal = "bit-equal" if logits.is_equal else "not bit-equal"
        console.print(
            f"logits of {logits.tokens} tokens: {equal}, max abs {logits.max_abs:.3e}, relative L2 "
            f"{logits.relative_l2:.3e}, "
            f"KL(A || B) {logits.kl_mean:.3e} nats, top-1 agreement {logits.top1_agreement:.2%}"
        )
