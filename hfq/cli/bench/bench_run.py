"""Runs of `hfq bench`: one fresh process for each number of threads."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hfq import errors
from hfq.cli.progress_bar import ProgressBar, progress_bar
from hfq.errors import HfqError, SetupError
from hfq.machine_profile.machine_facts import machine_facts
from hfq.machine_profile.worker_process import Worker

__all__ = ["BenchOptions", "run_bench"]

_WORKER = "hfq.cli.bench.bench_worker"
_OF_MODEL = ("class", "formats", "dtype", "file_nbytes")


@dataclass(frozen=True)
class BenchOptions:
    """Options of `hfq bench`.

    Attributes:
        device_map: As in `from_pretrained`.
        max_memory: Bytes by device; None for no limits.
        dtype: Dtype of activations, or `auto`.
        n_prompt: Tokens of a prompt.
        n_gen: Tokens to generate.
        threads: Numbers of threads; None for torch's own.
        repetitions: Number of measurements of prompt and generation.
        is_compiled: True to also generate with `torch.compile`.
    """

    device_map: Any
    max_memory: dict[str, int] | None
    dtype: str
    n_prompt: int
    n_gen: int
    threads: list[int | None]
    repetitions: int
    is_compiled: bool = False


def run_bench(folder: str, options: BenchOptions) -> dict[str, Any]:
    """Measures a model.

    Args:
        folder: The checkpoint's folder.
        options: The options.

    Returns:
        The measurements, JSON-ready.

    Raises:
        HfqError: The model cannot be loaded or run, or a process ended early.
    """
    is_compiled = options.is_compiled and options.n_gen > 0
    steps = (
        3
        + is_compiled
        + options.repetitions * ((options.n_prompt > 0) + (options.n_gen > 0) + 2 * is_compiled)
    )
    with progress_bar(len(options.threads) * steps) as bar:
        runs = [_run(folder, options, threads, bar) for threads in options.threads]
    model = {name: runs[0][name] for name in _OF_MODEL}
    for run in runs:
        for name in _OF_MODEL:
            del run[name]
    given = asdict(options)
    del given["threads"]
    facts = machine_facts(Path(folder))
    return {"model": {"path": folder} | model, "options": given, "machine": facts, "runs": runs}


def _run(folder: str, options: BenchOptions, threads: int | None, bar: ProgressBar) -> dict[str, Any]:
    """Returns the measurements with one number of threads, from a process of their own."""
    of_command = ("threads", "repetitions")
    given = {name: value for name, value in asdict(options).items() if name not in of_command}
    label = "" if threads is None else f" with {threads} threads"
    with Worker(_WORKER, folder=folder, threads=threads, **given) as worker:

        def ask(step: str, what: str) -> dict[str, Any]:
            bar.update(f"{what}{label}")
            answer = _checked(worker.ask(step))
            bar.advance()
            return answer

        run = ask("load", "loading")
        ask("warm_up", "warming up")
        predicted = run.pop("predicted")
        for name, count in (("prefill", options.n_prompt), ("decode", options.n_gen)):
            if count:
                seconds = [ask(name, name)["seconds"] for _ in range(options.repetitions)]
                run |= _rates(name, count, seconds)
        run |= ask("host", "timing layers")
        run |= _checked(worker.ask("memory"))
        if options.is_compiled and options.n_gen:
            run |= ask("compile", "compiling")
            for name in ("decode_generate", "decode_compiled"):
                seconds = [ask(name, "decode")["seconds"] for _ in range(options.repetitions)]
                run |= _rates(name, options.n_gen, seconds)
    return run | {"predicted": predicted}


def _rates(name: str, tokens: int, seconds: list[float]) -> dict[str, Any]:
    rates = [tokens / each for each in seconds]
    return {
        f"{name}_tokens": tokens,
        f"{name}_seconds": seconds,
        f"{name}_tokens_per_second": statistics.mean(rates),
        f"{name}_tokens_per_second_std": statistics.stdev(rates) if len(rates) > 1 else 0.0,
    }


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer of the worker; raises the error that it tells."""
    if "hfq_error" in answer:
        kind = getattr(errors, answer["hfq_error"], HfqError)
        raise kind(**answer["fields"])
    if "error" in answer:
        raise SetupError(
            "The model could not be measured.",
            expected="a causal language model that transformers can run",
            found=answer["error"],
            fix="Run hfq doctor MODEL, which names the problem of a checkpoint or of an installation.",
        )
    return answer
