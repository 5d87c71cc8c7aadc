"""`python -m benchmarks fms`: IBM's Foundation Model Stack (FMS) by itself and with hfq.

Measures which models load, their accuracy, time, and memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.checkpoints import FORMATS, architecture_of_size, checkpoint_files, make_checkpoint
from benchmarks.fms.fms_models import PARITY, write_fms_model
from benchmarks.fms.fms_worker import LOADERS
from benchmarks.memory_limits import warm_cache
from benchmarks.records import Record, median, rotated, select
from hfq.integrations.fms import check_installed
from hfq.machine_profile.local_ranks import Ranks
from hfq.machine_profile.machine_facts import machine_facts
from hfq.machine_profile.probe_models import Architecture
from hfq.machine_profile.worker_process import Worker
from hfq.plots.charts import Chart
from hfq.tables import Report, Table, Target

__all__ = ["bench_fms"]

TOLERANCE = 5e-6
"""Largest relative L2 error in float32, caused by FMS's other order of operations."""

_REFERENCE = "transformers with hfq"
_DOORS = ("hfq.fms.load", "FMS with hfq.fms.register")
_WORLD = 2
_SHARED = {f"{door}, {_WORLD} ranks": door for door in _DOORS}
"""Tensor-parallel entry points, by their names in the table."""
_WORKER = "benchmarks.fms.fms_worker"


def bench_fms(folder: Path, nbytes: float, rounds: int, say: Callable[[str], None]) -> Report:
    """Runs the benchmark.

    Args:
        folder: Folder of the large checkpoints. Missing ones are created.
        nbytes: Size of the bfloat16 checkpoint in bytes. Quantized ones have the same architecture.
        rounds: Number of rounds for loads.
        say: Function that receives progress lines.

    Raises:
        SetupError: FMS is missing or has an untested version, the disk has too little free space, or a
            measuring process ended early.
    """
    version = check_installed()
    architecture, records = architecture_of_size(nbytes), list[Record]()
    with tempfile.TemporaryDirectory() as made:
        records += measure_parity(Path(made), say)
    for weights in FORMATS:
        say(f"{weights}: making the checkpoint")
        path = make_checkpoint(folder, architecture, weights)
        small = make_checkpoint(folder, Architecture(128, 1), weights)
        for number in range(rounds):
            for loader in rotated(list(LOADERS), number):
                say(f"{weights}: round {number + 1} of {rounds}, {loader}")
                records.append(measure_load(path, small, loader) | {"weights": weights, "round": number})
    facts = machine_facts(folder) | {
        "FMS": f"ibm-fms {version}, shown a config.json without the quantization, with its gptq_cpu layers "
        f"for GPTQ",
        "model": f"Llama, hidden size {architecture.hidden}, {architecture.layers} layers",
        "threads": str(torch.get_num_threads()),
        "ranks": f"{_WORLD} processes under tensor parallelism, by gloo",
        "rounds": f"{rounds}, from the page cache, each load in a fresh process; medians",
    }
    series = {
        loader: [_ratio(records, "peak_rss", weights, loader) for weights in FORMATS] for loader in LOADERS
    }
    chart = Chart("Peak memory of a load over the checkpoint's bytes (lower is better)", FORMATS, series)
    return Report(
        "FMS by itself and with hfq",
        facts,
        [_parity_table(records), _load_table(records)],
        _targets(records),
        records,
        chart,
    )


def measure_parity(folder: Path, say: Callable[[str], None]) -> list[Record]:
    """Measures the relative error of the logits of each small model, or the error message.

    Each loader runs, and both entry points also run on two ranks.
    """
    cases = [*PARITY, ("llama", "dense", 2)]
    paths = {case: write_fms_model(folder / "-".join(map(str, case)), *case) for case in cases}
    records: list[Record] = []
    with ExitStack() as stack:
        small = str(paths["llama", "dense", 2])
        workers = {
            loader: stack.enter_context(Worker(_WORKER, loader=loader, small=small)) for loader in LOADERS
        }
        ranks = stack.enter_context(Ranks(_WORKER, _WORLD, loader=_DOORS[0]))
        for case, path in paths.items():
            say(f"logits of {' '.join(map(str, case))}")
            expected = torch.tensor(workers[_REFERENCE].ask("logits", path=str(path))["logits"])
            answers = {loader: [worker.ask("logits", path=str(path))] for loader, worker in workers.items()}
            answers |= {
                name: ranks.answers("logits", path=str(path), loader=door) for name, door in _SHARED.items()
            }
            for loader, found in answers.items():
                records.append(
                    {
                        "kind": "parity",
                        "case": " ".join(map(str, case)),
                        "loader": loader,
                        **_compared(found, expected),
                    }
                )
    return records


