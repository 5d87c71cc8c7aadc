"""Tests that a model computes the same bits in every placement on accelerators, in every order of streams."""

import contextlib

import pytest
import torch

from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator

LAYERS = [f"model.layers.{index}" for index in range(4)]
MAPS = {
    "1": {"": "sim:0"},
    "1+cpu": {"": "sim:0", LAYERS[1]: "cpu", LAYERS[2]: "cpu"},
    "1+disk": {"": "sim:0", LAYERS[1]: "disk", LAYERS[2]: "disk"},
    "1+cpu+disk": {"": "sim:0", LAYERS[0]: "disk", LAYERS[1]: "cpu", LAYERS[3]: "disk"},
}
ORDERS = {
    "eager": {},
    "lazy default": {"default": "lazy"},
    "lazy others": {"others": "lazy"},
    "lazy": {"default": "lazy", "others": "lazy"},
    "slow": {"default": 300, "others": 3000},
}


@pytest.fixture(scope="module")
def expected():
    model = load(GPTQ, {"": "sim:0"})
    tokens = torch.arange(8)[None].to("sim:0")
    with torch.no_grad():
        return model(tokens).logits.cpu(), model.generate(tokens, max_new_tokens=6, do_sample=False).cpu()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placement", MAPS)
@pytest.mark.parametrize("is_user_stream", [False, True], ids=["default stream", "user stream"])
def test_logits_and_tokens_are_equal(sim, expected, placement, order, is_user_stream):
    with sim.streams(**ORDERS[order]), torch.no_grad():
        model = load(GPTQ, MAPS[placement])
        tokens = torch.arange(8)[None].to("sim:0")
        with torch.Stream("sim:0") if is_user_stream else contextlib.nullcontext():
            logits = [model(tokens).logits.cpu() for _ in range(2)]
            generated = model.generate(tokens, max_new_tokens=6, do_sample=False).cpu()
    assert all(torch.equal(found, expected[0]) for found in logits)
    assert torch.equal(generated, expected[1])
