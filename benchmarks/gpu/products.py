"""Part 4: products of each format by shape and number of rows, against bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.bench import Bench, NotAvailable, Record, find_missing, missing, select
from benchmarks.gpu.contenders import CONTENDERS, FORMATS, PLAIN, Multiply, Product, hfq_product
from benchmarks.gpu.report import Values
from benchmarks.gpu.timing import capture, device_seconds, host_seconds, launches
from hfq.tables import Table

__all__ = ["measure", "tables", "values"]

SIZES = ((14336, 4096), (4096, 4096), (4096, 14336), (7168, 2048))
ROWS = (1, 4, 8, 16, 32, 64, 128, 512, 2048)
DRY_SIZES, DRY_ROWS = ((256, 128),), (1, 16)
CALLED_ROWS = (1, 16, 64)
"""Rows for which host time and launches of a single call are measured."""

ACCEPTED_SIZE = "14336 x 4096"
FOUR_BITS = ("int4 rows", "mxfp4", "nvfp4", "nf4", "awq")
MOST_COPIES = 32
TO_END = 3.0
"""Seconds that must be left to measure another weight."""


def measure(bench: Bench) -> Iterator[Record]:
    """Yields the time of each product, and the host's share of single calls."""
    sizes, rows = (DRY_SIZES, DRY_ROWS) if bench.is_dry else (SIZES, ROWS)
    for size in sizes:
        for name in (PLAIN, *FORMATS, *(name for name in CONTENDERS if name != PLAIN)):
            labels = {"format": name, "size": f"{size[0]} x {size[1]}"}
            if bench.seconds_left < TO_END:
                yield missing("product", "no time was left", **labels)
                continue
            try:
                yield from _measure_weight(bench, name, size, rows, labels)
            except Exception as error:
                yield bench.outlived("product", error, **labels)


def tables(records: list[Record]) -> list[Table]:
    """Returns one table of each size, and one of single calls."""
    found = []
    for size in dict.fromkeys(record["size"] for record in records):
        timed = list(select(records, "product", size=size))
        rows = sorted({record["rows"] for record in timed})
        lines = []
        for name in dict.fromkeys(record["format"] for record in records if record["size"] == size):
            own = {r["rows"]: r for r in timed if r["format"] == name}
            if not own:
                reason = find_missing(records, "product", size=size, format=name)
                lines.append((name, "-", *["-"] * len(rows), f"not measured: {reason}"))
                continue
            kernel = next(iter(own.values()))["kernel"]
            cells = [_cell(records, own.get(count)) for count in rows]
            lines.append((name, kernel, *cells, _crossover(records, own)))
        header = ("format", "kernel", *(f"M = {count}" for count in rows), "slower than bf16 from")
        how = ", ".join(sorted({record["how"] for record in timed}))
        note = f"Microseconds, and times bf16. Weights larger than the L2 cache take turns; timed by {how}."
        found.append(Table(f"Products, {size}", note, header, lines))
    calls = [
        (r["format"], r["kernel"], r["size"], str(r["rows"]), f"{r['host'] * 1e6:.1f}", str(r["launches"]))
        for r in select(records, "call")
    ]
    header = ("format", "kernel", "size", "M", "host microseconds", "launches")
    return [*found, Table("Single calls", "Host time of a call that is not captured.", header, calls)]


