"""Compares policies of the expert cache on recorded routing, and on random routing."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.experts.policies import POLICIES, hit_rates
from benchmarks.records import Record
from hfq.machine_profile.machine_facts import machine_facts
from hfq.offload.experts.eviction import HALF_LIFE
from hfq.offload.experts.simulated_cache import Request
from hfq.plots.charts import Chart
from hfq.runtime.record_routing import Routing
from hfq.tables import Report, Table, Target

__all__ = ["SHARES", "bench_experts", "random_requests"]

SHARES = (0.05, 0.1, 0.25, 0.5, 0.75)
"""Sizes of the cache, as shares of all experts."""

SHIPPED = f"LFU, half-life {HALF_LIFE:g}"

_NOTE = """Share of routed experts that the cache held, in the second half of each recording; computed, not timed. An expert that is
needed always gets a place. LFU counts the uses of all experts, also of those that left; a use counts half after the half-life in
passes. Pins are the most used experts of the first half. Belady evicts what is needed last, which no cache can know: a bound. Random
routing: each token draws its experts with equal odds (uniform), or with odds 1/rank (Zipf); topics deal new ranks every 64 tokens."""

_LAYERS, _EXPERTS, _CHOSEN, _TOKENS, _TOPIC = 12, 64, 6, 512, 64


def bench_experts(folder: Path, models: Sequence[Path], quick: bool, say: Callable[[str], None]) -> Report:
    """Computes hit rates.

    Args:
        folder: Folder of the benchmarks, for the facts.
        models: Recordings of `hfq.record_routing`.
        quick: True for few tokens and sizes.
        say: Prints progress.
    """
    tokens = 32 if quick else _TOKENS
    cases: dict[str, list[Request]] = {path.stem: Routing.load(path).requests() for path in models}
    cases |= {kind: random_requests(kind, tokens) for kind in ("uniform", "Zipf", "Zipf with topics")}
    records: list[Record] = []
    for name, requests in cases.items():
        count = len({expert for wanted in requests for expert in wanted})
        for share in SHARES[1:2] if quick else SHARES:
            say(f"{name}, {share:.0%} of {count} experts")
            places = max(int(share * count), 1)
            records.append({"routing": name, "share": share, "hits": hit_rates(requests, places)})
    return _report(folder, records)


def random_requests(kind: str, tokens: int) -> list[Request]:
    """Returns random routing of single tokens: `uniform`, `Zipf`, or `Zipf with topics`."""
    draw, found = random.Random(0), list[Request]()
    odds = [1.0 if kind == "uniform" else 1 / (rank + 1) for rank in range(_EXPERTS)]
    order = [[*range(_EXPERTS)] for _ in range(_LAYERS)]
    for token, layer in itertools.product(range(tokens), range(_LAYERS)):
        if token == 0 or (kind == "Zipf with topics" and token % _TOPIC == 0):
            draw.shuffle(order[layer])
        waits = sorted((-math.log(1 - draw.random()) / odd, rank) for rank, odd in enumerate(odds))
        found.append([(layer, order[layer][rank]) for _, rank in waits[:_CHOSEN]])
    return found


def _report(folder: Path, records: list[Record]) -> Report:
    header = ("routing", "cache", *POLICIES)
    rows = [
        (each["routing"], f"{each['share']:.0%}", *(f"{rate:.3f}" for rate in each["hits"].values()))
        for each in records
    ]
    names = [f"{each['routing']} {each['share']:.0%}" for each in records]
    series = {policy: [each["hits"][policy] for each in records] for policy in POLICIES}
    return Report(
        "Expert cache: hit rates of policies",
        machine_facts(folder),
        [Table("Hit rates", _NOTE, header, rows)],
        [_target(records)],
        records,
        Chart("Share of routed experts in the cache", names, series),
        targets_note="Over all rows of the table.",
    )


def _target(records: Sequence[Mapping]) -> Target:
    """Returns the target of the shipped policy: as many hits as the best one that needs no future."""
    worst = min(
        each["hits"][SHIPPED] - max(rate for name, rate in each["hits"].items() if name != "Belady")
        for each in records
    )
    return Target("least difference of the shipped policy's hit rate to the best one's", worst, -0.05, True)
