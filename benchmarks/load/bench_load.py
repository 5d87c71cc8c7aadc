"""`python -m benchmarks load`: time, memory, and reads of loading.

hfq, transformers, and safetensors are compared with raw reads. Each measurement has its own process. The
loaders take turns within a round, in another order in each round.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path

from benchmarks.checkpoints import FORMATS, architecture_of_size, checkpoint_files, make_checkpoint
from benchmarks.load.load_worker import LOADERS
from benchmarks.memory_limits import copy_rate, warm_cache
from benchmarks.records import Record, median, rotated, select
from hfq.machine_profile.machine_facts import machine_facts
from hfq.machine_profile.machine_limits import cached_share, drop_cache, read_files
from hfq.machine_profile.probe_models import Architecture
from hfq.machine_profile.worker_process import Worker
from hfq.plots.charts import Chart
from hfq.tables import Report, Table, Target, as_rate

__all__ = ["bench_load", "measure_load", "measure_pair"]

STATES = ("cold", "warm")
CONSTANT_NBYTES = 64 << 20
"""Memory that a load may use in addition to the checkpoint's bytes: meta model, threads, and staging."""

_WORKER = "benchmarks.load.load_worker"


def bench_load(folder: Path, nbytes: float, rounds: int, say: Callable[[str], None]) -> Report:
    """Runs the benchmark.

    Args:
        folder: Folder of the checkpoints. Missing ones are created.
        nbytes: Size of the bfloat16 checkpoint in bytes. Quantized ones have the same architecture.
        rounds: Number of rounds.
        say: Function that receives progress lines.

    Raises:
        SetupError: The disk has too little free space, or a measuring process ended early.
    """
    architecture = architecture_of_size(nbytes)
    small = Architecture(128, 1)
    records: list[Record] = []
    for weights in FORMATS:
        say(f"{weights}: making the checkpoint")
        path, tiny = (make_checkpoint(folder, model, weights) for model in (architecture, small))
        refused: set[str] = set()
        for number in range(rounds):
            for state in STATES:
                for loader in rotated([name for name in LOADERS if name not in refused], number):
                    say(f"{weights}: round {number + 1} of {rounds}, {state}, {loader}")
                    record = measure_load(path, tiny, loader, state)
                    records.append(record | {"weights": weights, "round": number})
                    refused |= {loader} if "error" in record else set()
        for loader in [name for name in LOADERS if name not in refused]:
            say(f"{weights}: two processes, {loader}")
            records.append(measure_pair(path, tiny, loader) | {"weights": weights})
        if "hfq" not in refused:
            records.append(measure_exactness(path, tiny) | {"weights": weights})
    return _report(folder, architecture, rounds, records)


def measure_load(path: Path, small: Path, loader: str, state: str) -> Record:
    """Measures one load in a new process, and raw reads of the same files just before it.

    Both start with the page cache in the same state.
    """
    files = checkpoint_files(path)
    nbytes = sum(file.stat().st_size for file in files)
    prepare = drop_cache if state == "cold" else warm_cache
    with Worker(_WORKER, loader=loader, path=str(path), small=str(small)) as worker:
        worker.ask("memory")  # waits until the worker is ready
        prepare(files)
        direct = read_files(files, direct=True) if state == "cold" else None
        raw = read_files(files, direct=False)
        prepare(files)
        share = cached_share(files)
        answer = worker.ask("load")
    kind = {"kind": "load", "loader": loader, "state": state, "nbytes": nbytes}
    return {**kind, "raw_seconds": raw, "direct_seconds": direct, "cached_share": share, **answer}


def measure_pair(path: Path, small: Path, loader: str) -> Record:
    """Measures the proportional set sizes of two processes that hold the model together, in bytes."""
    files = checkpoint_files(path)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(_WORKER, loader=loader, path=str(path), small=str(small)))
            for _ in range(2)
        ]
        before = [worker.ask("memory") for worker in workers]
        answers = [worker.ask("load") for worker in workers]
        after = [worker.ask("memory") for worker in workers]
    record: Record = {"kind": "pair", "loader": loader, "nbytes": sum(file.stat().st_size for file in files)}
    record |= next(({"error": answer["error"]} for answer in answers if "error" in answer), {})
    if "pss" in after[0]:
        record["pss"] = sum(memory["pss"] for memory in after) - sum(memory["pss"] for memory in before)
    return record


