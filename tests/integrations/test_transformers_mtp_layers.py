"""Tests that layers which predict further tokens are read quantized, and draft what plain ones draft."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import WeightRenaming, log_conversion_errors
from transformers.generation.candidate_generator import MTPCandidateGenerator

import hfq
from hfq.errors import FormatError, SetupError
from hfq.modules.experts import QuantizedExperts
from hfq.modules.linear import QuantizedLinear
from tests.support import models, moe_models, mtp_models, tiny_models

PROMPT = torch.tensor([[1, 5, 9, 60, 33, 2, 7, 5, 9, 60]])
TOKENS = 12
PLACEMENTS = {
    "cpu": {"": "cpu"},
    "layer on disk": {"": "cpu", "model.layers.1": "disk"},
    "disk": {"": "disk"},
}


@pytest.fixture(scope="module", params=[("deepseek_v3", 1), ("glm4_moe", 1), ("deepseek_v3", 2)], ids=str)
def paths(request, tmp_path_factory):
    return mtp_models.write(tmp_path_factory.mktemp("mtp"), *request.param)


@pytest.fixture(scope="module")
def half_float(tmp_path_factory):
    return mtp_models.write(tmp_path_factory.mktemp("float"), "glm4_moe", is_float=True)


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory):
    return mtp_models.write(tmp_path_factory.mktemp("agreeing"), "glm4_moe", agrees=True)[0]


@pytest.fixture
def drafts(monkeypatch):
    """The logits of all drafts, in the order in which they are made."""
    made, get_candidates = [], MTPCandidateGenerator.get_candidates

    def recorded(self, *arguments, **kwargs):
        found = get_candidates(self, *arguments, **kwargs)
        if found[1] is not None:
            made.append(found[1])
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    return made


def load(path, place="cpu"):
    return models.load(path, PLACEMENTS[place], kernel="reference")


def plain(path):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    # transformers knows the further layers of each class by the number of layers of one published checkpoint
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{mtp_models.LAYERS + i}\." for i in (0, 1)]
    return model


def generate(model, **options):
    return model.generate(PROMPT, max_new_tokens=TOKENS, do_sample=False, **options)


@pytest.mark.parametrize("place", PLACEMENTS)
def test_drafts_are_those_of_plain_float_weights(paths, place, drafts):
    tokens = generate(plain(paths[1]), use_mtp=True)
    expected, drafts[:] = [*drafts], []
    model = load(paths[0], place)
    assert torch.equal(generate(model, use_mtp=True), tokens)
    assert torch.equal(generate(model), tokens)
    assert len(drafts) == len(expected) > 2
    for one, other in zip(drafts, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_layers_may_be_unquantized_in_a_quantized_checkpoint(half_float, drafts):
    tokens = generate(plain(half_float[1]), use_mtp=True)
    expected, drafts[:] = [*drafts], []
    model = load(half_float[0], "layer on disk")
    assert torch.equal(generate(model, use_mtp=True), tokens)
    torch.testing.assert_close(drafts, expected, rtol=1e-4, atol=1e-5)
    block = model.hf_quantizer.loading.mtp_model.layers[0].mtp_block
    assert type(block.self_attn.o_proj) is nn.Linear


def rms(values, weight, eps):
    return weight * values / (values.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def further_layer(main, stored):
    """Returns a decoder layer with the weights of the first layer that predicts further tokens."""
    prefix = f"model.layers.{mtp_models.LAYERS}."
    state = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    for fused, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        stacked = [
            torch.cat([state[f"mlp.experts.{expert}.{part}.weight"] for part in parts])
            for expert in range(moe_models.EXPERTS)
        ]
        state[f"mlp.experts.{fused}"] = torch.stack(stacked)
    layer = type(main.model.layers[-1])(main.config, 1)
    layer.load_state_dict({name: state[name] for name in layer.state_dict()})
    return layer, state


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_draft_is_what_the_definition_says(family, tmp_path, drafts):
    """DeepSeek-V3's report (2024), section 2.2, as its inference code orders the two halves."""
    packed, path = mtp_models.write(tmp_path, family)
    tokens = generate(load(packed), use_mtp=True)[:, : PROMPT.shape[1] + 1]
    main = plain(path)
    layer, state = further_layer(main, tiny_models.stored_tensors(path))
    with torch.no_grad():
        hidden = main.model(PROMPT).last_hidden_state
        halves = main.model.embed_tokens(tokens[:, 1:]), hidden
        eps = main.config.rms_norm_eps
        normed = [
            rms(half, state[f"{name}.weight"], eps)
            for half, name in zip(halves, ("enorm", "hnorm"), strict=True)
        ]
        positions = torch.arange(1, tokens.shape[1])[None]
        mask = torch.full((PROMPT.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        found = layer(
            torch.cat(normed, dim=-1) @ state["eh_proj.weight"].T,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=main.model.rotary_emb(hidden, positions),
        )
        logits = main.lm_head(rms(found, state["shared_head.norm.weight"], eps))
    torch.testing.assert_close(drafts[0][:, 0], logits[:, -1], rtol=1e-4, atol=1e-5)


def test_layers_stay_quantized_and_are_loaded_once(paths):
    model = load(paths[0], "disk")
    generate(model, use_mtp=True)
    further = model.hf_quantizer.loading.mtp_model
    layer = further.layers[0]
    assert isinstance(layer.mtp_block.self_attn.o_proj, QuantizedLinear)
    assert isinstance(layer.mtp_block.mlp.experts, QuantizedExperts)
    assert type(layer.eh_proj) is nn.Linear
    assert layer.eh_proj.weight.device.type == "cpu"
    assert further.shared_head is model.lm_head
    generate(model, use_mtp=True)
    assert model.hf_quantizer.loading.mtp_model is further


def test_shared_modules_of_the_main_model_stay_trainable(paths):
    model = load(paths[0]).train()
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    generate(model, use_mtp=True)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before
    assert model.lm_head.weight.requires_grad
    assert all(module.training for module in model.modules())


def test_an_offloaded_kv_cache_is_cropped(paths):
    model = load(paths[0])
    with hfq.OffloadedCache(model) as cache:
        assert torch.equal(generate(model, use_mtp=True, past_key_values=cache), generate(model))


def test_accepted_drafts_halve_passes_and_bytes(agreeing):
    model = load(agreeing, "layer on disk")
    counts = []
    for options in ({}, {"use_mtp": True}):
        before = hfq.report(model).offload
        tokens = generate(model, **options)
        after = hfq.report(model).offload
        counts.append((after.passes - before.passes, after.unit_forwards - before.unit_forwards))
    assert tokens.shape[1] == PROMPT.shape[1] + TOKENS
    assert counts == [(TOKENS, TOKENS), (TOKENS // 2 + 1, TOKENS // 2 + 1)]


def test_a_checkpoint_without_such_layers_is_an_error():
    model = models.load(models.GPTQ)
    model.config.num_mtp_layers = 1
    with pytest.raises(FormatError, match=r"model\.layers\.4\.eh_proj"):
        generate(model, use_mtp=True)


@pytest.mark.parametrize("fault", ["raises", "another shape"])
def test_what_transformers_does_not_load_is_an_error(half_float, monkeypatch, fault):
    model, convert = load(half_float[0]), WeightRenaming.convert

    def spoiled(self, layer_name, *arguments, loading_info, **kwargs):
        found = convert(self, layer_name, *arguments, loading_info=loading_info, **kwargs)
        if not layer_name.endswith("0.eh_proj.weight"):
            return found
        with log_conversion_errors(layer_name, loading_info):
            if fault == "raises":
                raise RuntimeError("no memory for a copy")
        return {name: [tensor[:, :-1]] for name, (tensor,) in found.items()}

    monkeypatch.setattr(WeightRenaming, "convert", spoiled)
    with pytest.raises(FormatError, match="MTP layers cannot be loaded") as caught:
        generate(model, use_mtp=True)
    words = "no memory for a copy" if fault == "raises" else "expected [64, 128], found [64, 127]"
    (problem,) = caught.value.problems
    assert "layers.0.eh_proj.weight: " in problem
    assert words in problem
    assert model.hf_quantizer.loading.mtp_model is None


def test_further_layers_share_a_rounded_head(paths):
    model = models.load(paths[0], {"": "cpu"}, quantize_output_head="fp8")
    expected = generate(model)
    assert torch.equal(generate(model, use_mtp=True), expected)
    (layer, *_) = model.hf_quantizer.loading.mtp_model.layers
    heads = [
        each for name, each in layer.named_modules() if isinstance(each, QuantizedLinear) and "head" in name
    ]
    assert all(each is model.lm_head for each in heads)


def test_quantize_on_load_is_an_error(paths, tmp_path):
    model = models.load(paths[1], {"": "cpu"}, quantize_weights="fp8")
    with pytest.raises(SetupError, match="device map alone"):
        generate(model, use_mtp=True)


def test_saved_checkpoints_keep_the_layers(paths, tmp_path):
    model = load(paths[0])
    generate(model, use_mtp=True)
    model.save_pretrained(tmp_path)
    assert tiny_models.digests(tmp_path) == tiny_models.digests(paths[0])
