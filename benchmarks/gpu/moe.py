"""Part 8: a mixture of experts whose experts lie in cpu memory, with a cache on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.bench import Bench, Record
from benchmarks.gpu.decoding import Decoding, count_waits, free, load, peak_over_plan
from benchmarks.gpu.models import make_model, shape_of
from benchmarks.gpu.report import Values
from hfq.runtime.report import OffloadReport, report
from hfq.tables import Table

__all__ = ["measure", "tables", "values"]

NAME = "moe-mxfp4"
CACHE, DRY_CACHE = 4_000_000_000, 200_000
TOKENS, FEW = 24, 3
WARM_UP = 16


def measure(bench: Bench) -> Iterator[Record]:
    """Yields one record with experts in cpu, and one with all of them on the device."""
    shape = shape_of("moe", bench.is_dry)
    experts = {f"model.layers.{index}.mlp.experts": "cpu" for index in range(shape.layers)}
    sizes = {"experts in cpu": DRY_CACHE if bench.is_dry else CACHE, "all on the device": None}
    for placement, cache in sizes.items():
        with free(bench.device):
            try:
                placed = {"": str(bench.device), **(experts if cache else {})}
                yield {"kind": "run", "placement": placement, **_decode(bench, placed, cache)}
            except Exception as error:
                yield bench.outlived("run", error, placement=placement)


def tables(records: list[Record]) -> list[Table]:
    """Returns speed, hits of the cache, bytes, and waits."""
    rows = []
    for record in records:
        if "missing" in record:
            rows.append((record["placement"], f"not measured: {record['missing']}", *["-"] * 6))
            continue
        routed = record["hits"] + record["misses"]
        rows.append(
            (
                record["placement"],
                f"{1 / record['seconds']:.2f}",
                f"{record['load_seconds']:.2f} s",
                f"{record['hits'] / routed:.3f}" if routed else "-",
                f"{record['copied'] / 1e6:.1f} MB" if record["copied"] is not None else "-",
                f"{record['waits']}" + (f" ({record['where']})" if record["where"] else ""),
                f"{record['stall_seconds']:.3f} s",
                f"{record['peak'] / record['planned']:.3f}",
            )
        )
    header = ("placement", "tokens/s", "load", "hits", "bytes per token", "waits in 3 tokens", "stalled")
    note = "One sequence, token by token. Bytes: those of the experts that were not in the cache."
    return [Table("Mixture of experts", note, (*header, "peak / plan"), rows)]


def values(records: list[Record], ceilings: dict[str, float]) -> Values:
    """Returns nothing: a mixture of experts has no acceptance number."""
    return {}


def _decode(bench: Bench, placement: dict[str, Any], cache: int | None) -> Record:
    model, load_seconds = load(make_model(bench, NAME), placement, expert_cache_size=cache)
    decoding, tokens = Decoding(model, bench.device), FEW if bench.is_dry else TOKENS
    for _ in range(0 if bench.is_dry else WARM_UP):
        decoding.token()
    before = report(model).offload
    seconds = decoding.seconds(tokens)
    counted = _counts(before, report(model).offload)
    misses = counted["misses"] / (tokens + 1)  # one token is decoded before those that are timed
    copied = misses * _expert_nbytes(model) if cache else None
    waits, where = count_waits(decoding)
    return {
        "seconds": seconds,
        "load_seconds": load_seconds,
        "copied": copied,
        "waits": waits,
        "where": where,
        **counted,
        **peak_over_plan(decoding),
    }


def _counts(before: OffloadReport | None, after: OffloadReport | None) -> dict[str, float]:
    """Returns what the offloader counted between two reports; zeros without an offloader."""
    if before is None or after is None:
        return {"hits": 0, "misses": 0, "stall_seconds": 0.0}
    return {
        "hits": after.expert_hits - before.expert_hits,
        "misses": after.expert_misses - before.expert_misses,
        "stall_seconds": after.stall_seconds - before.stall_seconds,
    }


def _expert_nbytes(model: Any) -> float:
    """Returns the bytes of one expert."""
    total = sum(each.nbytes for each in report(model).modules if ".experts" in each.module)
    config = model.config
    return total / config.num_hidden_layers / config.num_experts
