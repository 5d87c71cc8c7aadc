"""`hfq quantize SRC DST`: a quantized copy of a float checkpoint, made block by block."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hfq.quantization.progress import Progress, QuantizeReport

__all__ = ["quantize"]

_METHODS = (
    "gptq, awq; and, rounding to nearest: rtn (written as GPTQ), fp8, mxfp4, w8a8, w8a16 (INT8 by "
    "row), glm (GLM-130B's)."
)


def quantize(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The float checkpoint's folder.")],
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="The folder to make; it must be absent or empty.")
    ],
    method: Annotated[str, typer.Option(help=_METHODS)] = "gptq",
    bits: Annotated[
        int | None, typer.Option(help="Of gptq, awq and rtn: 2, 3, 4 or 8; of glm: 4 or 8; by default 4.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Input channels that share a scale, -1 for all; by default 128.")
    ] = None,
    symmetric: Annotated[
        bool | None, typer.Option("--symmetric/--asymmetric", help="Asymmetric codes are written as GPTQ v2.")
    ] = None,
    act_order: Annotated[
        bool | None,
        typer.Option("--act-order", help="Groups follow the order of decreasing activation (desc_act)."),
    ] = None,
    static_groups: Annotated[
        bool | None,
        typer.Option("--static-groups", help="With --act-order: groups stay those of neighbours."),
    ] = None,
    clip_search: Annotated[
        bool | None,
        typer.Option("--clip-search/--no-clip-search", help="Whether ranges are narrowed where that helps."),
    ] = None,
    damping: Annotated[
        float | None,
        typer.Option(help="Share of the Hessian's mean diagonal that is added; by default 0.05."),
    ] = None,
    recovery: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="STEPS", help="Steps of distillation of each block against the float model."
        ),
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="A module that stays floats; may be given again.")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DATASET", help="Text, or wikitext2, c4 or c4-new with the package datasets."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Sequences of the calibration set.")] = 128,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each; by default 2048, or fewer positions.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a quantized copy of a float checkpoint in a standard dialect; started again after a kill, it goes
    on where it was.
    """
    from transformers.utils import logging

    from hfq.quantization.driver import quantize as run
    from hfq.recipes.recipe import Recipe

    options: dict[str, Any] = {
        "method": method,
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": act_order,
        "static_groups": static_groups,
        "damp_percent": damping,
        "clip_search": clip_search,
        "distill_steps": recovery,
    }
    logging.disable_progress_bar()  # of transformers' loading, which reads nothing here
    with _bar() as show:
        report = run(
            source,
            Recipe.of(options),
            target,
            dataset=calibration,
            num_calibration_samples=samples,
            max_seq_length=sequence_length,
            modules_to_not_convert=skip,
            on_progress=show,
        )
    print(json.dumps(_as_dict(report), indent=2) if as_json else _summary(report))


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """On a terminal a bar, else a line for each block; both on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(progress: Progress) -> None:
            if console.is_terminal:
                bar.update(task, total=progress.blocks, completed=progress.done, description=_line(progress))
            else:
                console.print(
                    f"[{progress.done}/{progress.blocks}] {_line(progress)}",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )

        yield show


def _line(progress: Progress) -> str:
    loss = "" if math.isnan(progress.loss) else f"  loss {progress.loss:.3g}"
    eta = "" if progress.eta_seconds is None else f"  {progress.eta_seconds:,.0f} s left"
    return f"{progress.block}{loss}{eta}"


def _summary(report: QuantizeReport) -> str:
    resumed = f", {report.resumed} blocks taken from an earlier run" if report.resumed else ""
    layers = f"{len(report.layers)} layers as {report.dialect}"
    return f"{report.path}: {layers}, {report.nbytes:,} bytes in {report.seconds:,.1f} s{resumed}"


def _as_dict(report: QuantizeReport) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(report), "path": str(report.path)}
