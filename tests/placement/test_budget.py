"""Homes under byte budgets: hand-computed cases, and what holds for every model and every budget."""

import itertools
import json
import re
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hfq.errors import PlacementError
from hfq.placement.budget import Budget, Unit, plan_devices

BLOCKS = [Unit(f"b{index}", 10, "block") for index in range(6)]
LLAMA = [
    Unit("", 1, "fixed"),
    Unit("embed", 30, "embedding"),
    *BLOCKS,
    Unit("norm", 2, "other"),
    Unit("head", 25, "other"),
]
"""118 bytes."""
MOE = [
    Unit("embed", 30, "embedding"),
    *(unit for i in range(3) for unit in (Unit(f"b{i}", 10, "block"), Unit(f"b{i}.experts", 40, "experts"))),
    Unit("head", 20, "other"),
]
"""200 bytes, 50 without embeddings and experts."""


def away(budget: Budget) -> dict[str, str]:
    return {name: device for name, device in budget.devices.items() if device != budget.main}


def on_disk(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "disk")


@pytest.mark.parametrize("main", ["cpu", "cuda:0"])
def test_what_fits_stays_without_a_ring(main):
    budget = plan_devices(LLAMA, {main: 118}, main)
    assert away(budget) == {}
    assert budget.buffers == {}
    assert (budget.stored_nbytes, budget.onloaded_nbytes, budget.headroom()) == ({main: 118}, 0, {main: 0})


@pytest.mark.parametrize(
    ("capacity", "gone", "ring", "moved", "left"),
    [
        (117, ["embed"], 0, 0, 29),  # an embedding moves nothing: it leaves first
        (88, ["embed"], 0, 0, 0),
        (
            87,
            ["embed", "b3", "b4", "b5"],
            20,
            30,
            9,
        ),  # one block alone, or two, would free no more than their ring takes
        (78, ["embed", "b3", "b4", "b5"], 20, 30, 0),
        (77, ["embed", "b2", "b3", "b4", "b5"], 20, 40, 9),
        (48, ["embed", *(f"b{index}" for index in range(6))], 20, 60, 0),
        (38, ["embed", *(f"b{index}" for index in range(6)), "head"], 35, 85, 0),
    ],
)
def test_the_ring_is_reserved(capacity, gone, ring, moved, left):
    budget = plan_devices(LLAMA, {"cpu": capacity}, "cpu")
    assert away(budget) == on_disk(*gone)
    assert budget.buffers == ({"cpu": ring} if ring else {})
    assert budget.onloaded_nbytes == moved
    assert budget.headroom() == {"cpu": left}


def test_an_embedding_takes_the_room_that_no_block_can():
    units = [Unit("embed", 5, "embedding"), *BLOCKS]
    assert away(plan_devices(units, {"cpu": 55}, "cpu")) == on_disk("b3", "b4", "b5")
    assert away(plan_devices(units, {"cpu": 54}, "cpu")) == on_disk("embed", "b3", "b4", "b5")


def test_the_ring_holds_neighbours_over_the_end_of_a_forward():
    units = [Unit("a", 50, "block"), Unit("b", 1, "block"), Unit("c", 1, "block"), Unit("d", 40, "block")]
    budget = plan_devices(units, {"cpu": 90}, "cpu")
    assert (budget.devices, budget.buffers) == (on_disk("a", "b", "c", "d"), {"cpu": 90})  # d and a
    budget = plan_devices(units, {"cpu": 91}, "cpu")
    assert (away(budget), budget.buffers) == (on_disk("b", "c", "d"), {"cpu": 41})


def test_a_region_may_be_larger_than_what_rests():
    units = [Unit(f"b{index}", 10, "block", 16) for index in range(6)]
    budget = plan_devices(units, {"cpu": 52}, "cpu")
    assert away(budget) == on_disk("b2", "b3", "b4", "b5")
    assert (budget.buffers, budget.onloaded_nbytes, budget.stored_nbytes) == (
        {"cpu": 32},
        64,
        {"cpu": 20, "disk": 40},
    )


def test_the_rest_is_kept_by_the_cpu_before_the_disk():
    budget = plan_devices(LLAMA, {"cuda:0": 78, "cpu": 60}, "cuda:0")
    assert away(budget) == {"b1": "cpu", "b3": "cpu", "b5": "cpu", "embed": "cpu"}
    assert (budget.buffers, budget.headroom()) == ({"cuda:0": 20}, {"cuda:0": 0, "cpu": 0})
    budget = plan_devices(LLAMA, {"cuda:0": 78, "cpu": 59}, "cuda:0")
    assert away(budget) == {"b1": "cpu", "b3": "cpu", "b5": "cpu", "embed": "disk"}
    assert budget.buffers == {"cuda:0": 20}


