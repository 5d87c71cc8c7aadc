"""Tests of computed hit rates against the counters of the cache."""

import random

import pytest

from hfq.offload.experts.eviction import HALF_LIFE, DecayedCounts
from hfq.offload.experts.simulated_cache import hit_rate, simulate

EXPERTS, PLACES = 8, 4


def routing(odds, calls, seed=0):
    """Returns calls for two experts each, drawn by these odds."""
    draw, found = random.Random(seed), []
    while len(found) < calls:
        wanted = set(draw.choices(range(EXPERTS), odds, k=2))
        found += [sorted(wanted)] if len(wanted) == 2 else []
    return found


ODDS = {"even": [1] * EXPERTS, "Zipf": [1 / rank for rank in range(1, EXPERTS + 1)]}


def test_the_simulation_is_the_cache(build_experts):
    experts, requests = build_experts(places=3), [[0, 1], [2], [0, 3], [4], [0], [1, 5], [2], [0, 6], [0]]
    for wanted in requests:
        experts.use(*wanted)
    counts, total = DecayedCounts(HALF_LIFE, period=1), sum(map(len, requests))
    share = simulate([[(0, each) for each in wanted] for wanted in requests], 3, counts.note)
    assert experts.cache.hits == round(share * total) > 0


@pytest.mark.parametrize("odds", ODDS.values(), ids=ODDS)
def test_a_rate_of_recorded_tokens_is_that_of_other_tokens(build_experts, odds):
    recorded, others = routing(odds, 4000), routing(odds, 800, seed=1)
    predicted = hit_rate([[(0, each) for each in wanted] for wanted in recorded], PLACES)
    experts = build_experts(places=PLACES, routed=2)
    for wanted in others:
        experts.use(*wanted)
    measured = experts.cache.decoding.hit_rate
    assert predicted == pytest.approx(measured, abs=0.05)  # both are means of random draws
    share = PLACES / EXPERTS
    assert predicted == pytest.approx(share, abs=0.05) if odds[0] == odds[1] else predicted > share + 0.1


def test_no_calls_hit_nothing_and_the_first_half_does_not_count():
    assert hit_rate([], 2) == 0
    assert hit_rate([[(0, 0)], [(0, 0)]], 1) == 1
