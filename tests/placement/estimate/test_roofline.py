"""The roofline by hand: what moves and what computes overlap as far as cores and the ring allow."""

from dataclasses import replace

import pytest

from hfq.placement.estimate.pipeline import SideBySide
from hfq.placement.estimate.profile import Profile, Zero3Rates
from hfq.placement.estimate.roofline import Work, predict, what_helps

PROFILE = Profile(
    "measured",
    disk=1e9,
    page_cache=4e9,
    memory=10e9,
    host_to_device=5e9,
    products={"int4": {1: 2e9, 2: 1.8e9}},
    layer_seconds=0.01,
    load_seconds=(1.0, 0.1),
)
WORK = Work({"int4": (1_000_000_000, 500_000_000)}, 500_000_000, 0, 1_000_000_000, 1, 10, 2_000_000_000)


def test_terms_by_hand():
    found = predict(WORK, PROFILE)
    assert found.terms == pytest.approx({"disk": 0.5, "link": 0, "weights": 0.5, "cache": 0.1, "layers": 0.1})
    assert found.step_seconds == pytest.approx(0.7)  # computing: 0.5 + 0.1 + 0.1; reading: 0.5
    assert found.dominant == "weights"
    assert found.tokens_per_second == pytest.approx(1 / 0.7)
    assert found.load_seconds == pytest.approx(2.0 + 1.0 + 10 * 0.1)


def test_bytes_that_take_less_than_the_calls_of_layers_are_no_speed():
    unknown = replace(PROFILE, layer_seconds=0.0, products={})
    tiny = replace(WORK, weights={"int4": (1_000_000, 1_000_000)}, streamed=0, cache=0)
    found = predict(tiny, unknown)  # 0.1 ms; 10 layers take 1 ms at least
    assert (found.step_seconds, found.known_seconds, found.tokens_per_second) == (
        pytest.approx(1e-4),
        None,
        None,
    )
    assert found.to_dict()["step_seconds"] is None
    assert found.source.endswith("0.1 ms, less than calling 10 layers, which `hfq profile-machine` measures")
    assert predict(tiny, replace(unknown, layer_seconds=1e-6)).known_seconds == pytest.approx(1.1e-4)
    assert predict(replace(tiny, cache=9_000_000), unknown).tokens_per_second == pytest.approx(1000)
    device = replace(unknown, device_memory=1e10)
    assert predict(replace(tiny, is_on_cpu=False), device).tokens_per_second == pytest.approx(1e4)
    assert predict(replace(tiny, is_on_cpu=False, layers=11), device).tokens_per_second is None


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


def test_reads_of_routed_experts_add_to_computing_and_those_of_units_overlap():
    assert predict(replace(WORK, on_demand=500_000_000), PROFILE).step_seconds == pytest.approx(0.7 + 0.5)
    assert predict(replace(WORK, on_demand=200_000_000), PROFILE).step_seconds == pytest.approx(0.7 + 0.2)
    stages = ((500_000_000, 0),) * 2
    staged = replace(WORK, on_demand=500_000_000, stages=stages)
    assert predict(staged, PROFILE).step_seconds == pytest.approx(0.7 + 0.5)
    found = predict(replace(staged, is_cached=True), PROFILE)
    assert found.step_seconds == pytest.approx(0.7 + 0.125)  # of the page cache


def test_an_accelerator_computes_at_the_rate_of_its_memory():
    on_device = replace(WORK, is_on_cpu=False, streamed=0, copied=500_000_000)
    found = predict(on_device, replace(PROFILE, layer_seconds=0.0, device_memory=20e9))
    assert found.terms["weights"] == pytest.approx(0.025)
    assert found.terms["cache"] == pytest.approx(0.05)
    assert found.terms["link"] == pytest.approx(0.1)
    unknown = predict(replace(on_device, copied=0), replace(PROFILE, layer_seconds=0.0))
    assert unknown.tokens_per_second is None
    assert "unknown" in unknown.source


def test_weights_that_were_not_measured_go_at_the_rate_of_memory():
    other = replace(WORK, weights={"int3": (1_000_000_000, 400_000_000)})
    assert predict(other, PROFILE).terms["weights"] == pytest.approx(0.04)


def test_a_call_a_step_and_a_streamed_block_have_costs_of_their_own():
    costly = replace(PROFILE, calls={"int4": 0.001}, step_seconds=0.02, block_seconds=0.005)
    found = predict(replace(WORK, calls={"int4": 50}), costly)
    assert found.terms == pytest.approx(
        {"disk": 0.5, "link": 0, "weights": 0.55, "cache": 0.1, "layers": 0.12}
    )
    streamed = predict(
        replace(WORK, calls={"int4": 50}, stages=((100, 50_000_000),) * 10, buffer=10**8), costly
    )
    assert streamed.terms["layers"] == pytest.approx(0.17)
    assert streamed.step_seconds == pytest.approx(0.82)


def test_reading_and_computing_share_cores_and_a_ring():
    staged = replace(WORK, stages=((100, 50_000_000),) * 10, buffer=10**8)
    shared = replace(PROFILE, beside_disk=SideBySide(0.5, 0.5))
    assert predict(staged, PROFILE).step_seconds == pytest.approx(0.7)
    assert predict(staged, shared).step_seconds == pytest.approx(1.2)
    assert predict(replace(staged, is_cached=True), shared).step_seconds == pytest.approx(0.7)
    kept = replace(staged, buffer=10**9)
    assert predict(kept, shared).step_seconds == pytest.approx(0.7)  # what the ring holds is not read again
    half = replace(WORK, stages=((100, 0),) * 5 + ((100, 100_000_000),) * 5, buffer=2 * 10**8)
    # a block is read in 0.1 s and computes for 0.07 s: 0.7 s, and three times 0.03 s of waiting for what the
    # ring had no room for
    assert predict(half, PROFILE).step_seconds == pytest.approx(0.79)


def test_zero3_gathers_before_it_computes():
    rates = Zero3Rates(2, "cpu", gathering=1e9, slowdown=2.0, layer_seconds=0.02, step_seconds=0.1)
    work = replace(WORK, streamed=0, cache=0, gathered=500_000_000)
    found = predict(work, replace(PROFILE, zero3=rates))
    assert found.terms == pytest.approx(
        {"disk": 0, "link": 0, "weights": 1.0, "cache": 0, "layers": 0.3, "gathering": 0.5}
    )
    assert found.step_seconds == pytest.approx(1.8)
    assert found.dominant == "weights"


def test_nothing_that_does_not_help_is_named():
    resident = replace(WORK, streamed=0)
    assert "a disk twice as fast" not in {what for what, _ in what_helps(resident, PROFILE)}
