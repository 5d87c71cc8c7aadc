"""`python -m benchmarks stream`: forward passes with all layers on a cold disk.

hfq and accelerate's offload are compared with direct raw reads. Each contender has a new process in each
round, and they take turns. Sleeping stands in for computing, because a processor is idle while an accelerator
computes (see `contenders`). Only greedy decoding computes on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.checkpoints import FORMATS, architecture_of_size, checkpoint_files, make_checkpoint
from benchmarks.memory_limits import copy_rate
from benchmarks.records import Record, rotated
from benchmarks.stream.contenders import MOVERS, layer_nbytes
from benchmarks.stream.stream_report import stream_report
from hfq.machine_profile.machine_limits import drop_cache, read_files
from hfq.machine_profile.worker_process import Worker
from hfq.tables import Report

__all__ = ["bench_stream", "measure_compute", "measure_decoding", "measure_limit", "measure_movement"]

PASSES = 4
MICRO_BATCHES = (1, 4, 8)
REPEATS = 2
TOKENS = 3

Step = tuple[str, str, Callable[[], list[Record]]]
"""(measured quantity, contender, function that measures it)."""

_WORKER = "benchmarks.stream.stream_worker"


def bench_stream(folder: Path, nbytes: float, rounds: int, say: Callable[[str], None]) -> Report:
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
    paths = {}
    for weights in FORMATS:
        say(f"{weights}: making the checkpoint")
        paths[weights] = make_checkpoint(folder, architecture, weights)
    records: list[Record] = []
    for number in range(rounds):
        for weights, path in paths.items():
            for what, mover, measure in _steps(path, number, measure_limit(path)):
                label = {"weights": weights, "mover": mover, "what": what}
                if any("error" in record and label.items() <= record.items() for record in records):
                    continue  # it failed in an earlier round
                say(f"{weights}: round {number + 1} of {rounds}, {what}, {mover}")
                records += [label | {"round": number} | record for record in measure()]
    facts = {
        "model": f"Llama, hidden size {architecture.hidden}, {architecture.layers} layers",
        "memory copy": f"{copy_rate() / 1e9:.2f} GB/s",
        "rounds": f"{rounds}, interleaved, each mover in a fresh process; medians",
    }
    return stream_report(folder, facts, records)


def measure_limit(path: Path) -> float:
    """Returns the disk's rate for a checkpoint's files, in bytes per second.

    Reads are direct, of 16 MiB, by 4 or 8 threads, whichever is faster. Without direct reads, they are
    buffered, from a cold page cache.
    """
    files = checkpoint_files(path)
    drop_cache(files)
    times = [read_files(files, direct=True, threads=threads) for threads in (4, 8)]
    seconds = min((time for time in times if time is not None), default=None) or read_files(
        files, direct=False
    )
    drop_cache(files)
    return sum(file.stat().st_size for file in files) / (seconds or 1e-9)


def measure_movement(path: Path, mover: str, compute: float) -> list[Record]:
    """Measures forward passes without compute, with simulated compute, and of micro-batches.

    All run in one new process.

    Args:
        path: The checkpoint.
        mover: A name of `contenders.MOVERS`.
        compute: Seconds that a layer computes. A micro-batch computes for an eighth of that.
    """
    layers, nbytes = layer_nbytes(path)
    label = {"limit": measure_limit(path), "layers": layers, "nbytes": nbytes}
    with Worker(_WORKER, mover=mover, path=str(path)) as worker:
        loaded = worker.ask("load")
        if "error" in loaded:
            return [label | {"kind": "idle"} | loaded]
        records = [{"kind": "idle", "compute": 0.0, **worker.ask("passes", count=PASSES, compute=0.0)}]
        records += [
            {"kind": "busy", "compute": compute, **worker.ask("passes", count=PASSES, compute=compute)}
        ]
        records[-1]["alone"] = measure_compute(path, compute)
        for count in MICRO_BATCHES if mover != "hfq, buffered" else ():
            answer = worker.ask("micro_batches", count=count, compute=compute / 8, repeats=REPEATS)
            records.append({"kind": "micro", "count": count, "compute": compute / 8, **answer})
    return [label | record for record in records]


def measure_compute(path: Path, compute: float) -> float:
    """Returns the seconds of a forward pass with simulated compute, all weights in memory.

    hfq runs it in a new process.
    """
    with Worker(_WORKER, mover="hfq", path=str(path), on_disk=False) as worker:
        worker.ask("load")
        answer = worker.ask("passes", count=PASSES, compute=compute)
    return answer["seconds"] / answer["steps"]


def measure_decoding(path: Path, mover: str, on_disk: bool, tokens: int = TOKENS) -> list[Record]:
    """Measures greedy decoding on the CPU, with a cold page cache before every forward pass.

    It runs in a new process.
    """
    with Worker(_WORKER, mover=mover, path=str(path), stand_in=False, on_disk=on_disk) as worker:
        loaded = worker.ask("load")
        answer = loaded if "error" in loaded else worker.ask("decode", tokens=tokens)
    return [{"kind": "decode", "on_disk": on_disk, **answer}]


def _steps(path: Path, number: int, limit: float) -> list[Step]:
    """Returns one round's steps for one checkpoint, given the disk's rate in bytes per second.

    Results in memory are needed only once.
    """
    layers, nbytes = layer_nbytes(path)
    compute = nbytes / layers / limit
    decoders = ["hfq", "accelerate"]
    steps: list[Step] = [
        ("movement", m, partial(measure_movement, path, m, compute)) for m in rotated([*MOVERS], number)
    ]
    steps += [("decoding", m, partial(measure_decoding, path, m, True)) for m in rotated(decoders, number)]
    if number == 0:
        steps += [("decoding in memory", m, partial(measure_decoding, path, m, False)) for m in decoders]
    return steps
