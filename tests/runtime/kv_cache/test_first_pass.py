"""Tests that drafts continue a filled KV cache with greedy tokens, or are refused by name."""

import gc

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import hfq
from hfq.errors import SetupError
from hfq.runtime.kv_cache.first_pass import FirstPass
from tests.support import mtp_models
from tests.support.models import load

PROMPT = torch.tensor([[5, 6, 7, 8] * 5])
DRAFTS = ["prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit"]


@pytest.fixture(scope="module")
def model():
    return load()


def generate(model, cache, tokens, count=12, **options):
    return model.generate(tokens, past_key_values=cache, max_new_tokens=count, do_sample=False, **options)


def drafts_of(kind):
    return {kind: load() if kind == "assistant_model" else 2}


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts_continue_a_filled_cache_with_greedy_tokens(model, kind, tmp_path):
    expected = generate(model, DynamicCache(config=model.config), PROMPT, 24)
    with hfq.OffloadedCache(model, tmp_path) as cache:
        cache.save(generate(model, cache, PROMPT))
    with hfq.OffloadedCache(model, tmp_path) as cache:
        assert torch.equal(generate(model, cache, cache.tokens, **drafts_of(kind)), expected)
        assert cache.get_seq_length() == expected.shape[1] - 1


def test_cached_tokens_are_not_computed_again(model):
    lengths, hooks = [], len(model._forward_pre_hooks)
    handle = model.model.embed_tokens.register_forward_pre_hook(
        lambda _, args: lengths.append(args[0].shape[1])
    )
    with hfq.OffloadedCache(model) as cache:
        tokens = generate(model, cache, PROMPT)
        more = torch.cat([tokens, tokens], 1)
        lengths.clear()
        generate(model, cache, more, prompt_lookup_num_tokens=2)
    handle.remove()
    assert lengths[0] == more.shape[1] - PROMPT.shape[1] - 11 + 2  # 11 of 12 new tokens are cached; 2 drafts
    assert max(lengths[1:]) == 3
    assert len(model._forward_pre_hooks) == hooks


@pytest.mark.parametrize("family", ["gpt2", "bloom", "gemma3_text"])
def test_models_with_other_inputs_and_layers(family, tmp_path):
    """GPT-2 has learned positions, Bloom takes none, and Gemma has layers that are not offloaded."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 96}
    heads = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4}
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    own = {**heads, **layers} if family == "gemma3_text" else {}
    torch.manual_seed(2)
    config = AutoConfig.for_model(family, **sizes, **own, eos_token_id=None, bos_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model")
    expected = generate(model, DynamicCache(config=model.config), PROMPT, 24)
    with hfq.OffloadedCache(model) as cache:
        tokens = generate(model, cache, PROMPT)
        assert torch.equal(generate(model, cache, tokens, prompt_lookup_num_tokens=3), expected)
        assert cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("count", [1, 40])
def test_a_call_of_the_model_after_drafting_was_interrupted_gets_its_tokens(model, count, is_named):
    assistant, more = load(), torch.arange(count)[None] + 9
    assistant.register_forward_pre_hook(interrupt)
    plain = DynamicCache(config=model.config)
    with hfq.OffloadedCache(model) as cache, torch.no_grad():
        tokens = generate(model, cache, PROMPT)
        with pytest.raises(KeyboardInterrupt):
            generate(model, cache, torch.cat([tokens, tokens], 1), assistant_model=assistant)
        generate(model, plain, PROMPT)
        arguments = ((), {"input_ids": more}) if is_named else ((more,), {})
        found, expected = (
            model(*arguments[0], **arguments[1], past_key_values=each).logits for each in (cache, plain)
        )
    assert torch.equal(found, expected)


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_states_of_cached_tokens_are_refused(model, name):
    with hfq.OffloadedCache(model) as cache:
        tokens = generate(model, cache, PROMPT)
        options = {"prompt_lookup_num_tokens": 2, "return_dict_in_generate": True, name: True}
        with pytest.raises(SetupError, match="states of all tokens were requested"):
            generate(model, cache, tokens, **options)
        del options[name]  # the fix
        assert generate(model, cache, tokens, **options).sequences.shape[1] == tokens.shape[1] + 12


def test_a_model_with_an_adapter():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(load(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = adapted.generate(input_ids=PROMPT, **options | {"max_new_tokens": 24})
    with hfq.OffloadedCache(adapted) as cache:
        options["past_key_values"] = cache
        tokens = adapted.generate(input_ids=PROMPT, **options)
        found = adapted.generate(input_ids=tokens, prompt_lookup_num_tokens=2, **options)
    assert torch.equal(found, expected)


def test_layers_that_predict_further_tokens_need_an_empty_cache(tmp_path):
    quantized, _ = mtp_models.write(tmp_path, "glm4_moe")
    model = load(quantized, "cpu")
    prompt = torch.arange(3, 20)[None]
    with hfq.OffloadedCache(model) as cache:
        expected = generate(model, cache, prompt, 12)
        cache.reset()
        assert torch.equal(generate(model, cache, prompt, 12, use_mtp=True), expected)
        with pytest.raises(SetupError, match="states of all tokens"):
            generate(model, cache, expected, 12, use_mtp=True)
        cache.reset()
        assert torch.equal(generate(model, cache, prompt, 12, use_mtp=True), expected)


@pytest.mark.parametrize("is_kept", [True, False])
def test_another_model_of_the_checkpoint_is_refused(model, is_kept):
    own = load()
    with hfq.OffloadedCache(own) as cache:
        if not is_kept:
            del own
            gc.collect()
        tokens = generate(model, cache, PROMPT)
        length = cache.get_seq_length()
        with pytest.raises(SetupError, match="Another model than that of this KV cache") as caught:
            generate(model, cache, tokens, prompt_lookup_num_tokens=2)
        assert caught.value.found == f"{tokens.shape[1]} tokens, of which {length} are cached"
        assert cache.get_seq_length() == length
        cache.reset()  # the fix
        found = generate(model, cache, tokens, prompt_lookup_num_tokens=2)
        assert torch.equal(found, generate(model, DynamicCache(config=model.config), tokens))


def test_a_prompt_that_the_cache_holds_already_is_refused(model):
    with hfq.OffloadedCache(model) as cache:
        generate(model, cache, PROMPT)
        with pytest.raises(SetupError, match="no token is left to compute") as caught:
            generate(model, cache, PROMPT, prompt_lookup_num_tokens=2)
        assert caught.value.found == "20 tokens"
        assert "more than 31 token ids" in str(caught.value)


def test_new_tokens_alone_need_a_whole_mask():
    """transformers 5.17 cuts the mask to the tokens that `generate` is given."""

    class Model(torch.nn.Module):
        def forward(self, **inputs):
            return inputs

    model = Model()
    first = FirstPass(model)
    cache = DynamicCache()
    cache.update(*torch.zeros(2, 1, 1, 5, 4), 0)
    inputs = {
        "input_ids": torch.zeros(1, 2),
        "position_ids": torch.tensor([[5, 6]]),
        "past_key_values": cache,
    }
    first.expect(cache)
    assert model(**inputs, attention_mask=torch.ones(1, 7))["input_ids"].shape == (1, 2)
    first.expect(cache)
    with pytest.raises(SetupError, match="cuts the attention mask") as caught:
        model(**inputs, attention_mask=torch.ones(1, 2))
    assert (caught.value.expected, caught.value.found) == ("a mask of 7 tokens", "2 tokens")
    assert not model._forward_pre_hooks
