"""`torch.compile` and `torch.export` hold quantized layers, compute around offloaded ones, and harm no model."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig

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
def test_a_model_in_memory_is_one_graph_for_all_lengths(native):
    model = load()
    torch._dynamo.reset()
    counters.clear()
    graph = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for length in range(8, 28):
        tokens = torch.arange(length)[None]
        with torch.no_grad():
            assert torch.equal(graph(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def greedy(model) -> list[int]:
    """Returns the 20 tokens that follow."""
    config = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.generate(TOKENS, config)[0, TOKENS.shape[1] :].tolist()


def test_generate_compiles_with_a_static_cache(native):
    model = load()
    torch._dynamo.reset()
    counters.clear()
    expected = greedy(model)
    compiling = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    compiling._compile_all_devices = True  # as on an accelerator
    config = GenerationConfig(
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation="static",
        compile_config=compiling,
    )
    assert model.generate(TOKENS, config)[0, TOKENS.shape[1] :].tolist() == expected
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_generate_does_not_compile_offloaded_models():
    assert load().hf_quantizer.is_compileable
    assert not load(device_map=MAPS["layers on disk"]).hf_quantizer.is_compileable


@pytest.mark.slow
def test_an_exported_model_computes_the_same_and_can_be_saved(tmp_path, native):
    model = load()
    with torch.no_grad():
        exported = torch.export.export(model, (), {"input_ids": TOKENS, "use_cache": False})
    torch.export.save(exported, tmp_path / "model.pt2")
    for program in (exported, torch.export.load(tmp_path / "model.pt2")):
        found = program.module()(input_ids=TOKENS, use_cache=False).logits
        assert torch.equal(found, logits(model, TOKENS))


def test_a_full_graph_of_an_offloaded_model_is_an_error_that_names_a_unit():
    model = load(device_map=MAPS["layers on disk"])
    expected = logits(model, TOKENS)
    graph = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"model\.layers\.0 is offloaded.*Fix: Leave"):
        logits(graph, TOKENS)
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
