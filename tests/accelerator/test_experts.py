"""Tests that routed experts on cpu and disk beside accelerators give the same bits."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hfq.loading import automatic_map
from hfq.loading.kv_layers import context_nbytes
from hfq.modules.experts import QuantizedExperts
from tests.support import moe_models
from tests.support.models import load

pytestmark = pytest.mark.accelerator

NAMES = [
    "mixtral w1 w2 w3, gptq",
    "mixtral fused gate_up, fp8",
    "qwen3 by expert, bitsandbytes",
    "qwen2 with a shared expert, fp8 blocks",
    "gpt-oss blocks",
]
"""Of all schemes: the simulated accelerator has no complex numbers, which Llama 4 and DeepSeek compute with."""
TOKENS = torch.arange(2, 14)[None]
ORDERS = {
    "eager": {},
    "lazy": {"default": "lazy", "others": "lazy"},
    "slow": {"default": 300, "others": 3000},
}


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(sim, request, tmp_path_factory):
    """A mixture of experts, its maps over accelerators, and its logits on one of them."""
    scheme = next(scheme for scheme in moe_models.SCHEMES if scheme.id == request.param)
    path = moe_models.write(scheme, moe_models.is_quantized(scheme)).save(tmp_path_factory.mktemp("moe"))
    model = load(path, {"": "sim:0"})
    experts = [name for name, _ in model.named_modules() if name.endswith("experts")]
    layers = [name for name, _ in model.named_modules() if name.rpartition(".")[0] == "model.layers"]
    with torch.no_grad():
        expected = model(TOKENS.to("sim:0")).logits.cpu()
    maps = {
        "1+cpu+disk": {"": "sim:0"} | {name: ("cpu", "disk")[at % 2] for at, name in enumerate(experts)},
        "2+cpu+disk": {"": "sim:0", layers[-1]: "sim:1", "model.norm": "sim:1", "lm_head": "sim:1"}
        | {name: ("disk", "cpu")[at % 2] for at, name in enumerate(experts)},
    }
    return path, maps, expected


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placement", ["1+cpu+disk", "2+cpu+disk"])
@pytest.mark.parametrize("cache", [None, 0, 20_000], ids=["default", "no cache", "small cache"])
def test_logits_are_equal(sim, checkpoint, placement, order, cache):
    path, maps, expected = checkpoint
    with sim.streams(**ORDERS[order]), torch.no_grad():
        model = load(path, maps[placement], expert_cache_size=cache)
        found = [model(TOKENS).logits.cpu() for _ in range(2)]
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("checkpoint", ["mixtral fused gate_up, fp8"], indirect=True)
def test_two_threads_share_a_cache_smaller_than_a_layer(sim, checkpoint):
    path, maps, expected = checkpoint
    model = load(path, maps["1+cpu+disk"], expert_cache_size=20_000)

    def passes():
        with torch.no_grad(), torch.Stream("sim:0"):
            return [model(TOKENS).logits.cpu() for _ in range(50)]

    with sim.streams(default=20, others=50), ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(passes) for _ in range(2)]
        found = [logits for thread in threads for logits in thread.result()]
    assert len(found) == 100
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("checkpoint", ["mixtral fused gate_up, fp8"], indirect=True)
@pytest.mark.parametrize("room", [0, 60_000, 140_000])
def test_the_cache_takes_what_a_small_device_has_left_besides_a_context(sim, checkpoint, room):
    path, maps, expected = checkpoint
    gc.collect()  # models of other tests
    free, _ = torch.accelerator.get_memory_info(0)
    model = load(path, maps["1+cpu+disk"], expert_cache_size=0)
    least, size = cache_on(model, "sim:0")
    held = free - torch.accelerator.get_memory_info(0)[0] - least
    context = context_nbytes(model)
    del model
    gc.collect()
    other = torch.accelerator.memory_allocated(0)
    sim.set_capacity(0, other + held + int((context + room) / 0.9) + 2)
    try:
        with torch.no_grad():
            model = load(path, maps["1+cpu+disk"])
            found = [model(TOKENS).logits.cpu() for _ in range(3)]
        cache, _ = cache_on(model, "sim:0")
        assert cache == least or room - size < cache <= room + 512
        assert (cache > least) == (room > least + size)
        assert all(torch.equal(each, expected) for each in found)
    finally:
        sim.set_capacity(0, 1 << 30)


def cache_on(model, device: str) -> tuple[int, int]:
    """Returns the bytes of the expert cache on a device, and those of one place."""
    memory = model.hf_quantizer.loading.offloader.experts._places[torch.device(device)].memory
    assert memory.memory.numel() == memory.count * memory.place_nbytes
    return memory.memory.numel(), memory.place_nbytes


@pytest.mark.parametrize("checkpoint", ["mixtral fused gate_up, fp8"], indirect=True)
def test_an_automatic_map_reserves_the_cache_that_is_used(sim, checkpoint, monkeypatch):
    path, _, expected = checkpoint
    monkeypatch.setattr(automatic_map, "context_nbytes", lambda model: 1000)
    units = load(path, {"": "sim:0"}).hf_quantizer.loading.gather_units()
    limit = sum(unit.nbytes for unit in units if unit.kind != "embedding") - 5000
    with torch.no_grad():
        model = load(path, "auto", max_memory={0: limit, "cpu": 1 << 30})
        assert torch.equal(model(TOKENS).logits.cpu(), expected)
    loading = model.hf_quantizer.loading
    assert loading.budget.expert_caches["sim:0"] > 0
    assert loading.budget.taken("sim:0") <= limit - 1000
    assert loading.offloader.experts.nbytes_by_device()["sim:0"] <= loading.budget.expert_caches["sim:0"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rule", ["cpu", "auto"])
@pytest.mark.parametrize("placement", ["1+cpu+disk", "2+cpu+disk"])
def test_experts_that_compute_on_the_cpu_give_the_same_bits(sim, checkpoint, placement, order, rule):
    path, maps, expected = checkpoint
    with sim.streams(**ORDERS[order]), torch.no_grad():
        model = load(path, maps[placement], execute_cpu_layers_on=rule, kernel="reference")
        found = [model(TOKENS).logits.cpu() for _ in range(2)]
    layers = [module for module in model.modules() if getattr(module, "on_cpu", None) is not None]
    assert sum(layer.on_cpu.cpu_forwards for layer in layers) > 0
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("checkpoint", ["qwen2 with a shared expert, fp8 blocks"], indirect=True)
def test_the_accelerator_goes_on_while_experts_compute_on_the_cpu(sim, checkpoint, monkeypatch):
    path, maps, expected = checkpoint
    model = load(path, maps["1+cpu+disk"], execute_cpu_layers_on="cpu", kernel="reference")
    block, is_queued, found = model.model.layers[0].mlp, threading.Event(), []
    compute, main = QuantizedExperts._compute, threading.get_ident()

    def compute_late(experts, layers, activations, *stacked):
        if threading.get_ident() != main:
            found.append((activations.device.type, is_queued.wait(20)))
        return compute(experts, layers, activations, *stacked)

    monkeypatch.setattr(QuantizedExperts, "_compute", compute_late)
    block.shared_expert_gate.register_forward_hook(lambda *_: is_queued.set())
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits.cpu(), expected)
    assert found
    assert set(found) == {("cpu", True)}


def test_activations_go_to_the_host_once_for_all_experts(sim, checkpoint):
    path, maps, _ = checkpoint
    model = load(path, maps["1+cpu+disk"], execute_cpu_layers_on="cpu", kernel="reference")
    block = model.model.layers[0].mlp
    counted = []
    block.register_forward_pre_hook(lambda *_: sim.take_counts() and None)
    block.register_forward_hook(lambda *_: counted.append(sim.take_counts()))
    with torch.no_grad():
        model(TOKENS)
    cpu_experts = sum(layers["down_proj"].on_cpu.cpu_forwards > 0 for layers in block.experts)
    assert cpu_experts > 1
    assert counted[0]["copies to host"] == 2  # hidden states and the router's choice
    assert counted[0]["pinned copies"] == cpu_experts + 1  # their outputs, and the tokens of all experts
    assert counted[0]["event synchronizations"] == 1
    assert "aten::nonzero" not in counted[0]
