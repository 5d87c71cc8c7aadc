"""Placements beside a KV cache and activations, and ways out that fit."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfq.errors import PlacementError
from hfq.placement.budget import Unit
from hfq.placement.estimate.estimate import ModelSizes, Workload, estimate_placement
from hfq.placement.estimate.hardware import Hardware, parse_size
from hfq.placement.estimate.kv_cache import Activations, KvLayer
from hfq.placement.estimate.profile import PUBLISHED

MIB = 1 << 20
UNITS = (
    Unit("embed", 8 * MIB, "embedding"),
    *(Unit(f"layers.{i}", 10 * MIB, "block") for i in range(8)),
    Unit("head", 8 * MIB, "other"),
)
SIZES = ModelSizes(
    UNITS,
    (KvLayer(512, 512),) * 8,
    Activations(512, 2048, 8192, 8),
    {"int4": (160 * MIB, 80 * MIB)},
    1.0,
    "bfloat16",
    8,
)
WORK = Workload(1, 1024)


def plan(hardware, workload=WORK, sizes=SIZES, **kwargs):
    return estimate_placement(sizes, hardware, workload, PUBLISHED, **kwargs)


def test_the_cache_and_the_activations_are_taken_off_what_computes():
    found = plan(Hardware((64 * MIB,), 200 * MIB))
    kv, activations = 8 * 1024 * 1024 * 2, 1024 * (3 * 512 + 2 * 2048) * 2 + 8192 * 6
    assert (found.kv, found.activations) == (kv, activations)
    assert found.budget.capacities == {"cuda:0": 64 * MIB - kv - activations, "cpu": 200 * MIB}
    devices = found.devices()
    assert sum(devices["cuda:0"].values()) <= 64 * MIB
    assert devices["cpu"] == {
        "weights": 96 * MIB - devices["cuda:0"]["weights"],
        "buffer": 0,
        "experts": 0,
        "kv_cache": 0,
        "activations": 0,
    }
    assert found.work.copied == found.budget.onloaded_nbytes > 0
    assert found.work.streamed == 0


def test_what_rests_on_disk_is_read_from_there_for_each_step():
    found = plan(Hardware(cpu=70 * MIB))
    assert (
        found.work.streamed == found.budget.onloaded_nbytes == found.prediction.terms["disk"] * PUBLISHED.disk
    )
    assert found.work.copied == 0
    assert found.prediction.dominant == "disk"
    assert plan(Hardware(cpu=70 * MIB), free_memory=1 << 40).work.is_cached


def test_of_experts_a_step_moves_those_that_are_routed_to():
    experts = tuple(Unit(f"layers.{i}.experts", 40 * MIB, "experts") for i in range(8))
    sizes = replace(SIZES, units=UNITS + experts, routed=0.25)
    one, many = (plan(Hardware(cpu=140 * MIB), Workload(batch, 16), sizes) for batch in (1, 4))
    offloaded = sum(unit.nbytes for unit in experts if one.budget.devices[unit.name] == "disk")
    missed = offloaded - one.budget.expert_caches["cpu"]  # a cache hits the share that it holds
    assert 0 < one.work.streamed == missed // 4 < offloaded // 4
    assert many.work.streamed == offloaded  # which all experts pass through
    assert (one.work.on_demand, many.work.on_demand) == (one.work.streamed, many.work.streamed)
    computing = sum(one.prediction.terms[name] for name in ("weights", "cache", "layers"))
    assert one.prediction.step_seconds == computing + one.prediction.terms["disk"]


def test_routed_experts_are_cached_if_all_of_them_are():
    experts = tuple(Unit(f"layers.{i}.experts", 40 * MIB, "experts") for i in range(8))
    sizes = replace(SIZES, units=UNITS + experts, routed=0.125)
    found = plan(Hardware(cpu=140 * MIB), Workload(1, 16), sizes)
    on_disk = found.budget.stored_nbytes["disk"]
    for free, is_cached in ((2 * on_disk, True), (2 * on_disk - 2, False)):
        work = plan(Hardware(cpu=140 * MIB), Workload(1, 16), sizes, free_memory=free).work
        assert work.streamed < on_disk // 8
        assert work.is_cached == is_cached


@pytest.mark.parametrize(
    ("hardware", "workload"),
    [
        (Hardware(cpu=20 * MIB), WORK),
        (Hardware(cpu=60 * MIB, disk=0), WORK),
        (Hardware((32 * MIB,), 20 * MIB), WORK),
        (Hardware(cpu=200 * MIB, disk=0), Workload(64, 4096)),
        (Hardware(cpu=1), WORK),
    ],
)
def test_each_way_out_fits(hardware, workload):
    with pytest.raises(PlacementError, match="does not fit") as refused:
        plan(hardware, workload)
    ways = refused.value.fix.rstrip(".").partition(": ")[2].split("; or ")
    assert ways
    for way in ways:
        option, _, value = way.partition(" ")
        changes = {
            "--cpu": lambda v: (replace(hardware, cpu=parse_size(v, "a size")), workload),
            "--gpu": lambda v: (replace(hardware, gpus=(parse_size(v, "a size"),)), workload),
            "--batch-size": lambda v: (hardware, replace(workload, batch=int(v))),
            "--max-model-len": lambda v: (hardware, replace(workload, context=int(v))),
            "--kv-cache-dtype": lambda v: (hardware, replace(workload, kv_dtype=v)),
            "leave": lambda v: (replace(hardware, disk=None), workload),
        }
        plan(*changes[option](value))
    assert re.search(r"\d", str(refused.value))


@settings(max_examples=40, deadline=None)
@given(st.integers(40, 300), st.integers(0, 200), st.integers(1, 3000))
def test_more_memory_never_costs_feasibility_nor_speed(cpu, more, context):
    workload = Workload(1, context)
    try:
        before = plan(Hardware(cpu=cpu * MIB), workload)
    except PlacementError:
        return
    after = plan(Hardware(cpu=(cpu + more) * MIB), workload)
    assert after.work.streamed <= before.work.streamed
