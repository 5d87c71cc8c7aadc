"""`python -m benchmarks NAME`: one table of benchmarks, and one command that runs them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfq.errors import HfqError, SetupError, nearest

if TYPE_CHECKING:
    from hfq.tables import Report

__all__ = ["BENCHMARKS", "Benchmark", "Options", "app", "main"]

QUICK_NBYTES = 24e6


@dataclass(frozen=True)
class Options:
    """Options of one run.

    Attributes:
        folder: Folder that keeps checkpoints and trained models between runs.
        size: Size of the bfloat16 checkpoint in bytes. Quantized ones have the same architecture.
        rounds: Number of rounds. A round measures everything once.
        quick: True if the run tests the benchmark, without useful measurements.
        threads: Numbers of threads. None means the benchmark's defaults.
        models: Checkpoints of the user: measured by `plan`, trained models for `quantize`. Recordings of routing
            for `experts`.
        ranks: Local ranks under ZeRO-3. 0 means none.
        shapes: Names of layer shapes. None means all.
        rows: Numbers of activation rows. None means the benchmark's defaults.
        cases: Parts of the names of rows. None means all.
        keep: True to keep random models, and to use those of an earlier run.
    """

    folder: Path
    size: float
    rounds: int
    quick: bool
    threads: list[int] | None
    models: list[Path]
    ranks: int
    shapes: list[str] | None
    rows: list[int] | None
    cases: list[str] | None = None
    keep: bool = False


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        run: Measures, and returns the report.
        size: Default size of the bfloat16 checkpoint in bytes. 0 if the benchmark reads no checkpoint.
        help: Help line of the command.
        rounds: Default number of rounds.
        own: Options that only some benchmarks accept.
        check: Raises HfqError if the report does not meet the benchmark's requirements. None means no check.
    """

    run: Callable[[Options], Report]
    size: float
    help: str
    rounds: int = 3
    own: tuple[str, ...] = ()
    check: Callable[[Report], None] | None = None


def _load(options: Options) -> Report:
    from benchmarks.load.bench_load import bench_load

    return bench_load(options.folder, options.size, options.rounds, _say)


def _large(options: Options) -> Report:
    from benchmarks.load.bench_large import bench_large

    return bench_large(options.folder, options.rounds, _say, options.quick)


def _memory(options: Options) -> Report:
    from benchmarks.memory import bench_memory

    return bench_memory(options.folder, options.size, options.rounds, _say)


def _stream(options: Options) -> Report:
    from benchmarks.stream.bench_stream import bench_stream

    return bench_stream(options.folder, options.size, options.rounds, _say)


def _kernels(options: Options) -> Report:
    from benchmarks.kernels.bench_kernels import ROWS, SHAPES, bench_kernels

    shapes, rows = options.shapes or list(SHAPES), options.rows or ROWS
    for name in shapes:
        if name not in SHAPES:
            raise SetupError(
                f"--shape {name!r} is not a shape.{nearest(name, SHAPES)}",
                expected=", ".join(SHAPES),
                found=name,
                fix="Pass one of these names.",
            )
    if options.quick:
        shapes, rows = ["MoE expert"], [1, 8]
    return bench_kernels(shapes, rows, options.rounds, options.threads or _all_threads(), _say)


def _blocks(options: Options) -> Report:
    from benchmarks.kernels.bench_blocks import NAMES, ROWS, SHAPE, bench_blocks

    threads, shape = options.threads or _all_threads(), (768, 2048) if options.quick else SHAPE
    return bench_blocks(NAMES, options.rows or ROWS, options.rounds, threads, _say, shape)


def _generate(options: Options) -> Report:
    from benchmarks.generate import bench_generate

    threads = options.threads or _all_threads()
    return bench_generate(options.folder, options.size, options.rounds, threads, _say)


