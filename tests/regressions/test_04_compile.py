"""Tests that `torch.compile` computes around quantized and offloaded weights, and leaves the model intact."""

import pytest
import torch

from tests.support.models import load, logits

TOKENS = torch.arange(8)[None]
MAPS = {
    "in memory": None,
    "layers on disk": {"": "cpu", "model.layers": "disk"},
    "all on disk": {"": "disk"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["auto", "torch", "reference"])
@pytest.mark.parametrize("placement", MAPS)
def test_a_compiled_model_computes_the_same(placement, kernel, native):
    model = load(device_map=MAPS[placement], kernel=kernel)
    expected = logits(model, TOKENS)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(logits(compiled, TOKENS), expected)
    assert torch.equal(logits(compiled, TOKENS), expected)
    assert torch.equal(logits(model, TOKENS), expected)


@pytest.mark.slow
@pytest.mark.parametrize("placement", MAPS)
def test_a_full_graph_is_an_error_that_names_hfq(placement, native):
    model = load(device_map=MAPS[placement])
    expected = logits(model, TOKENS)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"hfq's kernels.*Fix: Leave fullgraph=True out\."):
        logits(compiled, TOKENS)
    assert torch.equal(logits(model, TOKENS), expected)


@pytest.mark.slow
@pytest.mark.parametrize("placement", MAPS)
def test_a_compiled_model_has_the_same_gradients(placement, native):
    model = load(device_map=MAPS[placement])
    inputs = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    compiled = torch.compile(model, backend="aot_eager")
    gradients = []
    for called in (model, compiled):
        called(inputs_embeds=inputs).logits.sum().backward()
        gradients.append(inputs.grad)
        inputs.grad = None
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-2)  # torch decomposes norms


def test_one_offloaded_layer_is_compiled_without_harm():
    layer = load(device_map=MAPS["all on disk"]).model.layers[0].input_layernorm
    x = torch.randn(1, 128)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(torch.compile(layer, backend="eager")(x), expected)
        assert torch.equal(layer(x), expected)
