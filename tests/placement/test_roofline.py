"""The roofline by hand: what moves and what computes overlap, and the longer of the two decides."""

from dataclasses import replace

import pytest

from hfq.placement.profile import Profile
from hfq.placement.roofline import Work, predict, what_helps

PROFILE = Profile("measured", disk=1e9, page_cache=4e9, memory=10e9, host_to_device=5e9,
                  products={"int4": {1: 2e9, 2: 1.8e9}}, layer_seconds=0.01, load_seconds=(1.0, 0.1))  # fmt: skip
WORK = Work({"int4": (1_000_000_000, 500_000_000)}, 500_000_000, 0, 1_000_000_000, 1, 10, 2_000_000_000)


def test_terms_by_hand():
    found = predict(WORK, PROFILE)
    assert found.terms == pytest.approx({"disk": 0.5, "link": 0, "weights": 0.5, "cache": 0.1, "layers": 0.1})
    assert found.step_seconds == pytest.approx(0.7)  # computing: 0.5 + 0.1 + 0.1; reading: 0.5
    assert found.dominant == "weights"
    assert found.tokens_per_second == pytest.approx(1 / 0.7)
    assert found.load_seconds == pytest.approx(2.0 + 1.0 + 10 * 0.1)


def test_the_disk_decides_where_it_takes_longer():
    slow = replace(PROFILE, disk=0.5e9)
    found = predict(WORK, slow)
    assert (found.dominant, found.step_seconds) == ("disk", pytest.approx(1.0))
    assert predict(replace(WORK, is_cached=True), slow).dominant == "weights"
    best, rate = what_helps(WORK, slow)[0]
    assert best == "twice the sequences in a batch"  # the same reads for twice the tokens
    assert rate.tokens_per_second == pytest.approx(2 / 1.0)
    assert {"a disk twice as fast", "memory for all weights where they compute"} <= {
        what for what, _ in what_helps(WORK, slow)
    }


def test_an_accelerator_computes_at_the_rate_of_its_memory():
    on_device = replace(WORK, is_on_cpu=False, streamed=0, copied=500_000_000)
    found = predict(on_device, replace(PROFILE, layer_seconds=0.0))
    assert found.terms["weights"] == pytest.approx(0.05)
    assert found.terms["link"] == pytest.approx(0.1)


def test_weights_that_were_not_measured_go_at_the_rate_of_memory():
    other = replace(WORK, weights={"int3": (1_000_000_000, 400_000_000)})
    assert predict(other, PROFILE).terms["weights"] == pytest.approx(0.04)


def test_nothing_that_does_not_help_is_named():
    resident = replace(WORK, streamed=0)
    assert "a disk twice as fast" not in {what for what, _ in what_helps(resident, PROFILE)}
