"""Report of `python -m benchmarks quantize`: measurements, bounds, and gptqmodel's results."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter

from benchmarks.records import Record, median, select
from hfq.plots.charts import Chart
from hfq.tables import Report, Table, Target

__all__ = ["make_report"]

_QUALITY = 1.005
"""Largest allowed ratio of hfq's perplexity to gptqmodel's."""


def make_report(records: list[Record], facts: Mapping[str, str]) -> Report:
    """Returns the report of the records of `bench_quantize`."""
    tables = [_memory_table(records), _time_table(records), *_quality_tables(records)]
    models = sorted({r["model"] for r in select(records, kind="quality")})
    groups = [f"{model}, {bits} bits" for model in models for bits in (4, 3, 2)]
    series = {
        tool: [_over_floats(records, model, bits, tool) for model in models for bits in (4, 3, 2)]
        for tool in _tools(records, "quality")
    }
    chart = Chart("Perplexity over that of the floats (lower is better)", groups, series)
    return Report("Quantizing", facts, tables, _targets(records, models), records, chart)


def _targets(records: list[Record], models: list[str]) -> list[Target]:
    found = []
    for method in ("gptq", "fp8"):
        share = max(
            (r["peak_rss"] / r["bound"] for r in select(records, kind="memory", method=method)), default=None
        )
        found.append(
            Target(f"{method}: peak memory over one float32 block, activations and 400 MiB", share, 1.0)
        )
    same = median(records, lambda r: float(r["is_identical"]), kind="resume")
    found.append(Target("killed and resumed: whether every file is identical", same, 1.0, at_least=True))
    for what, key in (("CPU seconds", "cpu_seconds"), ("peak memory", "peak_rss")):
        ours, theirs = (
            median(records, itemgetter(key), kind="time", tool=tool) for tool in ("hfq", "gptqmodel")
        )
        found.append(Target(f"{what} over gptqmodel's", ours / theirs if ours and theirs else None, 1.0))
    for model in models:
        for bits in (4, 3, 2):
            ours, theirs = (_perplexity(records, model, bits, tool) for tool in ("hfq", "gptqmodel"))
            ratio = ours / theirs if ours and theirs else None
            found.append(Target(f"{model}, {bits} bits: median perplexity over gptqmodel's", ratio, _QUALITY))
    return found


def _memory_table(records: list[Record]) -> Table:
    rows = [
        (
            r["method"],
            *(_mib(r[key]) for key in ("peak_rss", "imports", "block", "activations", "bound")),
            f"{r['cpu_seconds']:.0f} s",
        )
        for r in select(records, kind="memory")
    ]
    rows += [
        (
            f"gptq, killed after block {r['killed_after']}, resumed",
            _mib(r["peak_rss"]),
            _mib(r["imports"]),
            "",
            "",
            "",
            f"{r['cpu_seconds']:.0f} s; {r['files']} files {'identical' if r['is_identical'] else 'DIFFER'}",
        )
        for r in select(records, kind="resume")
    ]
    note = (
        "Peak resident memory of a fresh process, what it had after its imports, and the bound: the "
        "parameters of one block in "
        "float32, the hidden states of the calibration data in float32, and 400 MiB, imports included."
    )
    return Table(
        "Memory", note, ("method", "peak", "imports", "one block", "activations", "bound", "CPU"), rows
    )


def _time_table(records: list[Record]) -> Table:
    rows = []
    for tool in _tools(records, "time"):
        cpu, wall, peak = (median(records, itemgetter(key), kind="time", tool=tool) for key in _TIME)
        if cpu is None or wall is None or peak is None:
            errors = [
                r["error"] for r in records if r["kind"] == "time" and r["tool"] == tool and "error" in r
            ]
            rows.append((tool, errors[0].replace("|", "/")[:90], "-", "-"))
        else:
            rows.append((tool, f"{cpu:.1f} s", f"{wall:.1f} s", _mib(peak)))
    note = (
        "GPTQ to 4 bits in groups of 128, the same sequences; from reading the model to the written "
        "folder, imports not timed."
    )
    return Table("Time", note, ("tool", "CPU seconds", "wall", "peak memory"), rows)


def _quality_tables(records: list[Record]) -> list[Table]:
    tables = []
    for floats in select(records, kind="floats"):
        model, rows = floats["model"], []
        for bits in (4, 3, 2):
            for tool in _tools(records, "quality"):
                found = [
                    r["perplexity"]
                    for r in select(records, kind="quality", model=model, bits=bits, tool=tool)
                ]
                middle = _perplexity(records, model, bits, tool)
                rows.append(
                    (
                        str(bits),
                        tool,
                        "-" if middle is None else f"{middle:.3f}",
                        ", ".join(f"{p:.3f}" for p in found),
                    )
                )
        note = (
            f"Groups of 128, symmetric; the floats have {floats['perplexity']:.3f}. Each calibration data "
            f"was drawn independently."
        )
        tables.append(Table(f"Perplexity of {model}", note, ("bits", "tool", "median", "each set"), rows))
    return tables


_TIME = ("cpu_seconds", "wall_seconds", "peak_rss")


def _tools(records: list[Record], kind: str) -> list[str]:
    return list(dict.fromkeys(r["tool"] for r in records if r["kind"] == kind))


def _perplexity(records: list[Record], model: str, bits: int, tool: str) -> float | None:
    return median(records, lambda r: r["perplexity"], kind="quality", model=model, bits=bits, tool=tool)


def _over_floats(records: list[Record], model: str, bits: int, tool: str) -> float | None:
    found = _perplexity(records, model, bits, tool)
    floats = median(records, lambda r: r["perplexity"], kind="floats", model=model)
    return found / floats if found and floats else None


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB"
