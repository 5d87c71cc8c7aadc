"""Tests of `python -m benchmarks experts`: known sequences, the bound, and recordings."""

import itertools
import json

import pytest

from benchmarks.experts.bench_experts import SHIPPED, bench_experts, random_requests
from benchmarks.experts.policies import POLICIES, hit_rates
from hfq.offload.experts.simulated_cache import simulate


def rate(name, requests, places):
    return simulate(requests, places, POLICIES[name](requests, places, 0))


def best(requests, places, kept=frozenset(), start=0):
    """Returns the most hits that any choice of evicted experts gives."""
    if start == len(requests):
        return 0
    wanted = set(requests[start])
    hits, full = len(wanted & kept), kept | wanted
    others = full - wanted
    choices = itertools.combinations(others, max(0, len(full) - places))
    return hits + max(best(requests, places, full - set(gone), start + 1) for gone in choices)


def test_an_lru_smaller_than_a_pass_hits_nothing_and_others_do():
    circle = [[(layer, 0), (layer, 1)] for _ in range(20) for layer in range(4)]
    assert rate("LRU", circle, 6) == 0
    assert rate("LRU", circle, 8) > 0.9
    assert rate("Belady", circle, 6) >= rate(SHIPPED, circle, 6) > 0.4


def test_belady_is_the_best_of_all_choices():
    for seed in range(3):
        requests = [[(0, (seed + 3 * call) % 5), (0, (seed * call + 1) % 5)] for call in range(9)]
        requests = [list(dict.fromkeys(wanted)) for wanted in requests]
        total = sum(map(len, requests))
        assert rate("Belady", requests, 3) * total == pytest.approx(best(requests, 3))


def test_no_policy_beats_belady_on_random_routing():
    for kind in ("uniform", "Zipf", "Zipf with topics"):
        rates = hit_rates(random_requests(kind, 24), 90)
        assert max(rates, key=rates.get) == "Belady"


def test_pins_are_the_most_used_experts_before_the_start():
    requests = [[(0, 0)], [(0, 1)], [(0, 0)], [(0, 2)], [(0, 0)], [(0, 3)], [(0, 0)], [(0, 4)]]
    key_of = POLICIES["pins"](requests, 2, 4)
    assert key_of((0, 0), 5) > key_of((0, 4), 7)
    assert simulate(requests, 2, key_of, 4) == 0.5


def test_random_routing_has_its_skew_and_its_topics():
    def top(requests):
        counts = {}
        for expert in itertools.chain.from_iterable(requests):
            counts[expert] = counts.get(expert, 0) + 1
        return sum(sorted(counts.values())[-77:]) / sum(counts.values())

    even, skewed, topics = (random_requests(kind, 128) for kind in ("uniform", "Zipf", "Zipf with topics"))
    assert all(len(set(wanted)) == 6 for wanted in (*even, *skewed, *topics))
    assert top(even) < 0.2 < top(topics) < top(skewed)


def test_the_report_has_recordings_and_judges_the_shipped_policy(tmp_path):
    content = {"kind": "hfq routing", "modules": ["a", "b"], "experts": [4, 4], "nbytes": [9, 9]}
    calls = [[call % 2, [[call % 3, 3]]] for call in range(40)]
    (tmp_path / "mine.json").write_text(json.dumps(content | {"calls": calls}))
    report = bench_experts(tmp_path, [tmp_path / "mine.json"], True, lambda _: None)
    assert [record["routing"] for record in report.records] == ["mine", "uniform", "Zipf", "Zipf with topics"]
    assert all(set(record["hits"]) == set(POLICIES) for record in report.records)
    assert "| mine | 10% |" in report.to_markdown()
    assert report.targets[0].value <= 0
