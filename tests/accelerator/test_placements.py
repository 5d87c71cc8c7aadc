"""Tests that a model computes the same bits in every placement on accelerators, in every order of streams."""

import contextlib

import pytest
import torch

from tests.support.accelerator_maps import LAYERS
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator

HEAD = {"model.embed_tokens": "sim:0", "lm_head": "sim:0"}
MAPS = {
    "1": {"": "sim:0"},
    "1+cpu+disk": {"": "sim:0", LAYERS[0]: "disk", LAYERS[1]: "cpu", LAYERS[3]: "disk"},
    "2": {"": "sim:0", LAYERS[2]: "sim:1", LAYERS[3]: "sim:1"},
    "2 by layers": {"": "sim:1", "model.embed_tokens": "sim:0", "lm_head": "sim:0", LAYERS[1]: "disk"},
    "2 by a parent key": {"model": "sim:1", "lm_head": "sim:1", LAYERS[0]: 0},
    "2+cpu+disk": {
        "": "sim:1",
        LAYERS[0]: "sim:0",
        LAYERS[1]: "disk",
        f"{LAYERS[2]}.mlp": "cpu",
        LAYERS[3]: "disk",
    },
    "3+cpu+disk": {
        "": "disk",
        f"{LAYERS[0]}.self_attn": "sim:0",
        f"{LAYERS[1]}.self_attn": "sim:1",
        f"{LAYERS[2]}.mlp": "cpu",
        f"{LAYERS[3]}.mlp": "sim:2",
        "model.embed_tokens": "sim:0",
    },
}
LAZY = {"default": "lazy", "others": "lazy"}


@pytest.fixture(scope="module")
def expected():
    model = load(GPTQ, {"": "sim:0"})
    tokens = torch.arange(8)[None].to("sim:0")
    with torch.no_grad():
        return model(tokens).logits.cpu(), model.generate(tokens, max_new_tokens=6, do_sample=False).cpu()


@pytest.mark.parametrize("placement", MAPS)
@pytest.mark.parametrize("is_user_stream", [False, True], ids=["default stream", "user stream"])
def test_logits_and_tokens_are_equal(sim, expected, placement, is_user_stream):
    with sim.streams(**LAZY), torch.no_grad():
        model = load(GPTQ, MAPS[placement])
        tokens = torch.arange(8)[None].to("sim:0")
        with torch.Stream("sim:0") if is_user_stream else contextlib.nullcontext():
            logits = [model(tokens).logits.cpu() for _ in range(2)]
            generated = model.generate(tokens, max_new_tokens=6, do_sample=False).cpu()
    assert all(torch.equal(found, expected[0]) for found in logits)
    assert torch.equal(generated, expected[1])


@pytest.mark.parametrize("placement", MAPS)
@pytest.mark.parametrize("device", ["cpu", "sim:0", "sim:1", "sim:2"])
def test_inputs_may_be_on_any_device(sim, expected, placement, device):
    model = load(GPTQ, MAPS[placement])
    with torch.no_grad():
        assert torch.equal(model(torch.arange(8)[None].to(device)).logits.cpu(), expected[0])


@pytest.mark.parametrize("placement", MAPS)
def test_outputs_stay_on_the_accelerator(sim, placement):
    model = load(GPTQ, MAPS[placement])
    assert model(torch.arange(8)[None]).logits.device == model.device


def test_an_automatic_map_on_one_accelerator_takes_inputs_on_the_cpu(sim, expected):
    model = load(GPTQ, "auto", max_memory={0: "1GB"})
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits.cpu(), expected[0])
        assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False).cpu(), expected[1])


def test_inputs_on_the_accelerator_are_not_copied(sim):
    model, seen = load(GPTQ, {"": "sim:0"}), []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    tokens = torch.arange(8)[None].to("sim:0")
    model(tokens)
    assert seen[0] is tokens
