"""Tests of the order in which experts leave a cache."""

import math

import pytest

from hfq.offload.experts.eviction import EMPTY, HALF_LIFE, NEVER_USED, DecayedCounts


def test_a_use_counts_half_after_the_half_life():
    counts = DecayedCounts(HALF_LIFE, period=1)
    old = counts.note("old", 0)[0]
    counts.note("old", 0)
    assert counts.values["old"][0] == pytest.approx(old + 1)
    assert counts.note("new", HALF_LIFE)[0] == pytest.approx(counts.values["old"][0])
    assert counts.note("new", HALF_LIFE)[0] > counts.values["old"][0]


def test_values_are_logarithms_of_decayed_counts():
    counts, calls = DecayedCounts(3, period=2), [0, 1, 4, 9, 9, 40]
    for call in calls:
        counts.note("expert", call)
    assert counts.values["expert"][0] == pytest.approx(math.log2(sum(2 ** (call // 2 / 3) for call in calls)))
    assert counts.note("late", 10**9)[0] < math.inf


def test_of_one_pass_the_newest_leaves_first_and_empty_places_before_all():
    counts = DecayedCounts(HALF_LIFE, period=4)
    values = [counts.note(call, call) for call in range(4)]
    assert sorted(values) == values[::-1]
    assert EMPTY < NEVER_USED < values[3] < counts.note("next pass", 4)
