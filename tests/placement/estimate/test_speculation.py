"""Tests of the predicted costs of drafted tokens."""

import random
from dataclasses import replace

import pytest

from hfq.errors import SetupError
from hfq.placement.budget import Unit
from hfq.placement.estimate.estimate import Workload, estimate_placement, work_of_rows
from hfq.placement.estimate.hardware import Hardware
from hfq.placement.estimate.profile import PUBLISHED
from hfq.placement.estimate.speculation import ACCEPTANCE_RATES, speculation_costs, tokens_per_pass
from tests.placement.estimate.test_estimate import MIB, SIZES, UNITS


def costs(sizes=SIZES, drafted=4, rates=(0.5,), cpu=70 * MIB):
    estimate = estimate_placement(sizes, Hardware(cpu=cpu), Workload(1, 16), PUBLISHED)
    return estimate, speculation_costs(estimate, sizes, PUBLISHED, drafted, rates)


@pytest.mark.parametrize("rate", ACCEPTANCE_RATES)
def test_tokens_of_a_pass_are_those_of_drafts_until_the_first_wrong_one(rate):
    draw, passes, yielded = random.Random(0), 20_000, 0
    for _ in range(passes):
        accepted = 0
        while accepted < 4 and draw.random() < rate:
            accepted += 1
        yielded += accepted + 1
    assert tokens_per_pass(4, rate) == pytest.approx(yielded / passes, rel=0.02)


@pytest.mark.parametrize(("rate", "tokens"), [(0.0, 1), (1.0, 5)])
def test_bytes_and_seconds_fall_by_the_tokens_of_a_pass(rate, tokens):
    estimate, (found,) = costs(rates=(rate,))
    assert found.tokens_per_pass == 1 / found.passes_per_token == tokens
    assert found.per_token_nbytes == pytest.approx(estimate.work.streamed / tokens, abs=1)
    assert found.seconds_per_token == pytest.approx(estimate.prediction.step_seconds / tokens)


def test_a_pass_reads_experts_for_each_of_its_tokens():
    experts = tuple(Unit(f"layers.{i}.experts", 40 * MIB, "experts") for i in range(8))
    sizes = replace(SIZES, units=UNITS + experts, routed=0.125)
    estimate, (one,) = costs(sizes, 1, (0.0,), 140 * MIB)
    whole = estimate.work.streamed - estimate.work.on_demand
    assert one.per_token_nbytes == pytest.approx(whole + 2 * estimate.work.on_demand, abs=2)
    (many,) = costs(sizes, 100, (0.0,), 140 * MIB)[1]
    offloaded = sum(unit.nbytes for unit in experts if estimate.budget.devices[unit.name] == "disk")
    assert many.per_token_nbytes == whole + offloaded


def test_more_tokens_read_more_experts_in_the_same_way():
    experts = tuple(Unit(f"layers.{i}.experts", 40 * MIB, "experts") for i in range(8))
    sizes = replace(SIZES, units=UNITS + experts, routed=0.125)
    hardware, workload = Hardware(cpu=140 * MIB), Workload(1, 16)
    found = estimate_placement(sizes, hardware, workload, PUBLISHED)
    works = [work_of_rows(found, sizes, rows) for rows in (1, 100)]
    assert works[0] == found.work
    assert works[1].streamed > 1.5 * found.work.streamed
    assert not any(work.is_cached for work in works)


def test_a_rate_is_a_probability():
    with pytest.raises(SetupError, match=r"1\.5"):
        costs(rates=(0.5, 1.5))
