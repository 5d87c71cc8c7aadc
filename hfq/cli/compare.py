"""`hfq compare A B`: checks whether two checkpoints or placements are the same model."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfq.cli.fitting_table import FittingTable
from hfq.cli.model_argument import TrustRemoteCode, model_folder
from hfq.cli.progress_bar import progress_bar
from hfq.cli.typed_options import as_typed, parse_device_map

if TYPE_CHECKING:
    from hfq.evaluation.compare import Comparison

__all__ = ["compare"]

_MOST_ROWS = 40


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="Folder, GGUF file, or Hub id of a checkpoint.")],
    second: Annotated[
        str,
        typer.Argument(metavar="B", help="Folder, GGUF file, or Hub id of another checkpoint, or A again."),
    ],
    revision_a: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Branch, tag, or commit of A on the Hub.")
    ] = None,
    revision_b: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Branch, tag, or commit of B on the Hub.")
    ] = None,
    device_map_a: Annotated[
        str, typer.Option(metavar="MAP", help="Device map of A: cpu, disk, auto, cuda:0, or JSON.")
    ] = "cpu",
    device_map_b: Annotated[
        str, typer.Option(metavar="MAP", help="Device map of B: cpu, disk, auto, cuda:0, or JSON.")
    ] = "cpu",
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text whose first tokens are the prompt (default: fixed random tokens)."
        ),
    ] = None,
    logits: Annotated[bool, typer.Option(help="Compare the logits of both models on the prompt.")] = True,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with the SHA-256 of every tensor.")
    ] = False,
) -> None:
    """Compares two models by bytes, numbers, and logits.

    The exit status is 0 if they are equal, 1 if they differ, and 2 if they cannot be compared.
    """
    from hfq.errors import HfqError
    from hfq.evaluation.compare import compare as run

    try:
        maps = (
            parse_device_map(device_map_a, "--device-map-a"),
            parse_device_map(device_map_b, "--device-map-b"),
        )
        folders = (
            model_folder(first, revision_a, "--revision-a"),
            model_folder(second, revision_b, "--revision-b"),
        )
        with progress_bar() as bar:
            models = []
            for name, folder, device_map in zip("ab", folders, maps, strict=True):
                bar.update(f"loading {name.upper()}")
                models.append(_load(folder, device_map, trust_remote_code, f"--device-map-{name}"))
            found = run(
                *models,
                text=text,
                logits=logits,
                trust_remote_code=trust_remote_code,
                on_progress=lambda progress: bar.update(progress.step, progress.done, progress.total),
            )
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


def _load(folder: str, device_map: Any, trust_remote_code: bool, option: str) -> Any:
    """Loads a model as `hfq.compare` does, with errors that name the option of its device map."""
    from hfq.errors import HfqError
    from hfq.evaluation.compare import load_exactly

    try:
        return load_exactly(folder, device_map, trust_remote_code)
    except HfqError as error:
        raise as_typed(error, {"device_map": option}) from error


def _print(found: Comparison) -> None:
    from hfq.cli.console import EscapingConsole

    console = EscapingConsole()
    console.print(f"A: {found.first}\nB: {found.second}\n{found.verdict}")
    console.print(f"{found.identical} of {found.weights} weights have the same bytes")
    if found.differences:
        table = FittingTable("weight", "B is", "A", "B", "max abs", "relative L2")
        for each in found.differences[:_MOST_ROWS]:
            apart = each.distance
            numbers = ("-", "-") if apart is None else (f"{apart.max_abs:.3e}", f"{apart.relative_l2:.3e}")
            table.add_row(each.name, each.kind, each.first or "-", each.second or "-", *numbers)
        console.print(table)
        kinds = Counter(each.kind for each in found.differences)
        console.print(
            f"{len(found.differences)} differ: "
            f"{', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
        )
    if found.logits is not None:
        logits = found.logits
        equal = "bit-identical" if logits.is_equal else "not bit-identical"
        console.print(
            f"logits of {logits.tokens} tokens: {equal}, max abs {logits.max_abs:.3e}, relative L2 "
            f"{logits.relative_l2:.3e}, "
            f"KL(A || B) {logits.kl_mean:.3e} nats, top-1 agreement {logits.top1_agreement:.2%}"
        )
