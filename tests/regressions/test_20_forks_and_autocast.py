"""Tests that a load in a forked child makes torch's pool first, and that layers follow autocast."""

import threading

import pytest
import torch

from hfq.integrations.transformers import patches
from hfq.modules.linear import QuantizedLinear
from tests.support import programs
from tests.support.models import load, logits

PLACEMENTS = (None, {"": "disk"}, {"": "cpu", "model.layers": "disk"})
TOKENS = torch.arange(8)[None]


def test_the_first_load_in_another_process_makes_the_thread_pool_in_its_own_thread(monkeypatch):
    threads = []
    monkeypatch.setattr(patches, "_pool_process", -1)
    monkeypatch.setattr(
        torch, "set_num_threads", lambda count: threads.append((threading.current_thread(), count))
    )
    load()
    load()
    assert threads == [(threading.current_thread(), torch.get_num_threads())]


@pytest.mark.slow
def test_every_child_of_a_fork_loads():
    done = programs.run("load_in_children", 8)
    assert done.stdout.splitlines() == ["0"] * 8, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_a_model_computes_under_autocast_as_one_in_that_dtype(dtype, autocast):
    found = []
    for placement in PLACEMENTS:
        model = load(device_map=placement, dtype=dtype)
        with torch.autocast("cpu", dtype=autocast):
            found.append(logits(model, TOKENS))
    assert all(each.dtype == autocast for each in found)
    assert all(torch.equal(each, found[0]) for each in found)


def test_a_layer_computes_in_the_dtype_of_autocast_as_a_linear_layer_does():
    model = load(dtype=torch.float32)
    layer = next(module for module in model.modules() if isinstance(module, QuantizedLinear))
    values = torch.randn(3, layer.in_features, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(values)
        result.float().sum().backward()
    assert torch.equal(result, layer(values.bfloat16()))
    assert values.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert layer(values).dtype == torch.float32
