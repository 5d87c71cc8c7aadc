"""Tests of the placement over several accelerators: contiguous parts, none over its limit."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hfq.errors import PlacementError
from hfq.placement.budget import Unit, layer_buffer_nbytes, plan_devices, units_leaving
from hfq.placement.device_map import execution_devices
from hfq.placement.multi_device import plan_accelerators

UNITS = [
    Unit("embed", 30, "embedding"),
    *(Unit(f"layers.{i}", 20, "block") for i in range(6)),
    Unit("head", 30, "other"),
]
EXPERTS = [
    Unit("", 4, "fixed"),
    Unit("embed", 40, "embedding"),
    *(
        unit
        for i in range(16)
        for unit in (Unit(f"layers.{i}", 20, "block"), Unit(f"layers.{i}.mlp.experts", 120, "experts"))
    ),
    Unit("norm", 1, "other"),
    Unit("head", 45, "other"),
]
UNEVEN = [Unit(f"layers.{i}", 10 + 7 * (i % 4), "block") for i in range(24)]
DENSE = [UNITS[0], *(Unit(f"layers.{i}", 20, "block") for i in range(30)), UNITS[-1]]
MODELS = {"dense": DENSE, "experts": EXPERTS, "uneven": UNEVEN}


def test_parts_are_contiguous_and_even_with_their_cache():
    budget = plan_accelerators(UNITS, {"cuda:0": 200, "cuda:1": 200}, layer_nbytes=10, device_nbytes=10)
    assert list(budget.devices.values()) == ["cuda:0"] * 4 + ["cuda:1"] * 4
    assert budget.stored_nbytes == {"cuda:0": 90, "cuda:1": 90}
    assert not budget.buffers


def test_a_small_accelerator_gets_less():
    budget = plan_accelerators(UNITS, {"cuda:0": 60, "cuda:1": 400}, device_nbytes=5)
    assert budget.stored_nbytes["cuda:0"] <= 55
    assert sum(budget.stored_nbytes.values()) == 180


def test_sequential_fills_the_first_and_low_0_spares_it():
    limits = {"cuda:0": 150, "cuda:1": 190}
    sequential = plan_accelerators(UNITS, limits, strategy="sequential")
    assert sequential.stored_nbytes == {"cuda:0": 150, "cuda:1": 30}
    spared = plan_accelerators(UNITS, limits, strategy="balanced_low_0")
    assert spared.stored_nbytes == {"cuda:1": 180}


def test_a_layer_and_its_experts_compute_on_one_accelerator():
    for first in range(200, 1300, 37):
        budget = plan_accelerators(EXPERTS, {"cuda:0": first, "cuda:1": 1500 - first, "cpu": 300})
        for index in range(16):
            assert budget.executes[f"layers.{index}"] == budget.executes[f"layers.{index}.mlp.experts"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("share", [0.4, 0.5, 0.6, 0.75, 0.85, 0.95])
@pytest.mark.parametrize("cpu", [None, 300, 1000])
@pytest.mark.parametrize("skew", [0, 0.4])
def test_no_accelerator_has_room_for_a_layer_that_is_elsewhere(model, count, share, cpu, skew):
    units = MODELS[model]
    total = sum(unit.nbytes for unit in units)
    limits = {
        f"cuda:{index}": int(total * share / count * (1 + skew * (index - 0.5))) for index in range(count)
    }
    if cpu is not None:
        limits["cpu"] = cpu
    budget = plan_accelerators(units, limits)
    elsewhere = [unit for unit in units if budget.devices[unit.name] in ("cpu", "disk")]
    offloaded = [unit.nbytes for unit in elsewhere if unit.kind == "block"]
    for device in limits:
        own = [unit for unit in elsewhere if budget.executes[unit.name] == device]
        if device != "cpu":
            assert budget.buffers.get(device, 0) == layer_buffer_nbytes(own)
        assert budget.taken(device) <= limits[device]
        if device not in ("cpu", "disk") and offloaded:
            assert budget.headroom()[device] < max(offloaded)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("share", [0.4, 0.5, 0.7, 0.9, 1.2])
def test_the_map_alone_says_where_each_unit_computes(model, share):
    units = [unit for unit in MODELS[model] if unit.name]
    limits = {f"cuda:{i}": int(sum(unit.nbytes for unit in units) * share / 3) for i in range(3)}
    budget = plan_accelerators(units, limits)
    groups = {unit.name: [unit.name] for unit in units if unit.kind != "experts"}
    for unit in units:
        if unit.kind == "experts":
            groups[unit.name.removesuffix(".mlp.experts")].append(unit.name)
    computing = execution_devices(budget.devices, budget.main, groups.items())
    assert {name: computing[name] for name in groups} == {name: budget.executes[name] for name in groups}


def test_no_limit_makes_the_most_loaded_accelerator_offload_more():
    most = []
    for limit in range(60, 120, 5):
        budget = plan_accelerators(UNITS, {"cuda:0": limit, "cuda:1": limit})
        elsewhere = [unit for unit in UNITS if budget.devices[unit.name] == "disk"]
        most.append(
            max(
                sum(unit.nbytes for unit in elsewhere if budget.executes[unit.name] == device)
                for device in ("cuda:0", "cuda:1")
            )
        )
    assert most == sorted(most, reverse=True)


def test_what_fits_nowhere_names_limits_that_do():
    limits = {"cuda:0": 60, "cuda:1": 60, "disk": 10}
    with pytest.raises(PlacementError) as refused:
        plan_accelerators(UNITS, limits, layer_nbytes=10, device_nbytes=10)
    assert "max_memory={0: " in refused.value.fix
    fixed = refused.value.fix.partition("max_memory=")[2].partition("}")[0] + "}"
    ways = {f"cuda:{key}" if isinstance(key, int) else key: limit for key, limit in eval(fixed).items()}
    plan_accelerators(UNITS, ways, layer_nbytes=10, device_nbytes=10)


def test_a_unit_larger_than_an_even_part_does_not_put_all_on_one_accelerator():
    units = [*(Unit(f"h.{index}", 116, "block") for index in range(4)), Unit("lm_head", 786, "other")]
    budget = plan_accelerators(units, {f"xpu:{index}": 10_000 for index in range(3)})
    assert list(budget.devices.values()) == ["xpu:0"] * 4 + ["xpu:1"]


def with_head(layer, count, head, embedding, is_halved=False):
    """Returns the units of a model whose head may be stored in half of its bytes."""
    layers = [Unit(f"layers.{i}", layer, "block") for i in range(count)]
    ends = [Unit("norm", 1, "other"), Unit("head", head, "other", -(-head // 2) if is_halved else None)]
    return [Unit("", 1, "fixed"), Unit("embed", embedding, "embedding"), *layers, *ends]


@pytest.mark.parametrize(
    ("units", "first", "second"),
    [
        (with_head(116, 4, 786, 40), 790, 700),  # the head fits on the first one alone
        (with_head(116, 4, 786, 40), 850, 850),
        (with_head(110, 32, 1050, 1050), 1758, 879),  # the second one is too small for the head's buffer
        (with_head(55, 28, 788, 1), 1382, 691),
        (with_head(116, 4, 786, 1, is_halved=True), 600, 600),  # it fits on none, but its buffer does
        (with_head(116, 4, 786, 1, is_halved=True), 600, 524),
        (with_head(430, 80, 2100, 2100), 6100, 3050),
    ],
)
def test_a_head_larger_than_a_layer_leaves_no_accelerator_unused(units, first, second):
    limits = {"cuda:0": first, "cuda:1": second, "cpu": 100_000}
    budget = plan_accelerators(units, limits)
    assert set(budget.executes.values()) == {"cuda:0", "cuda:1"}
    assert not rooms(units, limits, budget.devices, budget.executes)


def test_three_accelerators_too_small_for_the_head_keep_the_layers():
    limits = {f"xpu:{index}": 600 for index in range(3)}
    budget = plan_accelerators(with_head(116, 4, 786, 1), {**limits, "xpu:2": 800})
    assert "disk" not in budget.devices.values()
    budget = plan_accelerators(with_head(116, 4, 590, 1), limits)
    assert "disk" not in budget.devices.values()


def rooms(units, limits, devices, executes):
    """Returns the accelerators with room for an offloaded layer or head, buffer and norm included."""
    found = []
    for device in limits:
        own = [unit for unit in units if executes[unit.name] == device]
        gone = [unit for unit in own if devices[unit.name] != device]
        kept = sum(unit.nbytes for unit in own if unit not in gone)
        for unit in units:
            if device not in ("cpu", "disk") and unit.is_offloaded and devices[unit.name] in ("cpu", "disk"):
                buffer = layer_buffer_nbytes([other for other in gone if other is not unit])
                if kept + unit.nbytes + buffer + 1 <= limits[device]:
                    found.append((device, unit.name))
    return found


def has_host_room(units, budget, limits):
    """Returns True if the CPU has room for a unit on disk, offload buffer included."""
    disk = [unit for unit in units if budget.devices[unit.name] == "disk"]
    through = sum(nbytes for device, nbytes in budget.buffers.items() if device != "cpu")
    for unit in disk:
        is_read = any(other.is_offloaded for other in disk if other is not unit)
        if budget.stored_nbytes.get("cpu", 0) + unit.nbytes + through * is_read <= limits["cpu"]:
            return True
    return False


def divisions(units, limits):
    """Yields the device map and the execution devices of every contiguous division that is possible."""
    accelerators = [device for device in limits if device not in ("cpu", "disk")]
    for count in range(1, len(accelerators) + 1):
        for order in itertools.permutations(accelerators, count):
            for cuts in itertools.combinations(range(1, len(units)), count - 1):
                parts = [units[start:end] for start, end in itertools.pairwise([0, *cuts, len(units)])]
                leaving = [
                    units_leaving(part, limits[device], 0) for device, part in zip(order, parts, strict=True)
                ]
                firsts = [next((unit for unit in part if unit.is_offloaded), None) for part in parts[1:]]
                if any(isinstance(gone, int) for gone in leaving) or any(
                    first in gone for first, gone in zip(firsts, leaving[1:], strict=True)
                ):
                    continue
                executes = {
                    unit.name: device for device, part in zip(order, parts, strict=True) for unit in part
                }
                yield executes | {unit.name: "disk" for gone in leaving for unit in gone}, executes


@settings(deadline=None, max_examples=150)
@given(
    st.builds(
        with_head,
        st.integers(4, 30),
        st.integers(1, 7),
        st.integers(1, 150),
        st.integers(1, 150),
        st.booleans(),
    ),
    st.lists(st.floats(0.1, 0.9), min_size=1, max_size=3),
    st.none() | st.floats(0, 2),
)
@example(with_head(4, 6, 19, 27, True), [0.25, 0.125, 0.125], None)
@example(with_head(16, 3, 135, 117), [0.5, 0.109375], None)
def test_no_device_has_room_for_a_unit_that_is_on_a_slower_one(units, shares, cpu):
    total = sum(unit.nbytes for unit in units)
    limits = {f"xpu:{index}": int(total * share) for index, share in enumerate(shares)}
    host = {} if cpu is None else {"cpu": int(total * cpu)}
    largest = max(limits, key=lambda device: limits[device])
    try:
        alone = plan_devices(units, {largest: limits[largest], **host}, largest)
    except PlacementError:
        alone = None
    try:
        budget = plan_accelerators(units, {**limits, **host})
    except PlacementError:
        assert alone is None
        return
    assert all(budget.taken(device) <= limit for device, limit in {**limits, **host}.items())
    assert budget == plan_accelerators(units, {**limits, **host})
    groups = {unit.name: [unit.name] for unit in units if unit.name}
    computing = execution_devices(budget.devices, budget.main, groups.items())
    assert computing == {name: budget.executes[name] for name in groups}
    assert not (host and has_host_room(units, budget, host))
    if rooms(units, limits, budget.devices, budget.executes) and cpu is None:
        assert all(rooms(units, limits, *division) for division in divisions(units, limits))
