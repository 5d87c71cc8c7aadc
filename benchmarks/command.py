"""`hfq bench load`, `stream`, `kernels`, `generate`, `plan`, `quantize`, `fms`, `quality`: costs, against limits and other tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hfq.tables import Report

__all__ = ["bench"]

QUICK_NBYTES = 24e6

bench = typer.Typer(
    no_args_is_help=True, help="Measure loading, streaming and kernels on this machine, against its limits and other tools."
)

Folder = Annotated[Path | None, typer.Option(help="Holds the checkpoints between runs; by default in the user's cache.")]
Size = Annotated[float, typer.Option(help="Bytes of the bfloat16 checkpoint; the packed ones have the same architecture.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often everything is measured, interleaved.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="A small checkpoint and one round: checks that it works, measures nothing.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON in place of markdown.")]
Out = Annotated[Path | None, typer.Option(help="Write NAME.md, NAME.json and NAME.png into this folder, too.")]


@bench.command("load")
def load(
    folder: Folder = None,
    size: Size = 2.4e9,
    rounds: Rounds = 3,
    quick: Quick = False,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Time, memory and reads of loading: hfq, transformers and safetensors, cold and warm."""
    from benchmarks.load.bench_load import bench_load
    from hfq.machine_profile.probe_models import default_folder

    size, rounds = (QUICK_NBYTES, 1) if quick else (size, rounds)
    _show(bench_load(folder or default_folder(), size, rounds, _say), "load", as_json, out)


@bench.command("stream")
def stream(
    folder: Folder = None,
    size: Size = 2.4e9,
    rounds: Rounds = 3,
    quick: Quick = False,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Forwards with all layers on a cold disk: hfq, accelerate's offload and the disk's limit, with and without compute."""
    from benchmarks.stream.bench_stream import bench_stream
    from hfq.machine_profile.probe_models import default_folder

    size, rounds = (QUICK_NBYTES, 1) if quick else (size, rounds)
    _show(bench_stream(folder or default_folder(), size, rounds, _say), "stream", as_json, out)


@bench.command("fms")
def fms(
    folder: Folder = None,
    size: Size = 1.2e9,
    rounds: Rounds = 3,
    quick: Quick = False,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """IBM's Foundation Model Stack by itself and with hfq: what loads, how exactly, its time and memory."""
    from benchmarks.fms.bench_fms import bench_fms
    from hfq.machine_profile.probe_models import default_folder

    size, rounds = (QUICK_NBYTES, 1) if quick else (size, rounds)
    _show(bench_fms(folder or default_folder(), size, rounds, _say), "fms", as_json, out)


@bench.command("plan")
def plan(
    checkpoint: Annotated[
        list[Path] | None, typer.Argument(metavar="[CHECKPOINT]...", help="Measured beside generated ones.")
    ] = None,
    folder: Folder = None,
    size: Annotated[float, typer.Option(help="Bytes of each of the two generated checkpoints.")] = 2e9,
    rounds: Rounds = 3,
    ranks: Annotated[int, typer.Option(min=0, help="Local ranks under ZeRO-3; 0 for none.")] = 2,
    quick: Quick = False,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Planned against measured bytes, predicted against achieved tokens per second, in memory, on disk and under ZeRO-3."""
    from benchmarks.plan.bench_plan import bench_plan
    from hfq.machine_profile.probe_models import default_folder

    size, rounds = (QUICK_NBYTES, 1) if quick else (size, rounds)
    _show(bench_plan(folder or default_folder(), checkpoint or [], size, rounds, _say, ranks, quick), "plan", as_json, out)


@bench.command("kernels")
def kernels(
    shape: Annotated[list[str] | None, typer.Option(help="One of the shapes, by name; by default all of them.")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Activation rows; by default 1, 8, 128 and 512.")] = None,
    threads: Annotated[list[int] | None, typer.Option(min=1, help="Threads; by default one, and all.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured, interleaved.")] = 9,
    quick: Annotated[bool, typer.Option("--quick", help="One small shape, one round: checks that it works.")] = False,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Products with packed weights on this CPU, against torch's with bfloat16 weights and the memory's bandwidth."""
    import torch

    from benchmarks.kernels.bench_kernels import ROWS, SHAPES, bench_kernels
    from hfq.errors import SetupError

    for name in shape or []:
        if name not in SHAPES:
            raise SetupError(f"There is no shape {name!r}.", expected=", ".join(SHAPES), found=name, fix="correct --shape")
    if quick:
        shape, rows, rounds = ["MoE expert"], [1, 8], 1
    counts = threads or sorted({1, torch.get_num_threads()})
    _show(bench_kernels(shape or list(SHAPES), rows or ROWS, rounds, counts, _say), "kernels", as_json, out)


@bench.command("generate")
def generate(
    folder: Folder = None,
    size: Size = 2.4e9,
    rounds: Rounds = 3,
    threads: Annotated[list[int] | None, typer.Option(min=1, help="Threads; by default one, and all.")] = None,
    quick: Quick = False,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Tokens per second of a whole model on this CPU: packed weights in hfq against bfloat16 in plain transformers."""
    import torch

    from benchmarks.generate import bench_generate
    from hfq.machine_profile.probe_models import default_folder

    size, rounds = (QUICK_NBYTES, 1) if quick else (size, rounds)
    counts = threads or sorted({1, torch.get_num_threads()})
    _show(bench_generate(folder or default_folder(), size, rounds, counts, _say), "generate", as_json, out)


@bench.command("quantize")
def quantize(
    folder: Folder = None,
    size: Size = 2.3e9,
    rounds: Rounds = 3,
    trained: Annotated[
        list[Path] | None, typer.Option(help="A small trained model, with its tokenizer and held_out.txt; may be given again.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads.")] = 1,
    quick: Quick = False,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Memory, time and quality of quantizing to GPTQ and FP8, against the promised bound and gptqmodel."""
    from benchmarks.quantize.bench_quantize import bench_quantize
    from hfq.machine_profile.probe_models import default_folder

    size, rounds = (QUICK_NBYTES, 1) if quick else (size, rounds)
    _show(bench_quantize(folder or default_folder(), size, rounds, trained or [], _say, threads), "quantize", as_json, out)


@bench.command("quality")
def quality(
    folder: Annotated[
        Path | None, typer.Option(help="Holds the trained models between runs; by default in the user's cache.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model and a few rows: under a minute.")] = False,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """The published tables of perplexities on small models that are trained here; fails where their orderings do not hold."""
    from benchmarks.quality.bench_quality import bench_quality, check_orderings
    from hfq.machine_profile.probe_models import default_folder

    report = bench_quality(folder or default_folder(), quick, _say)
    _show(report, "quality", as_json, out)
    check_orderings(report)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(report: Report, name: str, as_json: bool, out: Path | None) -> None:
    if out is not None:
        report.write(out, name)
    print(report.to_json() if as_json else report.to_markdown(f"{name}.png" if out else None))
    for target in report.targets:
        _say(str(target))