def _compared(answers: list[dict], expected: torch.Tensor) -> Record:
    """Returns the largest relative error of the logits over processes, or the first error message."""
    failed = next((answer for answer in answers if "error" in answer), None)
    if failed is not None:
        return failed
    found = torch.tensor([answer["logits"] for answer in answers])
    return {"relative_error": float(((found - expected).norm(dim=1) / expected.norm()).max())}


def measure_load(path: Path, small: Path, loader: str) -> Record:
    """Measures one load in a new process, from a warm page cache."""
    files = checkpoint_files(path)
    with Worker(_WORKER, loader=loader, small=str(small)) as worker:
        worker.ask("memory")  # waits until the worker is ready
        warm_cache(files)
        answer = worker.ask("load", path=str(path))
    return {"kind": "load", "loader": loader, "nbytes": sum(file.stat().st_size for file in files), **answer}


def _parity_table(records: list[Record]) -> Table:
    found = [record for record in records if record["kind"] == "parity"]
    loaders = [*(loader for loader in LOADERS if loader != _REFERENCE), *_SHARED]
    cells = {(record["case"], record["loader"]): _cell(record) for record in found}
    cases = list(dict.fromkeys(record["case"] for record in found))
    rows = [(case, *(cells[case, loader] for loader in loaders)) for case in cases]
    note = (
        "Architecture, format, key heads (of 8): relative L2 error of float32 logits against transformers "
        "with hfq, of ranks the "
        "larger one; or the error."
    )
    return Table("What loads, and how exactly", note, ("model", *loaders), rows)


def _cell(record: Record) -> str:
    if "error" in record:
        return record["error"].replace("|", "/")[:90]
    error = record["relative_error"]
    return f"{error:.1e}" if error <= 1e-2 else f"wrong: {error:.2g}"


def _load_table(records: list[Record]) -> Table:
    rows = []
    for weights in FORMATS:
        for loader in LOADERS:
            seconds = median(records, lambda r: r["seconds"], kind="load", weights=weights, loader=loader)
            if seconds is None:
                errors = [
                    r["error"]
                    for r in records
                    if r.get("weights") == weights and r["loader"] == loader and "error" in r
                ]
                rows.append((weights, loader, errors[0].replace("|", "/")[:90], "-", "-"))
                continue
            peak, anonymous = (_ratio(records, key, weights, loader) for key in ("peak_rss", "anonymous"))
            rows.append((weights, loader, f"{seconds:.3f} s", _share(peak), _share(anonymous)))
    note = (
        "Seconds until every page has been touched; growth of memory over the bytes of the checkpoint's "
        "files. FMS by itself keeps "
        "FP8 codes without their scales: what it loads there is not the model."
    )
    return Table("Time and memory", note, ("weights", "loader", "time", "peak RSS", "anonymous"), rows)


def _targets(records: list[Record]) -> list[Target]:
    return [
        *(_parity_target(records, loader) for loader in (*_DOORS, *_SHARED)),
        *(
            Target(
                f"{weights}: anonymous memory of hfq.fms.load over checkpoint",
                _ratio(records, "anonymous", weights, "hfq.fms.load"),
                0.25,
            )
            for weights in FORMATS
            if weights != "bf16"
        ),
    ]


def _parity_target(records: list[Record], loader: str) -> Target:
    """Returns how many models have transformers' logits. Models that did not load count as wrong."""
    errors = [r["relative_error"] for r in select(records, kind="parity", loader=loader)]
    asked = sum(r["kind"] == "parity" and r["loader"] == loader for r in records)
    worst = f"; the largest error is {max(errors):.1e}" if errors else ""
    what = f"{loader}: of {asked} models, those with a relative error of at most {TOLERANCE:g}{worst}"
    return Target(what, sum(error <= TOLERANCE for error in errors), asked, at_least=True)


def _ratio(records: list[Record], key: str, weights: str, loader: str) -> float | None:
    return median(records, lambda r: r[key] / r["nbytes"], kind="load", weights=weights, loader=loader)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
