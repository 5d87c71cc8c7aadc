"""`python -m benchmarks qmoe`: bits, decoding, and disk rates of QMoE's codes.

Sizes are those of independent draws: a weight is 0 with probability p0, else the minimum or the maximum of
its row with equal probability.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.records import Record, median, rotated
from hfq.formats import Format
from hfq.formats.codecs.pair_dictionary import ZERO_PROBABILITY
from hfq.formats.gptq import Gptq
from hfq.formats.qmoe import Qmoe
from hfq.kernels.cpp import library, ternary
from hfq.kernels.registry import choose_kernel
from hfq.machine_profile.machine_facts import machine_facts
from hfq.plots.charts import Lines
from hfq.tables import Report, Table, Target

__all__ = ["ZEROS", "bench_qmoe", "crossing_rates", "entropy"]

ZEROS = (0.5, 0.7, ZERO_PROBABILITY, 0.95)
WIDTH = 3072
_ROWS, _OUT, _EXPERTS = 64, 768, 8
_CODES, _WITH_ROWS = 0.732, 0.754
"""Bits per weight of QMoE's own packer at p0 = 0.885 and a width of 3,072, without and with 64 bits a row."""

_TOLERANCE = 0.01
_ROW_BITS = 64
_SECONDS = 0.2
"""Seconds of one measurement, at least."""

_GROUP = 128
_QUIET = 0.3
"""Load average of a machine that runs nothing else, at most."""

Layer = tuple[Format, Mapping[str, torch.Tensor]]


def bench_qmoe(
    folder: Path, threads: Sequence[int], rounds: int, quick: bool, say: Callable[[str], None]
) -> Report:
    """Runs the benchmark.

    Args:
        folder: A folder, for the facts about the machine.
        threads: Numbers of threads.
        rounds: Number of interleaved rounds.
        quick: True for small layers, which test the benchmark.
        say: Called with a line before each measurement.
    """
    load = _load_average()
    sizes = [_measure_size(zeros, 8 if quick else _ROWS) for zeros in ZEROS]
    out = 32 if quick else _OUT
    layers = {"QMoE": _qmoe_layers(out), "GPTQ, 2 bits": _gptq_layers(out)}
    setups = {f"{what} {count}": (what, count) for what in _works(layers) for count in threads}
    records: list[Record] = []
    before = torch.get_num_threads()
    try:
        for number in range(rounds):
            for name in rotated(list(setups), number):
                what, count = setups[name]
                say(f"round {number + 1} of {rounds}, {what}, {count} threads")
                torch.set_num_threads(count)
                seconds = _time(_works(layers)[what], 0.0 if quick else _SECONDS) / (out * WIDTH)
                records.append({"what": what, "threads": count, "round": number, "seconds": seconds})
    finally:
        torch.set_num_threads(before)
    facts = machine_facts(folder) | {
        "load average": load,
        "rounds": f"{rounds}, interleaved; medians",
        "layers": f"{out} × {WIDTH}, {_EXPERTS} of them in turn; float32 activations",
    }
    return _report(facts, sizes, layers, threads, records)


def _load_average() -> str:
    load = os.getloadavg()[0]
    is_shared = load > _QUIET
    return f"{load:.1f} before the run" + (
        ", so these are the times of a shared machine" if is_shared else ""
    )


def entropy(zeros: float) -> float:
    """Returns the entropy of a weight in bits, for the probability of zero."""
    rest = (1 - zeros) / 2
    return -sum(share * math.log2(share) for share in (zeros, rest, rest) if share)


