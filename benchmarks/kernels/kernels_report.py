"""Tables and targets of `python -m benchmarks kernels`."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.kernels.ggml import compiled_for
from benchmarks.kernels.kernel_columns import DENSE, IN_TURN, READ, READ_IN_TURN, ROUNDED, SAME, WIDE
from benchmarks.kernels.kernel_peers import GGML, GPTQMODEL, PEER, REPACKED, missing_peers
from benchmarks.records import Record, median, select
from hfq.kernels.cpp.library import library, reason_missing
from hfq.kernels.cpu.panels import product_dtype
from hfq.machine_profile.machine_facts import machine_facts
from hfq.plots.charts import Chart
from hfq.tables import Report, Table, Target, as_rate

__all__ = ["report"]

LEVELS = ("plain C++", "AVX2", "AVX-512")
SHORT = ("", ", dot products of bfloat16", ", tiles of bfloat16 (AMX)")
_FP8_CPP = {1: 2.9, 8: 1.0, 128: 0.94, 512: 0.94}
_INT4_CPP = {1: 1.0, 8: 1.7, 128: 1.0, 512: 1.0}
_ROUNDED = 1.7


def report(records: list[Record], rounds: int) -> Report:
    """Returns the report of these records.

    Each record has threads, shape, rows, method, weights, round, nbytes, and seconds.
    """
    weights = [w for w in _in_order(records, "weights") if w not in ("-", "bf16", "f32", "f16")]
    groups = [f"M={rows}" for rows in _in_order(records, "rows")]
    least = min((r["threads"] for r in records), default=1)
    series = {
        name: [_over_dense(records, name, "cpp", rows, least) for rows in _in_order(records, "rows")]
        for name in weights
    }
    return Report(
        "Kernels: products with packed weights on a CPU",
        machine_facts(Path()) | _facts(records, rounds),
        [table for threads in _in_order(records, "threads") for table in _tables(records, threads)],
        [target for threads in _in_order(records, "threads") for target in _targets(records, threads)],
        records,
        Chart("Times as fast as bf16 F.linear, compiled kernel (higher is better)", groups, series),
    )


def _facts(records: list[Record], rounds: int) -> dict[str, str]:
    import torch

    native = library()
    level = f"missing: {reason_missing()}" if native is None else _level(native)
    rates = [
        f"{as_rate(median(records, lambda r: r['nbytes'] / r['seconds'], method=READ, threads=threads))} "
        f"({threads} threads)"
        for threads in _in_order(records, "threads")
    ]
    return {
        "compiled kernel": level,
        "bfloat16 panels are multiplied in": str(product_dtype(torch.bfloat16)).removeprefix("torch."),
        "memory read": ", ".join(rates),
        "rounds": f"{rounds}, interleaved in one process; medians of ratios within a round",
        "activations": "bfloat16, unless a method names others",
        "packed tensors": "8 bytes after a line of the cache begins, as files align them",
        f"gptq4 g128, cpp, over {GGML} {REPACKED}": _over_ggml(records),
        "not measured": ", ".join(
            f"{tool} ({why})" for tool, why in missing_peers(_measured(records)).items()
        )
        or "none",
    }


_OWN_THREADS = ", whose threads on more than one share processors with torch's that wait awake"


def _over_ggml(records: list[Record]) -> str:
    """Returns the speed of 4 bits relative to ggml's rearranged weights with 8-bit activations."""
    theirs = {"method": GGML, "weights": REPACKED}
    ours = {"method": "cpp", "weights": "gptq4 g128"}
    found = []
    for threads in _in_order(records, "threads"):
        for rows in _in_order(records, "rows"):
            value = _over_shapes(select(records, threads=threads), theirs, ours, rows)
            found += [] if value is None else [f"{value:.2f} (M={rows}, {threads} threads)"]
    if not found:
        return "not measured"
    return f"{', '.join(found)}; ggml compiled for {compiled_for()}{_OWN_THREADS}"


def _measured(records: list[Record]) -> dict[tuple[str, str], None]:
    return dict.fromkeys((record["method"], record["weights"]) for record in records)


def _tables(records: list[Record], threads: int) -> Iterator[Table]:
    yield _table(records, threads)
    if select(records, method=IN_TURN, threads=threads):
        yield _read_table(records, threads)


def _table(records: list[Record], threads: int) -> Table:
    of_threads = select(records, threads=threads)
    rows = []
    for shape in _in_order(of_threads, "shape"):
        for weights, method in _pairs(select(of_threads, shape=shape)):
            where = {"shape": shape, "weights": weights, "method": method}
            cells = []
            for count in _in_order(of_threads, "rows"):
                seconds = median(of_threads, lambda r: r["seconds"], rows=count, **where)
                ratio = _ratio(of_threads, {"method": DENSE}, where, shape, count)
                cells.append(
                    "-" if seconds is None or ratio is None else f"{seconds * 1e3:.2f} ms, {ratio:.2f}x"
                )
            share = _share_of_read(of_threads, where)
            rows.append((shape, weights, method, *cells, "-" if share is None else f"{share:.2f}"))
    header = (
        "shape",
        "weights",
        "method",
        *(f"M={count}" for count in _in_order(of_threads, "rows")),
        "of the read rate, M=1",
    )
    note = f"""Milliseconds, and times as fast as {DENSE} in the same round. The last column is the rate at which one row's product
reads the weight, after all caches were emptied, of Python's own code, too; over that of a plain read of memory in the same round."""
    return Table(_named(threads), note, header, rows)