def values(records: list[Record], ceilings: dict[str, float]) -> Values:
    """Returns the worst ratios to bfloat16, and the most host time and launches."""
    found: dict[str, float | str] = {}
    ratios = {name: _ratio(records, _one(records, name, ACCEPTED_SIZE, 1)) for name in FORMATS}
    for name in ("gptq4", "fp8"):
        if ratios[name] is not None:
            found[name] = ratios[name]
    if four := [ratios[name] for name in FOUR_BITS if ratios[name] is not None]:
        found["four"] = min(four)
        rates = [_one(records, name, ACCEPTED_SIZE, 1) for name in FOUR_BITS]
        slowest = min(each["nbytes"] / each["seconds"] for each in rates if each is not None)
        copied = ceilings.get("copy")
        found["four_rate"] = slowest / copied if copied else "part 1 did not measure the copy rate"
    for key, rows in (("some", 64), ("many", 2048)):
        each = [_ratio(records, r) for r in select(records, "product", rows=rows) if r["format"] in FORMATS]
        if known := [ratio for ratio in each if ratio is not None]:
            found[key] = min(known)
    if calls := [record for record in select(records, "call") if record["format"] in FORMATS]:
        found["host"] = max(record["host"] * 1e6 for record in calls if record["rows"] == 1)
        found["launches"] = max(record["launches"] for record in calls)
    return found


def _measure_weight(
    bench: Bench, name: str, size: tuple[int, int], rows: tuple[int, ...], labels: Record
) -> Iterator[Record]:
    device = bench.device
    make = CONTENDERS.get(name)
    product = make(size, device) if make else hfq_product(name, size, device)
    labels = {**labels, "kernel": product.kernel}
    calls = [product.bind() for _ in range(_copies(product, device))]
    for count in rows:
        activations = torch.randn(count, size[1], device=device).bfloat16()
        seconds, how = _seconds(calls, activations, device)
        yield {
            "kind": "product",
            **labels,
            "rows": count,
            "seconds": seconds,
            "how": how,
            "nbytes": product.nbytes,
        }
        is_first = size in (SIZES[1], DRY_SIZES[0])
        if count in CALLED_ROWS and is_first:
            yield {"kind": "call", **labels, "rows": count, **_single(calls[0], activations, device)}


def _copies(product: Product, device: torch.device) -> int:
    """Returns the number of weights that together are four times as large as the L2 cache."""
    properties = torch.get_device_module(device).get_device_properties(device)
    cache = getattr(properties, "L2_cache_size", 0)
    return min(max(-(-4 * cache // product.nbytes), 2), MOST_COPIES)


def _seconds(calls: list[Multiply], rows: torch.Tensor, device: torch.device) -> tuple[float, str]:
    """Returns the median seconds of a product, and how it was timed."""

    def turn() -> None:
        for call in calls:
            call(rows)

    try:
        timed: Callable[[], None] = capture(turn, device)
        how = "graph replays"
    except NotAvailable:
        timed, how = turn, "eager calls"
    except RuntimeError as error:
        timed, how = turn, f"eager calls ({str(error).partition(chr(10))[0]})"
    return device_seconds(timed, device, times=9) / len(calls), how


def _single(call: Multiply, rows: torch.Tensor, device: torch.device) -> Record:
    times = 10 if device.type == "sim" else 100
    return {
        "host": host_seconds(lambda: call(rows), device, times),
        "launches": launches(lambda: call(rows), device),
    }


def _one(records: list[Record], name: str, size: str, rows: int) -> Record | None:
    return next(select(records, "product", format=name, size=size, rows=rows), None)


def _ratio(records: list[Record], record: Record | None) -> float | None:
    """Returns how many times as fast as bfloat16 a product is; None if one of both is missing."""
    if record is None:
        return None
    plain = _one(records, PLAIN, record["size"], record["rows"])
    return None if plain is None else plain["seconds"] / record["seconds"]


def _cell(records: list[Record], record: Record | None) -> str:
    if record is None:
        return "-"
    ratio = _ratio(records, record)
    return f"{record['seconds'] * 1e6:.1f}" + ("" if ratio is None else f" ({ratio:.2f}x)")


def _crossover(records: list[Record], own: dict[int, Record]) -> str:
    """Returns the smallest number of rows from which bfloat16 is faster."""
    slower = [rows for rows, record in own.items() if (_ratio(records, record) or 1) < 1]
    return f"M = {min(slower)}" if slower else "never"
