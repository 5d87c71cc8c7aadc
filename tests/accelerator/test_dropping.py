"""Tests that a model that is dropped during late copies frees its memory, and that nothing uses it afterwards."""

import gc

import pytest
import torch

from tests.support import moe_models
from tests.support.accelerator_maps import LAYERS, ORDERS
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator
TOKENS = torch.arange(2, 10)[None]
CYCLIC = {"": "sim:0"} | {layer: ("cpu", "disk")[at % 2] for at, layer in enumerate(LAYERS)}
MAPS = {
    "1": {"": "sim:0"},
    "1+cpu+disk": CYCLIC,
    "2+cpu+disk": CYCLIC | {"model.norm": "sim:1", f"{LAYERS[2]}.mlp": "sim:1"},
}


def held(sim) -> list[int]:
    gc.collect()
    return [sim.memory_allocated(index) for index in range(3)]


def reach_frees() -> None:
    """Makes the streams that allocated memory free it, before late copies to it are done."""
    for index in range(3):
        torch.accelerator.current_stream(index).synchronize()


def run(path, device_map, passes: int, **options) -> None:
    """Loads a model, starts some passes, and drops it while streams are late."""
    model = load(path, device_map, **options)
    with torch.no_grad():
        for _ in range(passes):
            model(TOKENS.to("sim:0"))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placement", MAPS)
@pytest.mark.parametrize("passes", [0, 1, 2])
def test_a_dropped_model_leaves_no_bytes_and_no_error(sim, placement, order, passes):
    run(GPTQ, MAPS[placement], passes=1)  # the scratch memory of the kernels
    before = held(sim)
    with sim.streams(**ORDERS[order]):
        run(GPTQ, MAPS[placement], passes)
        assert held(sim) == before
        reach_frees()
    for index in range(3):
        torch.accelerator.synchronize(index)  # raises the errors of earlier work


@pytest.mark.parametrize("order", ORDERS)
def test_dropped_experts_leave_no_bytes_and_no_error(sim, order, tmp_path):
    scheme = next(scheme for scheme in moe_models.SCHEMES if scheme.id == "mixtral w1 w2 w3, gptq")
    path = moe_models.write(scheme, moe_models.is_quantized(scheme)).save(tmp_path)
    device_map = {"": "sim:0", LAYERS[1]: "sim:1", "model.norm": "sim:1", "lm_head": "sim:1"}
    device_map |= {f"{LAYERS[0]}.mlp.experts": "disk", f"{LAYERS[1]}.mlp.experts": "cpu"}
    run(path, device_map, passes=1)
    before = held(sim)
    for cache in (0, 20_000, 1 << 20):
        with sim.streams(**ORDERS[order]):
            run(path, device_map, passes=2, expert_cache_size=cache)
            assert held(sim) == before
            reach_frees()
    for index in range(3):
        torch.accelerator.synchronize(index)