def measure_exactness(path: Path, small: Path) -> Record:
    """Checks the bytes that hfq holds, and measures the bytes read when everything stays on disk."""
    with Worker(_WORKER, loader="hfq", path=str(path), small=str(small)) as worker:
        worker.ask("memory")  # waits until the worker is ready
        drop_cache(checkpoint_files(path))
        lazy = worker.ask("load_on_disk")
        return {"kind": "exactness", **lazy, **worker.ask("load"), **worker.ask("verify")}


def _report(folder: Path, architecture: Architecture, rounds: int, records: list[Record]) -> Report:
    cold = {
        weights: [_over_raw(records, weights, "cold", loader) for loader in LOADERS] for weights in FORMATS
    }
    series = {loader: [cold[weights][index] for weights in FORMATS] for index, loader in enumerate(LOADERS)}
    return Report(
        "Loading: time, memory and reads",
        machine_facts(folder) | _facts(architecture, rounds, records),
        [_time_table(records), _memory_table(records), _exactness_table(records)],
        _targets(records),
        records,
        Chart("Cold load, touched: time over raw parallel read (lower is better)", FORMATS, series),
    )


def _facts(architecture: Architecture, rounds: int, records: list[Record]) -> dict[str, str]:
    cold = select(records, kind="load", state="cold")
    raw = median(cold, lambda record: record["nbytes"] / record["raw_seconds"])
    direct = median(
        [r for r in cold if r["direct_seconds"]], lambda record: record["nbytes"] / record["direct_seconds"]
    )
    shares = [record["cached_share"] for record in cold if record["cached_share"] is not None]
    sizes = ", ".join(f"{weights} {_nbytes(records, weights) / 1e9:.3f} GB" for weights in FORMATS)
    return {
        "model": f"Llama, hidden size {architecture.hidden}, {architecture.layers} layers; {sizes}",
        "raw parallel read, cold": f"{as_rate(raw)} (4 threads x 16 MiB, buffered), {as_rate(direct)} (4 "
        f"threads x 16 MiB, direct)",
        "memory copy": as_rate(copy_rate()),
        "cold": "files dropped from the page cache before each load; "
        + (f"at most {max(shares):.1%} of their pages found there by mincore" if shares else "not verified"),
        "rounds": f"{rounds}, interleaved, each measurement in a fresh process; medians",
    }


def _time_table(records: list[Record]) -> Table:
    rows = []
    for weights in FORMATS:
        for state in STATES:
            raw = median(records, lambda r: r["raw_seconds"], kind="load", weights=weights, state=state)
            cells = [_time_cell(records, weights, state, loader) for loader in LOADERS]
            rows.append((weights, state, "-" if raw is None else f"{raw:.3f} s", *cells))
    note = (
        "Seconds until every page of every tensor has been touched (times the raw parallel read of the "
        "same files, same round)."
    )
    return Table("Time", note, ("weights", "page cache", "raw read", *LOADERS), rows)


def _time_cell(records: list[Record], weights: str, state: str, loader: str) -> str:
    seconds = median(
        records, lambda r: r["seconds"], kind="load", weights=weights, state=state, loader=loader
    )
    if seconds is None:
        return _refusal(records, weights, loader)
    return f"{seconds:.3f} s ({_over_raw(records, weights, state, loader):.2f}x)"


def _memory_table(records: list[Record]) -> Table:
    rows: list[tuple[str, ...]] = []
    for weights in FORMATS:
        for loader in LOADERS:
            shares = [
                _share(records, key, weights, loader)
                for key in ("peak_rss", "anonymous", "pss", "device_read")
            ]
            if shares[0] is None and _is_refused(records, weights, loader):
                rows.append((weights, loader, _refusal(records, weights, loader), "-", "-", "-"))
            else:
                rows.append(
                    (weights, loader, *("-" if share is None else f"{share:.3f}" for share in shares))
                )
    header = (
        "weights",
        "loader",
        "peak RSS growth",
        "anonymous growth",
        "PSS of two processes",
        "read from the device",
    )
    return Table(
        "Memory and reads, cold", "All in bytes over the bytes of the checkpoint's files.", header, rows
    )


