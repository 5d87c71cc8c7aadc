"""Table and targets of `python -m benchmarks plan`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from benchmarks.records import Record
from hfq.machine_profile.machine_facts import machine_facts
from hfq.plots.charts import Chart
from hfq.tables import Report, Table, Target

__all__ = ["bytes_apart", "plan_report"]

MOST_BYTES_APART, MOST_SECONDS_APART = 0.02, 0.25

_NOTE = """Bytes on each device as planned from headers and as measured in the loaded model: tensors in memory, tensors that stay in
files, and the offload buffer. Under ZeRO-3 the shards of flat buffers and of all other parameters on the fullest rank. One token a step behind a short context,
batch 1. Predicted over achieved is that of tokens/s, taken within a round: below 1 the machine was faster than predicted."""


def bytes_apart(record: Record) -> float:
    """Returns the largest relative difference of planned and measured bytes over all used devices."""
    pairs = [(record["planned"][device], record["measured"][device]) for device in record["planned"]]
    return max(
        (
            abs(planned - measured) / max(planned, measured)
            for planned, measured in pairs
            if planned or measured
        ),
        default=0.0,
    )


def plan_report(folder: Path, facts: Mapping[str, str], records: list[Record]) -> Report:
    """Returns the report of all records.

    Args:
        folder: Folder of the generated checkpoints.
        facts: Further facts about the run.
        records: See `bench_plan`.
    """
    rows = [_row(record) for record in records]
    header = (
        "checkpoint",
        "placement",
        "planned",
        "measured",
        "apart",
        "predicted tokens/s",
        "achieved tokens/s",
        "predicted / achieved",
    )
    table = Table("Planned and measured, predicted and achieved", _NOTE, header, rows)
    names = list(dict.fromkeys(record["checkpoint"] for record in records))
    placements = list(dict.fromkeys(record["placement"] for record in records))
    ratios = {(record["checkpoint"], record["placement"]): _ratio(record) for record in records}
    series = {placement: [ratios.get((name, placement)) for name in names] for placement in placements}
    chart = Chart("Tokens per second, predicted over achieved (1 is right)", names, series)
    return Report(
        "Plans: bytes and speed",
        machine_facts(folder) | dict(facts),
        [table],
        _targets(records),
        records,
        chart,
    )


def _targets(records: list[Record]) -> list[Target]:
    worst = max((bytes_apart(record) for record in records), default=None)
    near = [abs(_ratio(record) - 1) <= MOST_SECONDS_APART for record in records]
    return [
        Target("largest difference of planned and measured bytes on any device", worst, MOST_BYTES_APART),
        Target(
            f"share of placements whose tokens/s are within {MOST_SECONDS_APART:.0%} of the predicted ones",
            sum(near) / len(near) if near else None,
            1.0,
            at_least=True,
        ),
    ]


def _row(record: Record) -> tuple[str, ...]:
    return (
        record["checkpoint"],
        record["placement"],
        _bytes(record["planned"]),
        _bytes(record["measured"]),
        f"{bytes_apart(record):.2%}",
        f"{1 / _median(record, 'predicted'):.3g}",
        f"{1 / _median(record, 'achieved'):.3g}",
        f"{_ratio(record):.2f}",
    )


def _bytes(devices: Mapping[str, int]) -> str:
    return ", ".join(f"{device} {nbytes:,}" for device, nbytes in devices.items() if nbytes)


def _median(record: Record, what: str) -> float:
    return statistics.median(each[what] for each in record["rounds"])


def _ratio(record: Record) -> float:
    """Returns predicted over measured tokens per second, as the median of the rounds' ratios."""
    return statistics.median(each["achieved"] / each["predicted"] for each in record["rounds"])
