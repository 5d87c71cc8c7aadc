"""Tests of two models on the same accelerators, and of two threads that share one model."""

import threading

import pytest
import torch

from tests.support import tiny_models
from tests.support.accelerator_maps import LAYERS, MIXED, ORDERS
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator
FP8 = tiny_models.DATA / "tiny-llama-fp8"
BATCHES = [torch.arange(2, 2 + 2 * length).reshape(2, length) for length in (5, 3)]
CYCLIC = {"": "sim:0"} | {layer: ("cpu", "disk")[at % 2] for at, layer in enumerate(LAYERS)}
MAPS = {"1+cpu+disk": CYCLIC, "2+cpu+disk": CYCLIC | {"model.norm": "sim:1", f"{LAYERS[2]}.mlp": "sim:1"}}
PASSES = 20


def logits(model, tokens) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens.to("sim:0")).logits.cpu()


@pytest.fixture(scope="module")
def expected(sim):
    return {path: [logits(load(path, {"": "sim:0"}), tokens) for tokens in BATCHES] for path in (GPTQ, FP8)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placement", MIXED)
def test_two_models_share_the_devices(sim, expected, placement, order):
    with sim.streams(**ORDERS[order]):
        models = {path: load(path, MIXED[placement]) for path in (GPTQ, FP8)}
        for _ in range(2):
            found = {path: [logits(model, tokens) for tokens in BATCHES] for path, model in models.items()}
            assert all(
                torch.equal(*both) for path in found for both in zip(found[path], expected[path], strict=True)
            )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placement", MAPS)
def test_two_threads_with_a_stream_each_share_a_model(sim, expected, placement, order):
    passes = 4 if order == "slow" else PASSES

    def run(batch: int) -> None:
        with torch.Stream("sim:1"), torch.Stream("sim:0"):
            for _ in range(passes):
                equal[batch].append(torch.equal(logits(model, BATCHES[batch]), expected[GPTQ][batch]))

    equal = [], []
    with sim.streams(**ORDERS[order]):
        model = load(GPTQ, MAPS[placement])
        threads = [threading.Thread(target=run, args=(batch,)) for batch in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert equal == ([True] * passes, [True] * passes)


@pytest.mark.parametrize("placement", MAPS)
def test_a_thread_may_run_each_pass_in_another_stream(sim, expected, placement):
    with sim.streams(**ORDERS["lazy"]):
        model = load(GPTQ, MAPS[placement])
        for _ in range(PASSES):
            with torch.Stream("sim:1"), torch.Stream("sim:0"):
                assert torch.equal(logits(model, BATCHES[0]), expected[GPTQ][0])
