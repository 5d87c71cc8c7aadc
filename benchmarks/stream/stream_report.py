"""Tables and targets of `python -m benchmarks stream`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.checkpoints import FORMATS
from benchmarks.records import Record, median, select
from hfq.machine_profile.machine_facts import machine_facts
from hfq.plots.charts import Chart
from hfq.tables import Report, Table, Target, as_rate

__all__ = ["stream_report"]

OWN, BUFFERED, PLAIN, HOOKS = "hfq", "hfq, buffered", "accelerate", "accelerate's hooks"
_MOVERS = (OWN, BUFFERED, PLAIN, HOOKS)
_NOTE = f"""Every forward starts from a cold page cache (posix_fadvise); all layers are on disk; embedding, norm and head are in
memory. Each layer reads one byte of every page of its weights. What had been read ahead before the clock started is not counted.

- {OWN}: direct reads, which `disk_io="auto"` chooses for a model that does not fit in memory.
- {BUFFERED}: reads through the page cache.
- {PLAIN}: transformers and accelerate as they are, where they take the checkpoint; on a CPU they dequantize FP8 while loading, and
  offload bfloat16.
- {HOOKS}: accelerate's hooks over modules that hold the checkpoint's own tensors: the movement of the same bytes.

Rates are of the checkpoint's bytes."""


def stream_report(folder: Path, facts: Mapping[str, str], records: list[Record]) -> Report:
    """Returns the report of all records.

    Args:
        folder: Folder of the checkpoints.
        facts: Further facts about the run.
        records: See `bench_stream.measure_movement` and `measure_decoding`.
    """
    limit = median(records, lambda r: r["limit"], kind="idle")
    found = {"raw direct read, cold": f"{as_rate(limit)} (4 or 8 threads x 16 MiB into 2 MiB pages)"}
    series = {mover: [_share_of_limit(records, weights, mover) for weights in FORMATS] for mover in _MOVERS}
    return Report(
        "Streaming: layers on disk",
        machine_facts(folder) | dict(facts) | found,
        [_idle_table(records), _busy_table(records), _decode_table(records), _micro_table(records)],
        _targets(records),
        records,
        Chart("No compute: share of the disk's limit (higher is better)", FORMATS, series),
    )


def _step_seconds(record: Record) -> float:
    """Returns the seconds of one step, corrected for layers prefetched before the clock started."""
    return record["seconds"] * record["expected"] / record["moved"] / record["steps"]


def _efficiency(record: Record) -> float:
    """Returns the longer of reading at the disk's rate and computing, divided by the time taken."""
    return max(record["moved"] / record["limit"], record["alone"] * record["steps"]) / record["seconds"]


def _waits(records: list[Record], **where) -> float | None:
    """Returns the fraction of time in which forward passes waited for their layers."""
    counted = [record for record in select(records, **where) if "waited" in record]
    return statistics.median(record["waited"] / record["seconds"] for record in counted) if counted else None


def _times_as_fast(
    records: list[Record], weights: str, other: str, other_weights: str | None = None, **where
) -> float | None:
    """Returns the median over rounds of another contender's time divided by hfq's."""
    own = _by_round(records, weights, OWN, **where)
    others = _by_round(records, other_weights or weights, other, **where)
    ratios = [others[number] / own[number] for number in own.keys() & others.keys()]
    return statistics.median(ratios) if ratios else None


def _by_round(records: list[Record], weights: str, mover: str, **where) -> dict[int, float]:
    value: Callable[[Record], float] = (
        (lambda r: r["seconds"]) if where.get("kind") == "decode" else _step_seconds
    )
    measured = [
        r for r in select(records, weights=weights, mover=mover, **where) if r.get("moved", 1)
    ]  # the offload buffer may hold all layers
    return {record["round"]: value(record) for record in measured}


def _share_of_limit(records: list[Record], weights: str, mover: str) -> float | None:
    return median(
        records, lambda r: r["moved"] / r["seconds"] / r["limit"], kind="idle", weights=weights, mover=mover
    )


def _idle_table(records: list[Record]) -> Table:
    rows: list[tuple[str, ...]] = []
    for weights in FORMATS:
        for mover in _MOVERS:
            where = {"kind": "idle", "weights": weights, "mover": mover}
            rate = median(records, lambda r: r["moved"] / r["seconds"], **where)
            seconds = median(records, _step_seconds, **where)
            if rate is None:
                rows.append((weights, mover, _refusal(records, weights, mover), "-", "-"))
            else:
                rows.append(
                    (
                        weights,
                        mover,
                        as_rate(rate),
                        _text(_share_of_limit(records, weights, mover)),
                        _text(seconds),
                    )
                )
    return Table(
        "Without compute", _NOTE, ("weights", "mover", "rate", "share of the disk's limit", "a pass, s"), rows
    )


def _busy_table(records: list[Record]) -> Table:
    rows = []
    for weights in FORMATS:
        for mover in _MOVERS:
            where = {"kind": "busy", "weights": weights, "mover": mover}
            values = median(records, _step_seconds, **where), median(records, _efficiency, **where)
            waits = _waits(records, **where)
            rows.append(
                (
                    weights,
                    mover,
                    *map(_text, [*values, waits, _times_as_fast(records, weights, mover, kind="busy")]),
                )
            )
    note = """A layer sleeps as long as the disk's limit takes to read it: an accelerator computes, the processor is idle. How long a
pass computes was measured with the same model and hfq, all in memory and nothing read; io is what was read at the disk's limit.
Reading takes processor time, too, and where few cores do both, computing takes longer than alone; the share of the time in which
a forward waited for its layers says what is left to gain by reading ahead."""
    header = (
        "weights",
        "mover",
        "a pass, s",
        "max(io, compute) / time",
        "waiting / time",
        "hfq is faster by",
    )
    return Table("With compute standing in", note, header, rows)


