"""`python -m benchmarks memory`: peak memory against model size, for plain transformers and hfq.

Each measurement has a process of its own, which loads an FP8 checkpoint and runs one forward pass.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints import architecture_of_size, checkpoint_files, make_checkpoint
from benchmarks.records import Record
from hfq.machine_profile.machine_facts import machine_facts
from hfq.machine_profile.probe_models import Architecture
from hfq.machine_profile.worker_process import Worker, memory, reset_peak, serve
from hfq.plots.charts import Lines
from hfq.tables import Report, Table, Target

__all__ = ["SETUPS", "MemoryWorker", "bench_memory"]

SETUPS: Mapping[str, str | None] = {
    "plain transformers": None,
    "hfq, weights in memory": "cpu",
    "hfq, weights on disk": "disk",
}
"""Device of all weights by setup; None loads without hfq."""

_SHARES = (0.125, 0.25, 0.5, 1.0)
_TOKENS = 16


class MemoryWorker:
    """Answers `load_and_run`.

    Args:
        path: The checkpoint to measure.
        small: A small checkpoint of the same format, loaded first so that imports are not measured.
        setup: A name of `SETUPS`.
    """

    def __init__(self, path: str, small: str, setup: str) -> None:
        self._path, self._setup = path, setup
        _load_and_run(small, setup)
        self.commands = {"load_and_run": self.load_and_run}

    def load_and_run(self) -> dict:
        """Returns the growth of the resident memory at its peak, in bytes."""
        reset_peak()
        before = memory()["rss"]
        _load_and_run(self._path, self._setup)
        return {"peak_nbytes": memory()["peak_rss"] - before}


def bench_memory(folder: Path, nbytes: float, rounds: int, say: Callable[[str], None]) -> Report:
    """Runs the benchmark.

    Args:
        folder: Folder of the checkpoints; they are created if missing.
        nbytes: Bytes of the largest model in bfloat16; its FP8 checkpoint has about half of them.
        rounds: Number of interleaved rounds.
        say: Called with a line before each measurement.

    Raises:
        SetupError: The disk has too little room, or a measuring process died.
    """
    architectures = [architecture_of_size(nbytes * share) for share in _SHARES]
    small = make_checkpoint(folder, Architecture(128, 1), "fp8")
    paths = [make_checkpoint(folder, architecture, "fp8") for architecture in architectures]
    records: list[Record] = []
    for number in range(rounds):
        for path in paths:
            for setup in SETUPS:
                size = sum(file.stat().st_size for file in checkpoint_files(path))
                say(f"round {number + 1} of {rounds}, {size / 1e9:.2f} GB, {setup}")
                with Worker(__spec__.name, path=str(path), small=str(small), setup=setup) as worker:
                    answer = worker.ask("load_and_run")
                records.append({"setup": setup, "nbytes": size, "round": number, **answer})
    return _report(folder, architectures, rounds, records)


def _load_and_run(path: str, setup: str) -> None:
    from transformers import AutoModelForCausalLM

    device, options = SETUPS[setup], {}
    if device is not None:
        from hfq import HfqConfig

        options = {"quantization_config": HfqConfig(), "device_map": {"": device}}
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **options)
    with torch.no_grad():
        model(torch.arange(_TOKENS)[None])


def _report(folder: Path, architectures: list[Architecture], rounds: int, records: list[Record]) -> Report:
    sizes = sorted({record["nbytes"] for record in records})
    peaks = {setup: [_median(records, setup, size) for size in sizes] for setup in SETUPS}
    rows = [
        (
            f"{size / 1e9:.3f} GB",
            *(
                "-" if peaks[setup][index] is None else f"{peaks[setup][index] / 1e9:.3f} GB"
                for setup in SETUPS
            ),
        )
        for index, size in enumerate(sizes)
    ]
    largest = [peaks[setup][-1] for setup in SETUPS]
    plain, resident, on_disk = largest
    targets = [
        Target("in memory: peak over the checkpoint, largest model", resident and resident / sizes[-1], 1.2),
        Target("on disk: peak over the checkpoint, largest model", on_disk and on_disk / sizes[-1], 0.3),
        Target(
            "plain transformers over hfq in memory, largest model",
            plain and resident and plain / resident,
            1.5,
            True,
        ),
    ]
    layers = ", ".join(f"{each.hidden} × {each.layers}" for each in architectures)
    facts = machine_facts(folder) | {
        "models": f"Llama, hidden size × layers: {layers}; FP8 with one scale per 128 × 128 block",
        "forward": f"{_TOKENS} tokens, no cache beyond them",
        "rounds": f"{rounds}, each measurement in a fresh process; medians",
    }
    series = {
        setup: [
            (size / 1e9, peak / 1e9) for size, peak in zip(sizes, values, strict=True) if peak is not None
        ]
        for setup, values in peaks.items()
    }
    note = "Growth of the resident memory at its peak, over one load and one forward pass."
    chart = Lines("Peak memory of a load and a forward pass", "FP8 checkpoint, GB", "peak memory, GB", series)
    table = Table("Peak memory", note, ("checkpoint", *SETUPS), rows)
    return Report("Memory: peak against model size", facts, [table], targets, records, chart)


def _median(records: list[Record], setup: str, nbytes: int) -> float | None:
    found = sorted(
        record["peak_nbytes"]
        for record in records
        if record["setup"] == setup and record["nbytes"] == nbytes and "peak_nbytes" in record
    )
    return found[len(found) // 2] if found else None


if __name__ == "__main__":
    serve(MemoryWorker(**json.loads(sys.argv[1])).commands)