def _plan(options: Options) -> Report:
    from benchmarks.plan.bench_plan import bench_plan

    return bench_plan(
        options.folder, options.models, options.size, options.rounds, _say, options.ranks, options.quick
    )


def _quantize(options: Options) -> Report:
    from benchmarks.quantize.bench_quantize import bench_quantize

    threads = options.threads or [1]
    if len(threads) > 1:
        raise SetupError(
            "quantize accepts only one number of threads.",
            expected="--threads once",
            found=", ".join(map(str, threads)),
            fix="Run it once for each number of threads.",
        )
    return bench_quantize(options.folder, options.size, options.rounds, options.models, _say, threads[0])


def _qmoe(options: Options) -> Report:
    from benchmarks.qmoe import bench_qmoe

    threads = options.threads or _all_threads()
    return bench_qmoe(options.folder, threads, options.rounds, options.quick, _say)


def _real_sizes(options: Options) -> Report:
    from benchmarks.real_sizes.bench_real_sizes import bench_real_sizes

    threads = (options.threads or _all_threads())[-1]
    chosen = options.shapes, options.cases
    return bench_real_sizes(
        options.folder, *chosen, threads, options.rounds, options.quick, options.keep, _say
    )


def _fms(options: Options) -> Report:
    from benchmarks.fms.bench_fms import bench_fms

    return bench_fms(options.folder, options.size, options.rounds, _say)


def _quality(options: Options) -> Report:
    from benchmarks.quality.bench_quality import bench_quality

    return bench_quality(options.folder, options.quick, _say)


def _experts(options: Options) -> Report:
    from benchmarks.experts.bench_experts import bench_experts

    return bench_experts(options.folder, options.models, options.quick, _say)


def _speculation(options: Options) -> Report:
    from benchmarks.speculation.bench_speculation import bench_speculation

    return bench_speculation(options.folder, options.rounds, options.quick, _say)


def _check_quality(report: Report) -> None:
    from benchmarks.quality.bench_quality import check_orderings

    check_orderings(report)


