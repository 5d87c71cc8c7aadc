"""The host time of a layer is measured without products, and leaves the model intact."""

import torch

from hfq.kernels.registry import KERNELS
from hfq.runtime.host_time import host_seconds_per_layer
from tests.support.models import load, logits

TOKENS = torch.arange(4)[None]


def test_the_time_of_a_layer_is_measured_and_the_model_computes_as_before(native):
    model = load()
    expected = logits(model, TOKENS)
    assert 0 < host_seconds_per_layer(model) < 1e-3
    assert torch.equal(logits(model, TOKENS), expected)


def test_no_product_runs_while_it_is_measured(native, monkeypatch):
    model, multiplied, multiply = load(), [], native.hfq_linear
    monkeypatch.setattr(native, "hfq_linear", lambda given: multiplied.append(given) or multiply(given))
    host_seconds_per_layer(model)
    rows = {int.from_bytes(given[24:32], "little") for given in multiplied}
    assert rows == {0}


def test_other_placements_and_kernels_have_no_such_time():
    assert host_seconds_per_layer(load(device_map={"": "disk"})) is None
    model = load(kernel="reference")
    assert model.model.layers[0].mlp.down_proj.kernel is KERNELS["reference"]
    assert host_seconds_per_layer(model) is None
