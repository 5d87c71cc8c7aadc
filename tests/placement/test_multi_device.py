"""Tests of the placement over several accelerators: contiguous parts, none over its limit."""

import pytest

from hfq.errors import PlacementError
from hfq.placement.budget import Unit, layer_buffer_nbytes
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
        if device in budget.executes.values() and offloaded:
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
