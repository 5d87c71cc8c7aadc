"""`python -m benchmarks blocks`: products with GGUF's blocks on a CPU, against ggml's own.

Both multiply the same blocks, in turns within a round. ggml rounds activations to 8 bits, hfq does not. For
few rows, a buffer larger than the caches is read in between, because a model's next layer is not in the
caches either.

One thread is measured by its own processor time, which other processes disturb least; more threads by the
clock.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.kernels.ggml import TYPES, GgmlLinear, compiled_for, quantized_rows
from benchmarks.records import Record, median, rotated, select
from hfq.formats.gguf.block_rows import Gguf
from hfq.kernels.layer_tensors import LayerTensors
from hfq.kernels.registry import KERNELS
from hfq.machine_profile.machine_facts import machine_facts
from hfq.plots.charts import Chart
from hfq.tables import Report, Table, Target
from hfq.tensor_spec import Blocks

__all__ = ["NAMES", "ROWS", "SHAPE", "bench_blocks", "measure_type", "report"]

NAMES, ROWS = tuple(TYPES), (1, 8, 128)
SHAPE = 11008, 4096
"""(out_features, in_features)."""

FLUSH_NBYTES = 128 << 20
FLUSHED_ROWS = 16
GGML, WIDE, SHORT = "ggml", "hfq, float32", "hfq, bfloat16"


def bench_blocks(
    names: Sequence[str],
    rows: Sequence[int],
    rounds: int,
    threads: Sequence[int],
    say: Callable[[str], None],
    shape: tuple[int, int] = SHAPE,
) -> Report:
    """Runs the benchmark.

    Args:
        names: Types of blocks.
        rows: Numbers of activation rows.
        rounds: Number of interleaved rounds.
        threads: Numbers of threads to measure with.
        say: Function that receives progress lines.
        shape: (out_features, in_features).
    """
    before, records = torch.get_num_threads(), []
    try:
        for count in threads:
            torch.set_num_threads(count)
            for name in names:
                say(f"{name}, {count} threads")
                found = measure_type(name, shape, rows, rounds)
                records += [record | {"threads": count} for record in found]
    finally:
        torch.set_num_threads(before)
    return report(records, rounds, shape)


def measure_type(name: str, shape: tuple[int, int], rows: Sequence[int], rounds: int) -> list[Record]:
    """Measures the products with one type of blocks. Returns a record per method, rows, and round."""
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    theirs, tensors = GgmlLinear(dense, name, False), LayerTensors(weight=quantized_rows(dense, name))
    ours = functools.partial(
        KERNELS["cpp"].linear, tensors=tensors, weight_format=Gguf(Blocks(name, is_layer=True))
    )
    flush, records = torch.zeros(FLUSH_NBYTES // 4), []
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for count in rows:
        wide = torch.randn(count, shape[1])
        calls = {
            GGML: functools.partial(theirs, wide),
            WIDE: functools.partial(ours, wide),
            SHORT: functools.partial(ours, wide.to(torch.bfloat16)),
        }
        for call in calls.values():  # the first call fills caches
            call()
        for number in range(rounds):
            for method in rotated(list(calls), number):
                if count <= FLUSHED_ROWS:
                    flush.sum()
                started = now()
                calls[method]()
                seconds = now() - started
                records.append(
                    {"blocks": name, "rows": count, "method": method, "round": number, "seconds": seconds}
                )
    return records


def report(records: list[Record], rounds: int, shape: tuple[int, int]) -> Report:
    """Returns the report of these records.

    Each record has threads, blocks, rows, method, round, and seconds.
    """
    threads = list(dict.fromkeys(record["threads"] for record in records))
    names = list(dict.fromkeys(record["blocks"] for record in records))
    rows = list(dict.fromkeys(record["rows"] for record in records))
    targets = [
        Target(
            f"{name}, M={count}, {each} threads: {SHORT}, over {GGML}",
            _ratio(records, each, name, count, SHORT),
            1.0,
            True,
        )
        for each in threads
        for name in names
        for count in rows
    ]
    series = {name: [_ratio(records, threads[0], name, count, SHORT) for count in rows] for name in names}
    facts = {
        "layer": f"{list(shape)}, the same blocks for each method",
        "ggml": f"compiled for {compiled_for()}, layout of files, activations rounded to 8 bits",
        "rounds": f"{rounds}, interleaved in one process; medians of ratios within a round",
        "time": "of the thread's processor for 1 thread, else of the clock",
    }
    return Report(
        "Blocks: products with GGUF's blocks on a CPU",
        machine_facts(Path()) | facts,
        [_table(records, each, names, rows) for each in threads],
        targets,
        records,
        Chart(f"Times as fast as {GGML} (higher is better)", [f"M={count}" for count in rows], series),
    )


def _table(records: list[Record], threads: int, names: Sequence[str], rows: Sequence[int]) -> Table:
    lines = []
    for name in names:
        for method in (GGML, WIDE, SHORT):
            cells = []
            for count in rows:
                where = {"threads": threads, "blocks": name, "rows": count, "method": method}
                seconds = median(records, lambda r: r["seconds"], **where)
                ratio = _ratio(records, threads, name, count, method)
                cells.append(
                    "-" if seconds is None or ratio is None else f"{seconds * 1e3:.2f} ms, {ratio:.2f}x"
                )
            lines.append((name, method, *cells))
    note = f"Milliseconds, and times as fast as {GGML} in the same round."
    title = f"{threads} thread{'s' if threads > 1 else ''}"
    return Table(title, note, ("blocks", "method", *(f"M={count}" for count in rows)), lines)


def _ratio(records: list[Record], threads: int, name: str, rows: int, method: str) -> float | None:
    """Returns the median over rounds of ggml's seconds divided by those of a method."""
    found = select(records, threads=threads, blocks=name, rows=rows)
    theirs = {record["round"]: record["seconds"] for record in select(found, method=GGML)}
    ratios = [theirs[r["round"]] / r["seconds"] for r in select(found, method=method)]
    return statistics.median(ratios) if ratios else None
