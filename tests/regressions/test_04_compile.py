"""`torch.compile` and `torch.export` hold quantized layers, compute around offloaded ones, and harm no model."""

import json
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig

from hfq.formats.mlx.affine import Mlx
from tests.support import gguf_models, lora_runs, moe_models, tiny_models
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


def write_moe(folder):
    scheme = next(scheme for scheme in moe_models.SCHEMES if scheme.id == "qwen3 by expert, pack-quantized")
    return moe_models.write(scheme).save(folder)


def write_llama_4(folder):
    scheme = next(scheme for scheme in moe_models.SCHEMES if scheme.model == "llama4")
    return moe_models.write(scheme).save(folder)


def write_router(folder):
    scheme = moe_models.Scheme("mixtral", "mixtral", moe_models.FP8, moe_models.FP8_CONFIG)
    return moe_models.write(scheme, lambda name: name.endswith(("_proj", "mlp.gate"))).save(folder)


def write_gguf(folder):
    """Writes a model whose embedding and head are quantized, too."""
    return gguf_models.write_random_llama(folder, "Q4_K")


def write_tied(folder):
    """Writes a model whose head is its quantized embedding."""
    tensors = tiny_models.model_tensors(Mlx())
    embedding = Mlx().quantize(tensors.pop("model.embed_tokens.weight").float())
    del tensors["lm_head.weight"]
    tensors |= {f"model.embed_tokens.{local}": tensor for local, tensor in embedding.items()}
    quantization = {"quant_method": "mlx", "group_size": 64, "bits": 4, "mode": "affine"}
    path = tiny_models.write_model(folder, tensors, quantization)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_moe, write_llama_4, write_router, write_gguf, write_tied])
def test_other_models_are_one_graph(write, tmp_path):
    model = load(write(tmp_path / "model"))
    torch._dynamo.reset()
    graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(logits(graph, TOKENS), logits(model, TOKENS))


@pytest.mark.slow
def test_adapters_train_the_same_on_a_compiled_model():
    expected = lora_runs.train(lora_runs.adapt(lora_runs.load()))
    torch._dynamo.reset()
    adapted = lora_runs.adapt(lora_runs.load())
    base = adapted.base_model.model
    base.forward = torch.compile(base.forward, backend="aot_eager", fullgraph=True)
    assert lora_runs.train(adapted).is_equal(expected)


@pytest.mark.slow
def test_the_default_backend_compiles_the_rest(native):
    layer, x = load().model.layers[0].mlp, torch.ones(1, 3, 128)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x))


@pytest.mark.slow
def test_an_exported_model_runs_in_a_process_without_the_model(tmp_path):
    layer, x = load(kernel="torch").model.layers[0].self_attn.q_proj, torch.ones(2, 128)
    exported = torch.export.export(layer, (x,))
    torch.export.save(exported, tmp_path / "layer.pt2")
    lines = (
        "import sys, torch, hfq.modules.graph_ops",
        "program = torch.export.load(sys.argv[1] + '/layer.pt2')",
        "torch.save(program.module()(torch.ones(2, 128)), sys.argv[1] + '/outputs.pt')",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines), tmp_path], check=True, timeout=300)
    assert torch.equal(torch.load(tmp_path / "outputs.pt"), layer(x))


EXPERTS = """
import sys, torch, hfq
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=hfq.HfqConfig())
inputs = torch.ones(2, model.config.hidden_size), torch.tensor([[0], [1]]), torch.ones(2, 1)
"""


@pytest.mark.slow
def test_an_exported_model_computes_with_no_experts_of_another_process(tmp_path):
    folder, program = write_moe(tmp_path / "model"), tmp_path / "experts.pt2"
    export = "torch.export.save(torch.export.export(model.model.layers[0].mlp.experts, inputs), sys.argv[2])"
    run = "torch.export.load(sys.argv[2]).module()(*inputs)"
    done = [
        subprocess.run(
            [sys.executable, "-c", EXPERTS + code, folder, program],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        for code in (export, run)
    ]
    assert done[0].returncode == 0, done[0].stderr
    assert "SetupError: This graph computes with experts that are not in memory." in done[1].stderr
