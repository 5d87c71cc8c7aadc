"""Tests of the execution device of layers that are stored in CPU memory."""

import pytest
import torch

from hfq.modules.linear import QuantizedLinear
from tests.support.accelerator_maps import LAYERS
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator

TOKENS = torch.arange(1, 21)[None]
MAP = {"": "sim:0", **dict.fromkeys(LAYERS, "cpu")}


def linears(model):
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens.to("sim:0")).logits.cpu()


@pytest.mark.parametrize("rule", ["cpu", "auto"])
def test_layers_on_the_cpu_compute_there_if_asked(sim, rule):
    model, expected = load(GPTQ, MAP, execute_cpu_layers_on=rule), load(GPTQ, {"": "sim:0"})
    assert all(linear.on_cpu is not None for linear in linears(model))
    prefill = logits(model, TOKENS)
    fetches = [linear.on_cpu.fetches for linear in linears(model)]
    assert set(fetches) == {1 if rule == "auto" else 0}
    torch.testing.assert_close(prefill, logits(expected, TOKENS))  # another kernel
    if rule == "auto":
        assert torch.equal(prefill, logits(expected, TOKENS))
    torch.testing.assert_close(logits(model, TOKENS[:, :1]), logits(expected, TOKENS[:, :1]))
    assert [linear.on_cpu.fetches for linear in linears(model)] == fetches
    assert {linear.on_cpu.cpu_forwards for linear in linears(model)} == {1 if rule == "auto" else 2}


def test_layers_on_the_cpu_compute_on_the_accelerator_unless_asked(sim):
    assert all(linear.on_cpu is None for linear in linears(load(GPTQ, MAP)))