def _exactness_table(records: list[Record]) -> Table:
    rows = []
    for record in select(records, kind="exactness"):
        read = f"{record['read']:,} of at most {record['bound']:,}"
        equal = f"{record['equal']} of {record['tensors']}"
        rows.append(
            (
                record["weights"],
                equal,
                read if record["packed"] else "nothing is packed",
                f"{record['lazy_device_read']:,}",
            )
        )
    note = (
        "Tensors whose sha256 in memory is that of their bytes on file; bytes read by a load that leaves "
        "everything on disk."
    )
    header = (
        "weights",
        "equal tensors",
        "read, all on disk (headers and what is not quantized)",
        "read from the device",
    )
    return Table("hfq: exact, and lazy", note, header, rows)


def _targets(records: list[Record]) -> list[Target]:
    targets = []
    for weights in FORMATS:
        peak = median(
            records,
            lambda r: (r["peak_rss"] - CONSTANT_NBYTES) / r["nbytes"],
            kind="load",
            weights=weights,
            state="cold",
            loader="hfq",
        )
        exact = median(records, lambda r: r["equal"] / r["tensors"], kind="exactness", weights=weights)
        targets += [
            Target(
                f"{weights}: cold time over raw parallel read",
                _over_raw(records, weights, "cold", "hfq"),
                1.10,
            ),
            Target(f"{weights}: peak RSS less {CONSTANT_NBYTES >> 20} MiB over checkpoint", peak, 1.02),
            Target(
                f"{weights}: anonymous memory over checkpoint",
                _share(records, "anonymous", weights, "hfq"),
                0.02,
            ),
            Target(
                f"{weights}: PSS of two processes over checkpoint",
                _share(records, "pss", weights, "hfq"),
                1.05,
            ),
            Target(f"{weights}: share of tensors equal by sha256", exact, 1, at_least=True),
        ]
        if weights != "bf16":
            for key, what in (("read", "read"), ("lazy_device_read", "read from the device")):
                share = _of_bound(records, key, weights)
                targets.append(
                    Target(
                        f"{weights}: {what} with all on disk, over headers and what is not quantized",
                        share,
                        1,
                    )
                )
    for what, key, bound in (
        ("times as fast as", "seconds", 5),
        ("times less peak RSS than", "peak_rss", 2.4),
    ):
        plain, own = (
            median(records, itemgetter(key), kind="load", weights="fp8", state="cold", loader=loader)
            for loader in ("transformers", "hfq")
        )
        value = plain / own if plain and own else None
        targets.append(Target(f"fp8: {what} transformers on a CPU, cold", value, bound, at_least=True))
    return targets


def _over_raw(records: list[Record], weights: str, state: str, loader: str) -> float | None:
    return median(
        records,
        lambda r: r["seconds"] / r["raw_seconds"],
        kind="load",
        weights=weights,
        state=state,
        loader=loader,
    )


def _of_bound(records: list[Record], key: str, weights: str) -> float | None:
    return median(records, lambda r: r[key] / r["bound"], kind="exactness", weights=weights)


def _share(records: list[Record], key: str, weights: str, loader: str) -> float | None:
    where = {"kind": "pair"} if key == "pss" else {"kind": "load", "state": "cold"}
    return median(records, lambda r: r[key] / r["nbytes"], weights=weights, loader=loader, **where)


def _nbytes(records: list[Record], weights: str) -> int:
    return next(
        (record["nbytes"] for record in records if record["weights"] == weights and "nbytes" in record), 0
    )


def _is_refused(records: list[Record], weights: str, loader: str) -> bool:
    return any("error" in r for r in records if r["weights"] == weights and r.get("loader") == loader)


def _refusal(records: list[Record], weights: str, loader: str) -> str:
    errors = (
        r["error"] for r in records if r["weights"] == weights and r.get("loader") == loader and "error" in r
    )
    return f"refused: {next(errors, 'unknown')}".replace("|", "/")
