"""Tests that a forward pass that was interrupted in any layer is noticed."""

import copy
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import hfq
from hfq.errors import SetupError
from tests.support import moe_models
from tests.support.models import load

PROMPT = torch.arange(3, 20)[None]
SIZES = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 96, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def gpt_oss(folder, layer_types):
    """Returns a model with a sliding window of six tokens in one of two layers."""
    scheme = next(each for each in moe_models.SCHEMES if each.id == "gpt-oss blocks")
    path = moe_models.write(scheme).save(folder / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"sliding_window": 6, "layer_types": list(layer_types)})
    )
    return load(path)


def from_config(folder, family, **options):
    torch.manual_seed(2)
    config = AutoConfig.for_model(family, **SIZES, **HEADS, **options)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return load(folder / "model")


MODELS = {
    "sliding, full": lambda folder: gpt_oss(folder, ("sliding_attention", "full_attention")),
    "full, sliding": lambda folder: gpt_oss(folder, ("full_attention", "sliding_attention")),
    "recurrent, full": lambda folder: from_config(folder, "qwen3_5_text", **LINEAR, num_hidden_layers=4),
    "sliding": lambda folder: from_config(folder, "mistral", sliding_window=6, num_hidden_layers=3),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    return MODELS[request.param](tmp_path_factory.mktemp("whole_pass"))


def interrupt(*_):
    raise KeyboardInterrupt


def interrupted_pass(model, cache, layer, is_by_position=False):
    handle = model.model.layers[layer].register_forward_pre_hook(interrupt)
    try:
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            if is_by_position:
                model(PROMPT[:, :3], None, None, cache)
            else:
                model(PROMPT[:, :3], past_key_values=cache)
    finally:
        handle.remove()


def logits(model, cache, tokens=PROMPT):
    with torch.no_grad():
        return model(tokens, past_key_values=cache).logits


@pytest.mark.parametrize("place", ["memory", "files"])
def test_a_pass_that_did_not_end_is_named_in_whichever_layer_it_was(model, place, tmp_path):
    plain = DynamicCache(config=model.config)
    expected = [logits(model, plain) for _ in range(2)]
    for layer in range(len(model.model.layers)):
        folder = tmp_path / str(layer) if place == "files" else None
        with hfq.OffloadedCache(model, folder) as cache:
            assert torch.equal(logits(model, cache), expected[0])
            interrupted_pass(model, cache, layer)
            if layer == 0:  # nothing was stored
                assert torch.equal(logits(model, cache), expected[1])
                continue
            for _ in range(2):
                with pytest.raises(SetupError, match="did not end"):
                    logits(model, cache)
            if folder is not None:
                with pytest.raises(SetupError, match="did not end"):
                    cache.save()
            cache.reset()
            assert torch.equal(logits(model, cache), expected[0])


def test_a_cache_that_is_passed_by_position_is_known(model):
    with hfq.OffloadedCache(model) as cache:
        logits(model, cache)
        interrupted_pass(model, cache, len(model.model.layers) - 1, is_by_position=True)
        with pytest.raises(SetupError, match="did not end"):
            logits(model, cache)


def test_a_pass_that_did_not_end_is_never_saved(model, tmp_path):
    with hfq.OffloadedCache(model, tmp_path) as cache:
        logits(model, cache)
        cache.save()
        interrupted_pass(model, cache, len(model.model.layers) - 1)
        with pytest.raises(SetupError, match="did not end"):
            cache.save()
    with hfq.OffloadedCache(model, tmp_path) as cache:  # the fix
        plain = DynamicCache(config=model.config)
        logits(model, plain)
        assert torch.equal(logits(model, cache), logits(model, plain))


def test_a_crop_that_fails_in_a_later_layer_is_named(tmp_path):
    model = MODELS["full, sliding"](tmp_path)
    with hfq.OffloadedCache(model, tmp_path / "cache") as cache:
        logits(model, cache)
        cache.save()
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-5)
        with pytest.raises(SetupError, match="did not end"):
            logits(model, cache)
    with hfq.OffloadedCache(model, tmp_path / "cache") as cache:
        assert cache.get_seq_length() == 0  # saved rows were about to be overwritten


def test_the_model_keeps_no_cache_and_is_copied_without_it(model):
    hooks = len(model._forward_pre_hooks), len(model._forward_hooks)
    cache = hfq.OffloadedCache(model)
    logits(model, cache)
    assert torch.equal(logits(copy.deepcopy(model), None), logits(model, None))
    del cache
    assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == hooks
