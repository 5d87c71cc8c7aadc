"""Tests that routed experts on cpu and disk beside accelerators give the same bits."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

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
