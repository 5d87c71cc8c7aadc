"""Tests of automatic maps over several accelerators with cpu and disk: bits, limits, and bytes held."""

import gc
import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import hfq
from hfq.cli.main import app
from hfq.placement.budget import buffer_nbytes
from hfq.placement.device_map import covering_device
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator
TOKENS = torch.arange(8)[None]


@pytest.fixture(scope="module", params=[False, True], ids=["head", "tied head"])
def checkpoint(request, tmp_path_factory):
    """A model of 16 quantized layers, with its bytes and its logits on one accelerator."""
    folder = tmp_path_factory.mktemp("layers")
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=16,
        num_attention_heads=4,
        vocab_size=128,
        tie_word_embeddings=request.param,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "floats")
    hfq.quantize(folder / "floats", hfq.Recipe("fp8"), folder / "fp8")
    model = load(folder / "fp8", {"": "sim:0"})
    with torch.no_grad():
        expected = model(TOKENS.to("sim:0")).logits.cpu()
    total = sum(entry.nbytes for entry in model.hf_quantizer.loading.plan.entries)
    return folder / "fp8", total, expected


def check(sim, model, expected, limits, before):
    """Holds the bits, the budget, and the bytes on each device of a model that was just loaded."""
    loading = model.hf_quantizer.loading
    budget, units = loading.budget, {unit.name: unit for unit in loading.gather_units()}
    offloaded = [
        unit.nbytes for name, unit in units.items() if unit.kind == "block" and is_offloaded(budget, name)
    ]
    for index in (key for key in limits if key != "cpu"):
        device = f"sim:{index}"
        held = sim.memory_allocated(index) - before[index]
        streamed = [
            unit.unit_onloaded_nbytes
            for name, unit in units.items()
            if unit.is_offloaded and is_offloaded(budget, name) and budget.executes[name] == device
        ]
        assert budget.buffers.get(device, 0) == buffer_nbytes(streamed)
        planned = budget.stored_nbytes.get(device, 0) + buffer_nbytes(streamed, budget.read_ahead_nbytes())
        tensors = sum(found == device for found in loading.devices.values())
        assert abs(held - planned) <= 0.02 * planned + 512 * tensors  # the device rounds every tensor up
        assert planned <= limits[index]
        if offloaded:
            assert budget.headroom()[device] < max(offloaded)
    with torch.no_grad():
        assert all(torch.equal(model(TOKENS).logits.cpu(), expected) for _ in range(2))


def is_offloaded(budget, name):
    return budget.devices[name] in ("cpu", "disk")


@pytest.mark.parametrize(
    "share", [0.45, 0.7, 1.3, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.55, 0.85))]
)
@pytest.mark.parametrize("cpu", [0.4, 2], ids=["cpu and disk", "cpu"])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "strategy", ["auto", pytest.param("balanced_low_0", marks=pytest.mark.slow), "sequential"]
)
def test_an_automatic_map_is_exact_and_within_its_limits(sim, checkpoint, share, cpu, count, strategy):
    path, total, expected = checkpoint
    gc.collect()
    torch.accelerator.synchronize()
    before = [sim.memory_allocated(index) for index in range(count)]  # scratch memory of the kernels
    limits = {index: int(total * share / count) for index in range(count)} | {"cpu": int(total * cpu)}
    check(sim, load(path, strategy, max_memory=limits), expected, limits, before)


def test_the_map_that_hfq_plan_prints_places_the_model_alike(sim, checkpoint):
    path, total, expected = checkpoint
    sizes = ["--gpu", f"{total // 3}B×2", "--cpu", f"{total // 2}B", "--batch-size", 1, "--max-model-len", 1]
    done = CliRunner().invoke(app, ["plan", str(path), "--dtype", "float32", "--json", *map(str, sizes)])
    assert done.exit_code == 0, (done.output, done.exception)
    device_map = json.loads(done.stdout)["device_map"]
    assert {0, 1, "cpu", "disk"} == set(device_map.values())
    model = load(path, device_map)
    loading = model.hf_quantizer.loading
    assert set(loading.executes.values()) == {"sim:0", "sim:1"}
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits.cpu(), expected)


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_without_limits_a_model_fills_the_free_memory_of_accelerators(sim, checkpoint, strategy):
    path, total, expected = checkpoint
    gc.collect()
    torch.accelerator.synchronize()
    before = [sim.memory_allocated(index) for index in range(3)]
    try:
        for index, nbytes in enumerate(before):
            sim.set_capacity(index, nbytes + total // 2)
        model = load(path, strategy)
    finally:
        for index in range(3):
            sim.set_capacity(index, 1 << 30)
    budget = model.hf_quantizer.loading.budget
    assert {device: budget.capacities[device] for device in ("sim:0", "sim:1", "sim:2")} == dict.fromkeys(
        ("sim:0", "sim:1", "sim:2"), int(total // 2 * 0.9)
    )
    assert set(budget.executes.values()) >= {"sim:1", "sim:2"}
    assert not {"cpu", "disk"} & set(model.hf_quantizer.loading.devices.values())
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits.cpu(), expected)


@pytest.mark.parametrize(
    ("limits", "used"),
    [
        ({0: 600_000, 1: 600_000, 2: 600_000}, {"sim:0", "sim:1"}),
        ({0: 700_000, 1: 700_000}, {"sim:0", "sim:1"}),
        ({0: 600_000, 1: 524_288, "cpu": 1_000_000}, {"sim:0", "sim:1"}),
        ({0: 790_000, 1: 480_000}, {"sim:0", "sim:1"}),  # sim:1 computes before sim:0, which holds the head
        ({0: 600_000, "cpu": 1_000_000}, {"sim:0"}),
    ],
)
def test_a_head_larger_than_all_layers_takes_no_layer_along(sim, limits, used):
    with torch.no_grad():
        expected = load(GPTQ, {"": "sim:0"})(TOKENS.to("sim:0")).logits.cpu()
    gc.collect()
    torch.accelerator.synchronize()
    before = [sim.memory_allocated(index) for index in range(3)]
    model = load(GPTQ, "auto", max_memory=limits)
    loading = model.hf_quantizer.loading
    layers = {name: device for name, device in loading.budget.devices.items() if ".layers." in name}
    assert len(layers) == 4
    assert set(layers.values()) <= {"sim:0", "sim:1"} if len(used) > 1 else {*layers.values()} == {"cpu"}
    assert {*loading.executes.values()} == used
    for name in loading.executes.keys() - model.all_tied_weights_keys.keys():
        assert loading.executes[name] == covering_device(name, loading.budget.executes)
    check(sim, model, expected, limits, before)
