"""Tests of the costs of a long context, and of plans with an offloaded KV cache."""

from dataclasses import replace

import pytest
import torch

import hfq
from hfq.errors import PlacementError
from hfq.loading.kv_layers import kv_layers
from hfq.placement.budget import Unit
from hfq.placement.estimate.context_costs import context_costs
from hfq.placement.estimate.estimate import ModelSizes, Workload, estimate_placement
from hfq.placement.estimate.hardware import Hardware
from hfq.placement.estimate.kv_cache import Activations, KvLayer, kv_nbytes, offloaded_kv_nbytes
from hfq.placement.estimate.profile import PUBLISHED
from tests.support.models import load

LAYERS = (KvLayer(512, 512, heads=4),) * 8
MIB = 1 << 20


def sizes(layers=LAYERS):
    units = tuple(Unit(f"layers.{index}", 8 * MIB, "block") for index in range(8))
    weights = {"other": (64 * MIB, 64 * MIB)}
    return ModelSizes(units, layers, Activations(512, 2048, 8192, 8), weights, 1.0, "bfloat16", 8)


@pytest.mark.parametrize("kind", ["auto", "fp8", "int8"])
def test_stored_bytes_are_those_of_the_cache(kind):
    model = load(dtype=torch.bfloat16)
    with hfq.OffloadedCache(model, kv_cache_dtype=kind) as cache, torch.no_grad():
        model(torch.arange(3, 40).view(1, -1).repeat(2, 1), past_key_values=cache)
        stored, held = offloaded_kv_nbytes(kv_layers(model)[0], 2, 37, "bfloat16", kind)
        assert cache.nbytes == stored
        assert held == kv_nbytes(kv_layers(model)[0], 2, 37, "bfloat16") // 2  # two of four layers


def test_windows_stay_on_the_device():
    layers = (*LAYERS, KvLayer(512, 512, window=101, heads=4))
    stored, held = offloaded_kv_nbytes(layers, 1, 1000, "bfloat16")
    assert stored == 8 * 1000 * 2048
    assert held == 2 * 1000 * 2048 + 100 * 2048


def test_an_offloaded_cache_leaves_its_memory_to_weights():
    workload, machine = Workload(1, 100_000), Hardware(cpu=200 * MIB)
    with pytest.raises(PlacementError, match="does not fit"):
        estimate_placement(sizes(), replace(machine, cpu=100 * MIB, disk=0), workload, PUBLISHED)
    on_disk = replace(workload, kv_device="disk")
    plain, offloaded = (
        estimate_placement(sizes(), replace(machine, cpu=4000 * MIB), each, PUBLISHED)
        for each in (workload, on_disk)
    )
    assert offloaded.devices()["disk"]["kv_cache"] == plain.devices()["cpu"]["kv_cache"]
    assert offloaded.devices()["cpu"]["kv_cache"] * 4 == plain.devices()["cpu"]["kv_cache"]
    assert offloaded.prediction.terms["kv_reads"] == pytest.approx(8 * 100_000 * 2048 / PUBLISHED.disk)
    assert offloaded.prediction.step_seconds > plain.prediction.step_seconds
    assert offloaded.prediction.dominant == "kv_reads"


def test_memory_of_the_host_may_hold_the_cache_of_an_accelerator():
    machine = Hardware(gpus=(4000 * MIB,), cpu=4000 * MIB)
    plain, offloaded = (
        estimate_placement(sizes(), machine, Workload(1, 100_000, kv_device=device), PUBLISHED)
        for device in (None, "cpu")
    )
    assert offloaded.devices()["cpu"]["kv_cache"] == plain.devices()["cuda:0"]["kv_cache"]
    assert offloaded.prediction.terms["kv_reads"] > 0


def test_costs_of_a_sequence():
    estimate = estimate_placement(sizes(), Hardware(cpu=1000 * MIB), Workload(1, 10_000), PUBLISHED)
    costs = context_costs(estimate, sizes(), PUBLISHED)
    assert costs.sequence_nbytes == 8 * 10_000 * 2048
    assert costs.resume_seconds == pytest.approx(costs.sequence_nbytes / PUBLISHED.disk)
    assert costs.prefill_seconds > estimate.prediction.step_seconds
    more = estimate_placement(sizes(), Hardware(cpu=1000 * MIB), Workload(costs.sequences, 10_000), PUBLISHED)
    assert set(more.budget.devices.values()) == {"cpu"}
    too_many = Workload(costs.sequences + 1, 10_000)
    with pytest.raises(PlacementError):
        estimate_placement(sizes(), Hardware(cpu=1000 * MIB, disk=0), too_many, PUBLISHED)
