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


def test_operators_that_are_called_again_give_what_the_cpu_gives(sim):
    """The simulation computes shapes once for arguments that look the same."""

    def results(device: str) -> list[torch.Tensor]:
        ones, whole = torch.ones(2, 3, device=device), torch.arange(6, device=device).view(2, 3)
        double = torch.tensor(2.0, dtype=torch.float64)
        found = [whole / 2, whole / 2.5, ones * double, ones * double.to(device), ones[0, 0] * double]
        found += [whole.sum(0), whole.sum(1), whole.t() + 1, whole.t().float() @ whole.float()]
        found += [torch.cat([whole, whole]), torch.cat([whole]), *ones.split(1), *ones.split([1, 2], 1)]
        found += [ones[:, None], ones.expand(4, 2, 3), ones[torch.tensor([1, 0, 1])], ones[whole > 2]]
        return [*found, ones.half().add_(1), whole.clone().mul_(3).unsqueeze_(0)]

    kept = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
            torch.set_default_dtype(dtype)
            for own, expected in zip(results("sim:0"), results("cpu"), strict=True):
                assert (own.dtype, own.stride()) == (expected.dtype, expected.stride())
                assert torch.equal(own.cpu(), expected)
    finally:
        torch.set_default_dtype(kept)