def _read_table(records: list[Record], threads: int) -> Table:
    of_threads = select(records, threads=threads)
    rows = []
    for shape in _in_order(of_threads, "shape"):
        for weights in _in_order(select(of_threads, shape=shape, method=IN_TURN), "weights"):
            where = {"shape": shape, "weights": weights}
            rates = [
                median(of_threads, lambda r: r["nbytes"] / r["seconds"], method=m, **where)
                for m in (IN_TURN, SAME)
            ]
            shares = [_share_of_read(of_threads, where | {"method": IN_TURN}, of) for of in (SAME, READ)]
            rows.append(
                (
                    shape,
                    weights,
                    *map(as_rate, rates),
                    *("-" if share is None else f"{share:.2f}" for share in shares),
                )
            )
    note = """One row times different layers of a shape, one after another in one run of memory: what the products of a token's layers
read, with nothing in between; over what a plain read of the same bytes does in the same round, and over that of another buffer."""
    header = ("shape", "weights", "read at", "plainly at", "of the read rate", "of another buffer's")
    return Table(f"Layer after layer, {_named(threads)}", note, header, rows)


def _named(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def _targets(records: list[Record], threads: int) -> list[Target]:
    of_threads, named = select(records, threads=threads), f"{threads} threads"
    targets = []
    for rows, bound in _FP8_CPP.items():
        value = _over_dense(of_threads, "fp8 128x128", "cpp", rows, threads)
        targets.append(Target(f"fp8 128x128, cpp, M={rows}, {named}: over {DENSE}", value, bound, True))
    peer = GPTQMODEL if select(records, method=GPTQMODEL) else PEER
    for rows, bound in _INT4_CPP.items():
        value = _over_shapes(of_threads, {"method": peer}, {"weights": "gptq4 g128", "method": "cpp"}, rows)
        targets.append(
            Target(
                f"gptq4 g128, cpp, M={rows}, {named}: over {peer} (the 4-bit peer here)",
                value,
                bound,
                True,
            )
        )
    for rows in _in_order(records, "rows"):
        value = _over_dense(of_threads, ROUNDED, "int8", rows, threads)
        targets.append(Target(f"{ROUNDED}, M={rows}, {named}: over {DENSE}", value, _ROUNDED, True))
    for weights in READ_IN_TURN:
        for method, of, how in (
            (IN_TURN, SAME, "layer after layer"),
            ("cpp", READ, "one call after the caches were emptied"),
        ):
            where = {"weights": weights, "method": method}
            shares = [
                _share_of_read(of_threads, where | {"shape": shape}, of)
                for shape in _in_order(records, "shape")
            ]
            found = [share for share in shares if share is not None]
            value = statistics.median(found) if found else None
            targets.append(
                Target(f"{weights}, cpp, M=1, {named}: share of the read rate, {how}", value, 0.85, True)
            )
    return targets


def _over_dense(records: list[Record], weights: str, method: str, rows: int, threads: int) -> float | None:
    return _over_shapes(
        select(records, threads=threads), {"method": DENSE}, {"weights": weights, "method": method}, rows
    )


def _over_shapes(records: list[Record], other: dict, ours: dict, rows: int) -> float | None:
    """Returns the geometric mean over shapes of our speedup."""
    ratios = [_ratio(records, other, ours, shape, rows) for shape in _in_order(records, "shape")]
    found = [ratio for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(found) if found else None


def _ratio(records: list[Record], other: dict, ours: dict, shape: str, rows: int) -> float | None:
    """Returns the median over rounds of the other's seconds divided by ours."""
    where = {"shape": shape, "rows": rows}
    theirs = {record["round"]: record["seconds"] for record in select(records, **{**other, **where})}
    ratios = [
        theirs[r["round"]] / r["seconds"]
        for r in select(records, **{**ours, **where})
        if r["round"] in theirs
    ]
    return statistics.median(ratios) if ratios else None


def _share_of_read(records: list[Record], where: dict, of: str = READ) -> float | None:
    """Returns the median over rounds of a weight's read rate, divided by that of a plain read.

    The plain read reads the same weight or another buffer.
    """
    read = {
        "method": of,
        "rows": 1,
        "shape": where.get("shape"),
        "weights": "-" if of == READ else where["weights"],
    }
    plain = {record["round"]: record["nbytes"] / record["seconds"] for record in select(records, **read)}
    rates = [
        r["nbytes"] / r["seconds"] / plain[r["round"]]
        for r in select(records, **{**where, "rows": 1})
        if r["round"] in plain
    ]
    return statistics.median(rates) if rates else None


def _pairs(records: Iterable[Record]) -> list[tuple[str, str]]:
    """Returns (weights, method) of all products, unquantized ones first."""
    found = dict.fromkeys(
        (record["weights"], record["method"])
        for record in records
        if record["method"] not in (READ, IN_TURN, SAME)
    )
    return sorted(found, key=lambda pair: pair[1] not in (DENSE, WIDE))


def _level(native: ctypes.CDLL) -> str:
    vnni = ", dot products of bytes (VNNI)" if native.hfq_use_vnni(-1) else ""
    return LEVELS[native.hfq_use(-1)] + vnni + SHORT[native.hfq_use_short(-1)]


def _in_order(records: Iterable[Record], key: str) -> list:
    """Returns the distinct values of a key. Numbers of rows and threads are ascending."""
    found = list(dict.fromkeys(record[key] for record in records))
    return sorted(found) if key in ("rows", "threads") else found