BENCHMARKS = {
    "load": Benchmark(
        _load, 2.4e9, "Time, memory, and reads of loading: hfq, transformers, and safetensors, cold and warm."
    ),
    "large": Benchmark(_large, 0, "CPU time and memory of planning and loading models of 30B and 671B."),
    "memory": Benchmark(
        _memory, 6.4e9, "Peak memory against model size: plain transformers and hfq, in memory and on disk."
    ),
    "stream": Benchmark(
        _stream,
        2.4e9,
        "Forward passes with all layers on a cold disk: hfq, accelerate, and the disk's limit.",
    ),
    "kernels": Benchmark(
        _kernels,
        0,
        "Products with quantized weights on the CPU, against torch and the memory's bandwidth.",
        rounds=9,
        own=("--threads", "--shape", "--rows"),
    ),
    "blocks": Benchmark(
        _blocks,
        0,
        "Products with GGUF's blocks on the CPU, against ggml's own.",
        rounds=9,
        own=("--threads", "--rows"),
    ),
    "generate": Benchmark(
        _generate,
        2.4e9,
        "Tokens per second of a model on the CPU, against bfloat16 in plain transformers.",
        own=("--threads",),
    ),
    "plan": Benchmark(
        _plan,
        2e9,
        "Planned and measured bytes, predicted and measured tokens per second.",
        own=("--model", "--ranks"),
    ),
    "quantize": Benchmark(
        _quantize,
        2.3e9,
        "Memory, time, and quality of quantizing to GPTQ and FP8, against gptqmodel.",
        own=("--model", "--threads"),
    ),
    "qmoe": Benchmark(
        _qmoe,
        0,
        "QMoE's codes: bits per weight, decoding, and disk rates against 2 bits.",
        rounds=9,
        own=("--threads",),
    ),
    "experts": Benchmark(
        _experts, 0, "Hit rates of cache policies on recorded and random routing.", own=("--model",)
    ),
    "speculation": Benchmark(
        _speculation, 0, "Passes and bytes per token of drafted tokens, with layers or experts on disk."
    ),
    "real_sizes": Benchmark(
        _real_sizes,
        0,
        "Whole models of 8B to 671B, resident and with little memory, against llama.cpp. Needs 45 GB of disk.",
        own=("--threads", "--shape", "--case", "--keep"),
    ),
    "fms": Benchmark(
        _fms, 1.2e9, "IBM's Foundation Model Stack by itself and with hfq (Python 3.11 or 3.12)."
    ),
    "quality": Benchmark(
        _quality,
        0,
        "Published tables of quality, on small models that are trained here.",
        check=_check_quality,
    ),
}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog="\n\n".join(f"{name}: {each.help}" for name, each in BENCHMARKS.items()))
def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(BENCHMARKS)}.")],
    folder: Annotated[
        Path | None, typer.Option(help="Keeps checkpoints between runs; by default in the user's cache.")
    ] = None,
    size: Annotated[float | None, typer.Option(help="Bytes of the bfloat16 checkpoint.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of interleaved rounds.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes and one round: a check, not a measurement.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of markdown.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write NAME.md, NAME.json, and NAME.png here.")
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(min=1, help="kernels, blocks, generate, quantize, qmoe, real_sizes: threads."),
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(help="plan: a checkpoint. quantize: a trained model. experts: a recording of routing."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=0, help="plan: local ranks under ZeRO-3; by default 2.")
    ] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="kernels: a layer shape. real_sizes: a model. By default all.")
    ] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="kernels, blocks: activation rows.")] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="real_sizes: rows with this text in their name. By default all.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="real_sizes: keep the models, and use those of an earlier run.")
    ] = False,
) -> None:
    """Run one benchmark, print its report, and print its targets on standard error."""
    from hfq.machine_profile.measure_machine import default_folder

    own = {"--threads": threads, "--model": model, "--ranks": ranks, "--shape": shape, "--rows": rows}
    own |= {"--case": case, "--keep": keep or None}
    found = _find(name, [option for option, value in own.items() if value is not None])
    options = Options(
        folder=folder or default_folder(),
        size=QUICK_NBYTES if quick else size or found.size,
        rounds=1 if quick else rounds or found.rounds,
        quick=quick,
        threads=threads,
        models=model or [],
        ranks=2 if ranks is None else ranks,
        shapes=shape,
        rows=rows,
        cases=case,
        keep=keep,
    )
    report = found.run(options)
    _show(report, name, as_json, out)
    if found.check is not None:
        found.check(report)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command. An HfqError is printed without a traceback, with exit status 1.

    Args:
        arguments: Name and options. None means those of the process.
    """
    try:
        app(arguments, prog_name="python -m benchmarks")
    except HfqError as error:
        _say(f"{type(error).__name__}: {error}")
        sys.exit(1)


def _find(name: str, given: Sequence[str]) -> Benchmark:
    """Returns the benchmark of this name, and checks that it accepts all given options."""
    if name not in BENCHMARKS:
        raise SetupError(
            f"{name!r} is not a benchmark.{nearest(name, BENCHMARKS)}",
            expected=", ".join(BENCHMARKS),
            found=name,
            fix="Pass one of these names.",
        )
    found = BENCHMARKS[name]
    for option in given:
        if option not in found.own:
            raise SetupError(
                f"{name} does not accept {option}.",
                expected=", ".join(found.own) or f"no special option for {name}",
                found=option,
                fix=f"Remove {option}.",
            )
    return found


def _all_threads() -> list[int]:
    """Returns one thread, and all threads."""
    import torch

    return sorted({1, torch.get_num_threads()})


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(report: Report, name: str, as_json: bool, out: Path | None) -> None:
    if out is not None:
        report.write(out, name)
    print(report.to_json() if as_json else report.to_markdown(f"{name}.png" if out else None))
    for target in report.targets:
        _say(str(target))