@pytest.mark.parametrize("count", [4, 6, 7, 32, 61])
def test_an_accelerator_keeps_layers_that_are_spread_evenly(count):
    units, before = [Unit(f"b{index}", 10, "block") for index in range(count)], set()
    for kept in range(1, count - 2):
        budget = plan_devices(units, {"cuda:0": 10 * kept + 20}, "cuda:0")
        staying = [index for index in range(count) if budget.devices[f"b{index}"] == "cuda:0"]
        assert len(staying) == kept
        assert before < {*staying}
        before = {*staying}
        assert staying[0] == 0
        runs = [last - first for first, last in itertools.pairwise([*staying, count])]
        assert max(runs) <= 2 * -(-count // kept)
    budget = plan_devices(units, {"cpu": 10 * (count - 3) + 20}, "cpu")
    assert [index for index in range(count) if budget.devices[f"b{index}"] == "cpu"] == [*range(count - 3)]


def test_a_head_that_does_not_fit_keeps_no_layer_away():
    units = [*BLOCKS, Unit("norm", 2, "other"), Unit("head", 60, "other", 30)]
    budget = plan_devices(units, {"cuda:0": 62, "cpu": 80}, "cuda:0")
    assert away(budget) == {"b1": "cpu", "b2": "cpu", "b3": "cpu", "b5": "cpu", "head": "disk"}
    assert budget.headroom() == {"cuda:0": 0, "cpu": 0}


def test_blocks_on_disk_need_a_ring_on_the_host_too():
    budget = plan_devices(LLAMA, {"cuda:0": 48, "cpu": 55}, "cuda:0")
    assert {name for name, device in budget.devices.items() if device == "cpu"} == {"b0", "b1", "b2"}
    assert (budget.buffers, budget.stored_nbytes["cpu"]) == ({"cuda:0": 20, "cpu": 20}, 30)
    assert budget.headroom() == {"cuda:0": 0, "cpu": 5}
    assert budget.onloaded_nbytes == 60  # from wherever they rest


def test_a_cpu_without_a_limit_of_its_own_holds_nothing_but_the_ring():
    budget = plan_devices(LLAMA, {"mps": 48}, "mps")
    assert set(away(budget).values()) == {"disk"}
    assert budget.buffers == {"mps": 20, "cpu": 20}


@pytest.mark.parametrize(
    ("capacity", "gone", "left"),
    [
        (200, [], 0),
        (199, ["embed"], 29),
        (170, ["embed"], 0),
        (169, ["b2.experts"], 9),  # without these 40 bytes there is room for the embedding
        (130, ["embed", "b2.experts"], 0),
        (50, ["embed", "b0.experts", "b1.experts", "b2.experts"], 0),
    ],
)
def test_experts_leave_before_blocks(capacity, gone, left):
    budget = plan_devices(MOE, {"cpu": capacity}, "cpu")
    assert away(budget) == on_disk(*gone)
    assert budget.headroom() == {"cpu": left}
    assert (budget.buffers, budget.onloaded_nbytes) == ({}, 0)
    assert budget.on_demand_nbytes == 40 * sum("experts" in name for name in gone)


def test_the_cache_of_experts_is_reserved_where_they_leave():
    budget = plan_devices(MOE, {"cpu": 140}, "cpu", expert_cache_nbytes=11)
    assert away(budget) == on_disk("b1.experts", "b2.experts")
    assert (sum(budget.expert_caches.values()), budget.headroom()) == (11, {"cpu": 9})
    assert plan_devices(MOE, {"cpu": 200}, "cpu", expert_cache_nbytes=11).expert_caches == {}


def test_what_is_fixed_never_leaves():
    units = [Unit("merged", 40, "fixed"), *BLOCKS]
    assert plan_devices(units, {"cpu": 60}, "cpu").devices["merged"] == "cpu"
    with pytest.raises(PlacementError, match="at least 60 B on cpu"):
        plan_devices(units, {"cpu": 59}, "cpu")


def test_too_little_names_the_least_that_works():
    expected = r'(?s)at least 36 B on cpu.*35 B.*max_memory=\{"cpu": 36\}, or max_memory=\{"cpu": 118\}'
    with pytest.raises(PlacementError, match=expected):
        plan_devices(LLAMA, {"cpu": 35}, "cpu")
    assert plan_devices(LLAMA, {"cpu": 36}, "cpu").headroom() == {"cpu": 0}


def test_the_least_is_never_more_than_the_model():
    with pytest.raises(PlacementError, match="at least 10 B on cpu"):
        plan_devices([Unit("one", 10, "block", 16)], {"cpu": 9}, "cpu")


def test_too_little_on_the_host_is_told_apart():
    with pytest.raises(
        PlacementError, match=r'(?s)on cpu.*at least 20 B on cpu.*max_memory=\{0: 48, "cpu": 20\}'
    ):
        plan_devices(LLAMA, {"cuda:0": 48, "cpu": 19}, "cuda:0")


def test_a_disk_that_may_hold_nothing():
    with pytest.raises(
        PlacementError, match=r'(?s)on disk.*at least 30 B on disk.*Pass max_memory=\{"cpu": 118, "disk": 0\}'
    ):
        plan_devices(LLAMA, {"cpu": 100, "disk": 0}, "cpu")
    with pytest.raises(PlacementError, match=r'(?s)on disk.*Pass max_memory=\{0: 88, "cpu": 30, "disk": 0\}'):
        plan_devices(LLAMA, {"cuda:0": 88, "cpu": 29, "disk": 0}, "cuda:0")
    assert "disk" not in plan_devices(LLAMA, {"cuda:0": 88, "cpu": 30, "disk": 0}, "cuda:0").devices.values()
    assert plan_devices(LLAMA, {"cpu": 100, "disk": 30}, "cpu").headroom() == {"cpu": 12, "disk": 0}


def test_it_prints_every_number():
    text = str(plan_devices(MOE, {"cuda:0": 55, "cpu": 100}, "cuda:0", expert_cache_nbytes=5))
    assert text == (
        "cuda:0: 50 B of weights, 0 B left; disk: 70 B of weights; cpu: 80 B of weights, 20 B left; "
        "nothing onloaded per forward pass; up to 120 B of routed experts, cache of 5 B on cuda:0"
    )
    assert "cpu: 28 B of weights and an offload buffer of 20 B, 0 B left" in str(
        plan_devices(LLAMA, {"cpu": 48}, "cpu")
    )


KINDS = ["block", "block", "block", "embedding", "experts", "other", "fixed"]
SIZES = st.integers(0, 40)
MODELS = st.lists(st.tuples(st.sampled_from(KINDS), SIZES, st.none() | SIZES), max_size=14).map(
    lambda parts: [
        Unit(f"u{index}", nbytes, kind, region) for index, (kind, nbytes, region) in enumerate(parts)
    ]
)
ALIKE = st.builds(
    lambda layer, count, experts, others, embedding: [
        Unit("embed", embedding, "embedding"),
        *(
            unit
            for index in range(count)
            for unit in (Unit(f"b{index}", layer, "block"), Unit(f"b{index}.experts", experts, "experts"))
        ),
        *(Unit(f"other{index}", nbytes, "other") for index, nbytes in enumerate(others)),
    ],
    *(SIZES, st.integers(1, 8), SIZES, st.lists(st.integers(0, 120), max_size=2), SIZES),
)
"""Models with equal layers, and at their end modules that may be larger, such as a head."""
LIMITS = st.integers(0, 400)
CAPACITIES = st.one_of(
    st.builds(lambda cpu: ("cpu", {"cpu": cpu}), LIMITS),
    st.builds(lambda gpu, cpu: ("xpu:0", {"xpu:0": gpu, "cpu": cpu}), LIMITS, LIMITS),
    st.builds(
        lambda gpu, cpu, disk: ("xpu:0", {"xpu:0": gpu, "cpu": cpu, "disk": disk}), LIMITS, LIMITS, LIMITS
    ),
)


def planned(units, capacities, main, cache=0) -> Budget | None:
    try:
        return plan_devices(units, capacities, main, cache)
    except PlacementError:
        return None


@settings(deadline=None, max_examples=100)
@given(MODELS, CAPACITIES, st.integers(0, 20))
def test_no_home_holds_more_than_it_may(units, where, cache):
    main, capacities = where
    budget = planned(units, capacities, main, cache)
    if budget is None:
        return
    assert set(budget.devices) == {unit.name for unit in units}
    assert budget == planned(units, capacities, main, cache)
    for device, capacity in capacities.items():
        assert sum(unit.nbytes for unit in units if budget.devices[unit.name] == device) <= capacity
        assert budget.taken(device) <= capacity
    assert all(budget.devices[unit.name] == main for unit in units if unit.kind == "fixed")


@settings(deadline=None, max_examples=100)
@given(MODELS, CAPACITIES)
def test_a_ring_holds_every_streamed_unit_beside_the_next(units, where):
    main, capacities = where
    budget = planned(units, capacities, main)
    if budget is None:
        return
    streamed = [
        unit for unit in units if budget.devices[unit.name] != main and unit.kind in ("block", "other")
    ]
    sizes = [unit.unit_onloaded_nbytes for unit in streamed]
    needed = (
        max(a + b for a, b in zip(sizes, sizes[1:] + sizes[:1], strict=True))
        if len(sizes) > 1
        else sum(sizes)
    )
    assert budget.buffers.get(main, 0) == needed
    assert budget.onloaded_nbytes == sum(sizes)
    if main != "cpu" and any(budget.devices[unit.name] == "disk" for unit in streamed):
        assert budget.buffers.get("cpu", 0) == needed


@settings(deadline=None, max_examples=100)
@given(ALIKE, CAPACITIES, st.integers(0, 60), st.integers(0, 20))
@example(
    [
        *(
            Unit("a", 67, "block"),
            Unit("b", 40, "block"),
            Unit("experts", 1, "experts"),
            Unit("c", 22, "block", 0),
        ),
        *(Unit("d", 35, "block"), Unit("e", 0, "block"), Unit("f", 1, "block"), Unit("g", 10, "block")),
    ],
    ("cpu", {"cpu": 143}),
    31,
    0,
)
def test_more_memory_never_moves_more_bytes_of_equal_layers(units, where, more, cache):
    main, capacities = where
    small = planned(units, capacities, main, cache)
    large = planned(units, {**capacities, main: capacities[main] + more}, main, cache)
    if small is not None and large is not None:
        assert (large.onloaded_nbytes, large.on_demand_nbytes) <= (
            small.onloaded_nbytes,
            small.on_demand_nbytes,
        )
    if main == "cpu" and small is not None:
        assert large is not None


@settings(deadline=None, max_examples=100)
@given(MODELS, CAPACITIES, st.integers(0, 20))
def test_every_way_out_that_an_error_names_works(units, where, cache):
    main, capacities = where
    try:
        plan_devices(units, capacities, main, cache)
    except PlacementError as error:
        ways = re.findall(r"max_memory=(\{[^}]*\})", error.fix)
        assert ways
        for way in ways:
            limits = json.loads(re.sub(r"\b0: ", '"xpu:0": ', way, count=1))
            assert planned(units, limits, main, cache) is not None


def test_the_default_cache_takes_what_a_context_leaves():
    bare = plan_devices(MOE, {"cpu": 140}, "cpu")
    left, experts = bare.headroom()["cpu"], bare.on_demand_nbytes
    assert 0 < left < experts
    staying = sum(unit.nbytes for unit in MOE if unit.kind == "experts") - experts
    cached = bare.with_default_caches(MOE, 5)
    assert cached.expert_caches == {"cpu": left + staying}
    assert all(cached.devices[unit.name] == "disk" for unit in MOE if unit.kind == "experts")
    assert cached.headroom() == {"cpu": 0}
    budget = plan_devices(MOE, {"cuda:0": 140, "cpu": 200}, "cuda:0")
    assert budget.with_default_caches(MOE, 5).expert_caches == {"cuda:0": left - 5}
    assert budget.with_default_caches(MOE, left).expert_caches == {"cuda:0": 0}
    assert min(budget.with_default_caches(MOE).headroom().values()) >= 0


def test_experts_stay_where_all_fit_or_the_disk_has_no_room():
    everything = plan_devices(MOE, {"cpu": 170}, "cpu")
    assert everything.with_default_caches(MOE) == everything
    small = plan_devices(MOE, {"cpu": 140, "disk": 110}, "cpu")
    assert small.with_default_caches(MOE).devices == small.devices


@pytest.mark.parametrize("main", ["cpu", "cuda:0"])
@pytest.mark.parametrize("cache", [0, 5, 25])
def test_the_experts_of_a_token_have_memory_in_any_case(main, cache):
    units = [replace(unit, routed_nbytes=10) if unit.kind == "experts" else unit for unit in MOE]
    host = {} if main == "cpu" else {"cpu": 200}
    budget = plan_devices(units, {main: 140, **host}, main, cache)
    least = 20 if main == "cpu" else 10  # the CPU reads those of the next layer ahead
    assert budget.expert_caches == {main: max(cache, least)}
    assert budget.headroom()[main] >= 0
    assert plan_devices(units, {main: 70, **host}, main).expert_caches == {main: least}
    with pytest.raises(PlacementError, match="too small") as refused:
        plan_devices(units, {main: 35, **host}, main)
    assert "the expert cache" in refused.value.expected
    assert budget.with_default_caches(units, 1000).expert_caches[main] >= least
