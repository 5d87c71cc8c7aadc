"""Tests of models whose code reads, moves, or initializes the weights of its layers."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.llama.modeling_llama import LlamaMLP

from hfq import HfqConfig, PlacementError
from hfq.checkpoint import write_safetensors
from tests.support import tiny_models
from tests.support.code_models import CASES, LLAMA, TOKENS, write


def output(model, inputs) -> torch.Tensor:
    with torch.no_grad():
        found = model(**inputs)
    return found.logits if hasattr(found, "logits") else found.last_hidden_state


def load(auto, path, device_map):
    config = HfqConfig(quantize_activations=False)
    return auto.from_pretrained(
        path, quantization_config=config, dtype=torch.float32, device_map=device_map
    ).eval()


@pytest.mark.parametrize("case", CASES)
def test_it_runs_in_every_placement_and_is_saved_as_it_was(case, tmp_path):
    auto, kind, options, packed, inputs = CASES[case]
    plain, path = write(tmp_path / "source", auto, kind, options, packed)
    models = [load(auto, path, device_map) for device_map in ({"": "cpu"}, {"": "disk"})]
    found = [output(model, inputs) for model in models]
    expected = output(plain, inputs)
    # float32 sums over panels have another order than sums over the whole matrix
    assert (found[0] - expected).norm() <= 1e-5 * expected.norm()
    assert torch.equal(found[0], found[1])
    assert len(models[0].hf_quantizer.loading.quantized) >= 8
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
    with pytest.raises(PlacementError, match=r"(?s)model.embed_tokens received an input on meta.*Fix:"):
        model.get_input_embeddings()(TOKENS["input_ids"].to("meta"))


def test_attention_that_takes_its_childs_weight_is_one_block(tmp_path):
    """`nn.MultiheadAttention` never calls its `out_proj`.

    Aria's projector has one outside of every layer.
    """
    text = {
        "model_type": "aria_text",
        "vocab_size": 80,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    text |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "moe_num_experts": 2,
        "moe_topk": 1,
        "pad_token_id": 0,
    }
    vision = {
        "model_type": "idefics3_vision",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    vision |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    sizes = {"projector_patch_to_query_dict": {16: 8}, "image_token_index": 70}
    config = AutoConfig.for_model(
        "aria", text_config={**text, "moe_num_shared_experts": 1}, vision_config=vision, **sizes
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    inputs = {"input_ids": torch.tensor([[4, 5, *[70] * 8, 6]]), "pixel_values": torch.randn(1, 3, 32, 32)}
    inputs["pixel_mask"] = torch.ones(1, 32, 32, dtype=torch.bool)
    projection = "model.multi_modal_projector.cross_attn.multihead_attn.out_proj"
    expected, *found = (
        output(load(AutoModelForImageTextToText, tmp_path, device_map), inputs)
        for device_map in ({"": "cpu"}, {"": "cpu", projection: "disk"}, {"": "disk"})
    )
    assert expected.isfinite().all()
    assert all(torch.equal(logits, expected) for logits in found)


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}])
def test_a_layer_that_the_model_holds_in_a_list_of_its_own_is_replaced_there_too(
    device_map, tmp_path, monkeypatch
):
    """Mask2Former's prediction layers do so. The replaced layer would compute with meta weights."""
    _, path = write(tmp_path, AutoModelForCausalLM, "llama", LLAMA, r"_proj$")
    expected = output(load(AutoModelForCausalLM, path, device_map), TOKENS)
    made = LlamaMLP.__init__

    def init(self, config):
        made(self, config)
        self.held = [self.down_proj]

    monkeypatch.setattr(LlamaMLP, "__init__", init)
    monkeypatch.setattr(
        LlamaMLP, "forward", lambda self, x: self.held[0](self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    )
    assert torch.equal(output(load(AutoModelForCausalLM, path, device_map), TOKENS), expected)


def test_a_head_in_the_midst_of_the_names_is_left_out_by_the_class_without(tmp_path):
    """LLaVA's files have `language_model.lm_head`, for which its base model has no parameter."""
    text = {
        "model_type": "llama",
        "vocab_size": 80,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8, "projection_dim": 32}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llava", text_config=text, vision_config=vision, image_token_index=70)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(tmp_path)
    assert "language_model.lm_head.weight" in tiny_models.stored_tensors(tmp_path)
    base = load(AutoModel, tmp_path, {"": "cpu"})
    with torch.no_grad():
        expected = whole.model(**TOKENS).last_hidden_state
        assert torch.allclose(
            base(**TOKENS).last_hidden_state, expected, atol=1e-6
        )  # torch's products depend on the alignment


def test_a_tied_model_that_stores_its_head_alone_runs_from_disk(tmp_path):
    options = LLAMA | {"tie_word_embeddings": True}
    plain, path = write(tmp_path, AutoModelForCausalLM, "llama", options, r"_proj$")
    stored = tiny_models.stored_tensors(path)
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    write_safetensors(
        path / "model.safetensors", {n: tiny_models.as_stored(t) for n, t in stored.items()}, {"format": "pt"}
    )
    expected = output(plain, TOKENS)
    for device_map in ({"": "cpu"}, {"": "disk"}):
        found = output(load(AutoModelForCausalLM, path, device_map), TOKENS)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
