"""Models whose own code reads, moves or initialises the weights of its layers: what hfq gives them, and what it refuses."""

import pytest
import tiny_models
import torch
from coded_models import CASES, LLAMA, TOKENS, write
from transformers import AutoModelForCausalLM

from hfq import HfqConfig, PlacementError
from hfq.checkpoint import write_safetensors


def output(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        found = model(**inputs)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def load(auto, path, device_map):
    config = HfqConfig(activations="none")
    return auto.from_pretrained(path, quantization_config=config, dtype=torch.float32, device_map=device_map).eval()


@pytest.mark.parametrize("case", CASES)
def test_it_runs_in_every_placement_and_is_saved_as_it_was(case, tmp_path):
    auto, kind, options, packed, inputs = CASES[case]
    plain, path = write(tmp_path / "source", auto, kind, options, packed)
    models = [load(auto, path, device_map) for device_map in ({"": "cpu"}, {"": "disk"})]
    found = [output(model, inputs) for model in models]
    expected = output(plain, inputs)
    # float32 sums over panels in another order than over the whole
    assert (found[0] - expected).norm() <= 1e-5 * expected.norm()
    assert torch.equal(found[0], found[1])
    assert len(models[0].hf_quantizer.loading.packed) >= 8
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path / str(number))
        assert tiny_models.digests(tmp_path / str(number)) == tiny_models.digests(path)


def test_a_bias_that_is_read_is_a_copy_in_the_models_dtype(tmp_path):
    auto, kind, options, packed, _ = CASES["siglip, whose initialisation zeroes biases"]
    _, path = write(tmp_path, auto, kind, options, packed)
    model = load(auto, path, {"": "disk"}).to(torch.bfloat16)
    layer = model.get_submodule("encoder.layers.0.self_attn.q_proj")
    assert layer.bias.dtype == layer.weight.dtype == torch.bfloat16
    layer.bias.zero_()
    assert layer.bias.abs().sum() > 0


def test_an_input_that_was_moved_to_meta_is_refused(tmp_path):
    options = LLAMA
    _, path = write(tmp_path, AutoModelForCausalLM, "llama", options, r"_proj$")
    model = load(AutoModelForCausalLM, path, {"": "cpu", "model.embed_tokens": "disk"})
    with pytest.raises(PlacementError, match=r"(?s)model.embed_tokens was given an input on meta.*Fix:"):
        model.get_input_embeddings()(TOKENS["input_ids"].to("meta"))


def test_a_tied_model_that_stores_its_head_alone_runs_from_disk(tmp_path):
    options = LLAMA | {"tie_word_embeddings": True}
    plain, path = write(tmp_path, AutoModelForCausalLM, "llama", options, r"_proj$")
    stored = tiny_models.stored_tensors(path)
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    write_safetensors(path / "model.safetensors", {n: tiny_models.as_stored(t) for n, t in stored.items()}, {"format": "pt"})
    expected = output(plain, TOKENS)
    for device_map in ({"": "cpu"}, {"": "disk"}):
        found = output(load(AutoModelForCausalLM, path, device_map), TOKENS)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