def crossing_rates(bits: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Returns the disk rates below which an expert of the first format is ready before one of the second.

    Args:
        bits: Bits per weight of both formats.
        seconds: Seconds per weight of both products.

    Returns:
        Bytes per second if products follow reads, and if products and reads overlap; infinity if the first
        format is always ahead.
    """
    slower = seconds[0] - seconds[1]
    if slower <= 0:
        return math.inf, math.inf
    return (bits[1] - bits[0]) / 8 / slower, bits[1] / 8 / seconds[0]


def _weight(rows: int, zeros: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    signs = 2.0 * torch.randint(0, 2, (rows, WIDTH), generator=generator) - 1
    return signs * (torch.rand(rows, WIDTH, generator=generator) >= zeros)


def _measure_size(zeros: float, rows: int) -> Record:
    tensors = Qmoe().quantize(_weight(rows, zeros, 0))
    codes = 16 * tensors["w_comp"].numel() / (rows * WIDTH)
    return {"p0": zeros, "entropy": entropy(zeros), "codes": codes, "with_rows": codes + _ROW_BITS / WIDTH}


def _qmoe_layers(out: int) -> list[Layer]:
    made = [Qmoe().quantize(_weight(out, ZERO_PROBABILITY, seed)) for seed in range(_EXPERTS)]
    return [(Qmoe(codes=len(each["w_comp"])).sized(WIDTH, out).resolve("m", each), each) for each in made]


def _gptq_layers(out: int) -> list[Layer]:
    writer = Gptq(num_bits=2, group_size=_GROUP, zero_reading="field_plus_one", g_idx_length=2)
    generator = torch.Generator().manual_seed(0)
    made = [writer.quantize(torch.randn(out, WIDTH, generator=generator)) for _ in range(_EXPERTS)]
    return [(writer.sized(WIDTH, out).resolve("m", each), each) for each in made]


def _works(layers: Mapping[str, list[Layer]]) -> dict[str, Callable[[int], object]]:
    """Returns what is measured: a function of the number of the call, by name."""
    decoders: dict[str, Callable[[Layer], object]] = {"decode, plain torch": _decode}
    if library.library() is not None:
        decoders["decode, C++"] = _decode_compiled
    works = {name: functools.partial(_in_turn, layers["QMoE"], decode) for name, decode in decoders.items()}
    for name, each in layers.items():
        works[f"product, {name}"] = functools.partial(_in_turn, each, _multiply)
    return works


def _in_turn(layers: list[Layer], work: Callable[[Layer], object], call: int) -> object:
    return work(layers[call % len(layers)])


def _decode(layer: Layer) -> torch.Tensor:
    return layer[0].dequantize(layer[1])


def _decode_compiled(layer: Layer) -> torch.Tensor | None:
    found, tensors = layer
    rows = len(tensors["row_off"]) - 1
    return ternary.fill_rows(tensors, found, torch.float32, 0, rows)  # type: ignore[arg-type]


def _multiply(layer: Layer) -> torch.Tensor:
    found, tensors = layer
    out_features, in_features = found.shape(tensors)
    kernel = choose_kernel("auto", found, in_features, out_features)
    return kernel.linear(torch.ones(1, in_features), tensors, found)


def _time(work: Callable[[int], object], least: float) -> float:
    """Returns the seconds of one call, over calls that take `least` seconds together."""
    work(0)
    calls, started = 0, time.perf_counter()
    while True:
        work(calls)
        calls += 1
        seconds = time.perf_counter() - started
        if seconds >= least:
            return seconds / calls


def _report(
    facts: Mapping[str, str],
    sizes: list[Record],
    layers: Mapping[str, list[Layer]],
    threads: Sequence[int],
    records: list[Record],
) -> Report:
    at_own = next(size for size in sizes if size["p0"] == ZERO_PROBABILITY)
    targets = [
        Target(
            f"{what} per weight at p0 = {ZERO_PROBABILITY}: distance from {bits}",
            abs(found - bits) / bits,
            _TOLERANCE,
        )
        for what, found, bits in (
            ("codes, bits", at_own["codes"], _CODES),
            ("codes and rows, bits", at_own["with_rows"], _WITH_ROWS),
        )
    ]
    series = {
        "entropy": [(size["p0"], size["entropy"]) for size in sizes],
        "codes": [(size["p0"], size["codes"]) for size in sizes],
        "codes and rows": [(size["p0"], size["with_rows"]) for size in sizes],
    }
    chart = Lines("Bits per weight of QMoE's codes", "probability of a zero", "bits per weight", series)
    tables = [
        _size_table(sizes),
        _speed_table(layers, threads, records),
        _rate_table(layers, threads, records),
    ]
    return Report("QMoE: bits, decoding, and disk rates", facts, tables, targets, [*sizes, *records], chart)


def _size_table(sizes: list[Record]) -> Table:
    rows = [
        (
            f"{size['p0']:g}",
            f"{size['entropy']:.3f}",
            f"{size['codes']:.3f}",
            f"{size['with_rows']:.3f}",
            f"{16 / size['with_rows']:.1f}",
        )
        for size in sizes
    ]
    note = (
        f"Bits per weight of {WIDTH} columns. A row also has its offset, minimum, and maximum, {_ROW_BITS} bits. "
        f"The dictionary is made for p0 = {ZERO_PROBABILITY}."
    )
    return Table(
        "Size", note, ("p0", "entropy", "codes", "codes and rows", "times smaller than bfloat16"), rows
    )


def _speed_table(layers: Mapping[str, list[Layer]], threads: Sequence[int], records: list[Record]) -> Table:
    rows = []
    for what in _works(layers):
        found = [_seconds(records, what, count) for count in threads]
        rows.append((what, *("-" if each is None else f"{1e-9 / each:.3f}" for each in found)))
    note = "Billions of weights per second. A product is that of one token, with decoding, by the kernel hfq chooses."
    return Table("Speed", note, ("what", *(f"threads: {count}" for count in threads)), rows)


def _rate_table(layers: Mapping[str, list[Layer]], threads: Sequence[int], records: list[Record]) -> Table:
    bits = [_bits(each) for each in layers.values()]
    rows = []
    for count in threads:
        seconds = [_seconds(records, f"product, {name}", count) for name in layers]
        if None not in seconds:
            rates = crossing_rates(bits, seconds)  # type: ignore[arg-type]
            rows.append((str(count), *(f"{rate / 1e9:.2f}" if rate < math.inf else "any" for rate in rates)))
    named = ", ".join(f"{name} {each:.3f}" for name, each in zip(layers, bits, strict=True))
    note = (
        "GB/s of a disk below which an expert of QMoE has been read and multiplied by one token sooner than one "
        f"of 2 bits. Bits per weight: {named}. Overlapped: the next expert is read while one computes."
    )
    return Table("Disk rates", note, ("threads", "one after the other", "overlapped"), rows)


def _bits(layers: list[Layer]) -> float:
    stored = sum(8 * tensor.nbytes for _, tensors in layers for tensor in tensors.values())
    return stored / sum(math.prod(found.shape(tensors)) for found, tensors in layers)


def _seconds(records: list[Record], what: str, threads: int) -> float | None:
    return median(records, lambda record: record["seconds"], what=what, threads=threads)
