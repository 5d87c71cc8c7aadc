"""`python -m benchmarks large`: CPU time and memory of planning and loading large models.

The checkpoints have the tensors of published models, in sparse files. Each measurement has its own process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.checkpoints import checkpoint_files
from benchmarks.load.large_models import make_large
from benchmarks.memory_limits import warm_cache
from benchmarks.records import Record, median
from hfq.machine_profile.machine_facts import machine_facts
from hfq.machine_profile.worker_process import Worker
from hfq.plots.charts import Chart
from hfq.tables import Report, Table, Target

__all__ = ["bench_large"]

_WORKER = "benchmarks.load.large_worker"
_CASES = (
    ("qwen3-30b-gptq4", "cpu", "load"),
    ("deepseek-v3-fp8", "disk", "plan"),
    ("deepseek-v3-fp8", "disk", "load"),
)
"""Model, device of all weights, and what is measured."""

_SMALL_LAYERS = 4


def bench_large(folder: Path, rounds: int, say: Callable[[str], None], quick: bool = False) -> Report:
    """Runs the benchmark.

    Args:
        folder: Folder of the checkpoints. Missing ones are created.
        rounds: Number of rounds.
        say: Function that receives progress lines.
        quick: True for few layers: a check, not a measurement.

    Raises:
        SetupError: A measuring process ended early.
    """
    records: list[Record] = []
    for model, device in dict.fromkeys(case[:2] for case in _CASES):
        say(f"{model}: making the checkpoint")
        small = make_large(folder, model, _SMALL_LAYERS)
        path = small if quick else make_large(folder, model)
        options = {"path": str(path), "small": str(small), "device": device}
        questions = [question for name, _, question in _CASES if name == model]
        for question in ["objects", *questions * rounds]:
            say(f"{model}: {question}")
            if device == "cpu":
                warm_cache(checkpoint_files(path))
            with Worker(_WORKER, **options) as worker:
                records.append({"model": model, "question": question} | worker.ask(question))
    title = "Planning and loading large models"
    return Report(
        title, _facts(folder, rounds), [_table(records)], _targets(records), records, _chart(records)
    )


def _facts(folder: Path, rounds: int) -> dict[str, str]:
    return machine_facts(folder) | {
        "checkpoints": "the tensors of Qwen3-30B-A3B in GPTQ with 4 bits, and of DeepSeek-V3 in FP8, in sparse "
        "files: codes are zeros",
        "load average": f"{os.getloadavg()[0]:.1f} at the end; other work makes CPU seconds longer",
        "rounds": f"{rounds}, each measurement in a fresh process after small loads; medians; files in the "
        "page cache",
    }


def _table(records: list[Record]) -> Table:
    rows = []
    for model, device, question in _CASES:
        times = [_of(records, model, question, key) for key in ("cpu_seconds", "system_seconds")]
        grown, peak = (_of(records, model, question, key) for key in ("grown", "peak_rss"))
        objects = _of(records, model, "objects", "objects") if question == "load" else None
        counts = [_of(records, model, "objects", key) for key in ("modules", "tensors")]
        rows.append(
            [
                model,
                f"{question}, {device}",
                *("-" if count is None else f"{count:,.0f}" for count in counts),
                *("-" if seconds is None else f"{seconds:.1f} s" for seconds in times),
                *("-" if nbytes is None else f"{nbytes / 1e6:,.0f} MB" for nbytes in (objects, grown, peak)),
            ]
        )
    return Table(
        "CPU time and memory",
        "CPU seconds of all threads, and those of the kernel among them. Python objects are those of the loaded model. Growth is memory of the "
        "process's own; peak RSS includes imports and mapped pages.",
        (
            "model",
            "work",
            "quantized modules",
            "tensors",
            "CPU time",
            "of the kernel",
            "Python objects",
            "growth",
            "peak RSS",
        ),
        rows,
    )


def _targets(records: list[Record]) -> list[Target]:
    def target(model: str, question: str, key: str, unit: float, what: str, bound: float) -> Target:
        value = _of(records, model, question, key)
        return Target(f"{model}: {what}", None if value is None else value / unit, bound)

    return [
        target("qwen3-30b-gptq4", "load", "cpu_seconds", 1, "CPU seconds of a warm load", 4),
        target("qwen3-30b-gptq4", "objects", "objects", 1e6, "MB of Python objects", 150),
        target("deepseek-v3-fp8", "plan", "cpu_seconds", 1, "CPU seconds of a plan", 20),
        target("deepseek-v3-fp8", "plan", "peak_rss", 1e9, "GB of peak RSS of a plan", 1),
        target("deepseek-v3-fp8", "load", "cpu_seconds", 1, "CPU seconds of a load with all on disk", 20),
        target("deepseek-v3-fp8", "load", "peak_rss", 1e9, "GB of peak RSS of this load", 1),
    ]


def _chart(records: list[Record]) -> Chart:
    groups = [f"{model}: {question}" for model, _, question in _CASES]
    values = [_of(records, model, question, "cpu_seconds") for model, _, question in _CASES]
    return Chart("CPU seconds (lower is better)", groups, {"hfq": values}, line=0)


def _of(records: list[Record], model: str, question: str, key: str) -> float | None:
    return median(records, lambda record: record[key], model=model, question=question)