def _decode_table(records: list[Record]) -> Table:
    rows = []
    for weights in FORMATS:
        for mover, on_disk in ((OWN, False), (PLAIN, False), (OWN, True), (PLAIN, True)):
            where = {"kind": "decode", "weights": weights, "mover": mover, "on_disk": on_disk}
            seconds = median(records, lambda r: r["seconds"], **where)
            if seconds is not None:
                equal = _equal_tokens(records, weights, mover) if on_disk else None
                verdict = "-" if equal is None else "yes" if equal == 1 else "NO"
                rows.append((weights, mover, "disk" if on_disk else "memory", f"{seconds:.3f} s", verdict))
    note = (
        "Greedy decoding, computed on the CPU; tokens are compared with those of the same mover with all "
        "in memory."
    )
    return Table("Decoding", note, ("weights", "mover", "layers in", "a token", "same tokens"), rows)


def _micro_table(records: list[Record]) -> Table:
    counts = sorted({record["count"] for record in select(records, kind="micro")})
    rows = []
    for weights in FORMATS:
        for count in counts:
            where = {"kind": "micro", "weights": weights, "count": count}
            cells = [median(records, _step_seconds, mover=mover, **where) for mover in (OWN, PLAIN, HOOKS)]
            passes = median(records, lambda r: r["expected"] / r["nbytes"] / r["steps"], mover=OWN, **where)
            faster = [
                _times_as_fast(records, weights, mover, kind="micro", count=count) for mover in (PLAIN, HOOKS)
            ]
            rows.append((weights, str(count), *map(_text, [*cells, *faster, passes])))
    note = """hfq runs `hfq.run_batches`, accelerate a pass for each micro-batch; every pass starts from a cold page cache, as for a
model that memory does not hold. A layer sleeps for an eighth of its reading time at the disk's limit for each micro-batch, so that
to compute 8 takes as long as reading once. Seconds, and accelerate's over hfq's."""
    header = (
        "weights",
        "micro-batches",
        OWN,
        PLAIN,
        HOOKS,
        f"over {PLAIN}",
        f"over {HOOKS}",
        "layers read by hfq, in passes",
    )
    return Table("Micro-batches", note, header, rows)


def _targets(records: list[Record]) -> list[Target]:
    targets = []
    for weights in FORMATS:
        efficiency = median(records, _efficiency, kind="busy", weights=weights, mover=OWN)
        baseline = PLAIN if PLAIN in _measured(records, weights) else HOOKS
        same = f"{weights}: times as fast as {baseline}"
        targets += [
            Target(
                f"{weights}: share of the disk's limit, no compute",
                _share_of_limit(records, weights, OWN),
                0.9,
                True,
            ),
            Target(f"{weights}: max(io, compute) over time", efficiency, 0.95, True),
            Target(f"{same}, no compute", _times_as_fast(records, weights, baseline, kind="idle"), 2.5, True),
            Target(
                f"{same}, compute standing in",
                _times_as_fast(records, weights, baseline, kind="busy"),
                2.5,
                True,
            ),
            Target(
                f"{weights}: decoding gives the tokens of all in memory",
                _equal_tokens(records, weights, OWN),
                1,
                True,
            ),
        ]
    faster = _times_as_fast
    targets += [
        Target(
            "bf16: times as fast as accelerate, decoding",
            faster(records, "bf16", PLAIN, kind="decode", on_disk=True),
            2.5,
            True,
        ),
        Target(
            "gptq4: times as fast as hfq's bf16, no compute",
            faster(records, "gptq4", OWN, "bf16", kind="idle"),
            1,
            True,
        ),
        Target(
            "gptq4: times as fast as hfq's bf16, compute standing in",
            faster(records, "gptq4", OWN, "bf16", kind="busy"),
            1,
            True,
        ),
        Target(
            "gptq4: times as fast as accelerate's bf16, decoding",
            faster(records, "gptq4", PLAIN, "bf16", kind="decode", on_disk=True),
            1,
            True,
        ),
    ]
    most = max((record["count"] for record in select(records, kind="micro")), default=0)
    for weights in FORMATS:
        other = PLAIN if PLAIN in _measured(records, weights) else HOOKS
        value = _times_as_fast(records, weights, other, kind="micro", count=most)
        targets.append(Target(f"{weights}: layer-major over {other}, {most} micro-batches", value, 6, True))
    return targets


def _measured(records: list[Record], weights: str) -> set[str]:
    """Returns the contenders that support a checkpoint."""
    return {
        record["mover"] for record in select(records, weights=weights, kind="idle") if "error" not in record
    }


def _equal_tokens(records: list[Record], weights: str, mover: str) -> float | None:
    """Returns the fraction of runs with layers on disk that generate the tokens of the run in memory."""
    where = {"kind": "decode", "weights": weights, "mover": mover}
    in_memory = [record["tokens"] for record in select(records, on_disk=False, **where)]
    runs = select(records, on_disk=True, **where)
    return sum(run["tokens"] == in_memory[0] for run in runs) / len(runs) if runs and in_memory else None


def _refusal(records: list[Record], weights: str, mover: str) -> str:
    errors = (r["error"] for r in records if r["weights"] == weights and r["mover"] == mover and "error" in r)
    return f"refused: {next(errors, 'not measured')}".replace("|", "/")


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
