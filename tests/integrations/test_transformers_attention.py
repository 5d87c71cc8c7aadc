"""Tests of `attn_implementation="hfq_sdpa"`: fast for one token, with equal bits in all placements."""

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from hfq.errors import SetupError
from hfq.formats.fp8 import Fp8
from hfq.integrations.transformers.attention import NAME
from hfq.loading.config import HfqConfig
from tests.contract.cases import CASES
from tests.support import tiny_models

PROMPT = torch.tensor([[1, 5, 9, 60, 33, 2, 7]])
TOKENS = 6


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Loads a model with half as many key heads as heads."""
    case = next(case for case in CASES if isinstance(case.format, Fp8))
    tensors = tiny_models.model_tensors(case.format)
    path = tiny_models.write_model(tmp_path_factory.mktemp("grouped"), tensors, case.config)

    def load(placement="cpu", attention=None):
        options = {} if attention is None else {"attn_implementation": attention}
        return AutoModelForCausalLM.from_pretrained(
            path,
            quantization_config=HfqConfig(kernel="reference"),
            device_map={"": "cpu", "model.layers": placement},
            dtype=torch.float32,
            **options,
        )

    return load


@pytest.fixture
def calls(monkeypatch):
    """(number of queries of a head, whether torch groups them) of each call of the attention."""
    made, original = [], F.scaled_dot_product_attention

    def counted(query, *arguments, **options):
        made.append((query.shape[1:3], options.get("enable_gqa", False)))
        return original(query, *arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return made


def generate(model):
    found = model.generate(
        PROMPT, max_new_tokens=TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return found.sequences, torch.stack(found.logits)


def test_one_token_is_computed_with_packed_queries(load, calls):
    model = load(attention=NAME)
    heads, keys = model.config.num_attention_heads, model.config.num_key_value_heads
    layers = model.config.num_hidden_layers
    assert keys < heads
    generate(load())
    assert calls == [((heads, PROMPT.shape[1]), True)] * layers + [((heads, 1), True)] * layers * (TOKENS - 1)
    calls.clear()
    generate(model)
    assert calls[:layers] == [((heads, PROMPT.shape[1]), True)] * layers
    assert calls[layers:] == [((keys, heads // keys), False)] * layers * (TOKENS - 1)


def test_logits_differ_from_those_of_sdpa_by_the_order_of_sums_alone(load):
    tokens, logits = generate(load(attention=NAME))
    expected_tokens, expected = generate(load())
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(logits[0], expected[0])  # a prompt has the same attention
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)  # float32, sums in another order


def test_all_placements_give_equal_bits(load):
    _, expected = generate(load(attention=NAME))
    _, found = generate(load("disk", NAME))
    assert torch.equal(found, expected)


def test_a_compiled_model_keeps_the_attention_of_sdpa(load):
    model = load(attention=NAME)
    expected = load()(PROMPT[:, :1]).logits
    with torch.no_grad():
        assert torch.equal(
            torch.compile(model, backend="eager", fullgraph=True)(PROMPT[:, :1]).logits, expected
        )


def test_a_model_whose_heads_have_their_own_keys_gets_no_mask(calls):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    config._attn_implementation = NAME
    with torch.no_grad():
        generate(LlamaForCausalLM(config).eval())
    assert {grouped for _, grouped in calls} == {False}
    assert {shape[0] for shape, _ in calls} == {4}


def test_a_model_whose_code_depends_on_the_name_is_refused():
    config = DeepseekV32Config(
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        vocab_size=64,
    )
    config._attn_implementation = NAME
    model = DeepseekV32ForCausalLM(config).eval()
    with torch.no_grad():
        with pytest.raises(SetupError, match=r"named sdpa(.|\n)*Fix: Call model.set_attn_implementation"):
            model(PROMPT)
        model.set_attn_implementation("sdpa")
        assert model(PROMPT).logits.isfinite().all()


def test_a_model_with_attention_sinks_is_refused_by_transformers():
    config = GptOssConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64)
    with pytest.raises(ValueError, match="does not support"):
        GptOssForCausalLM._from_config(config, attn_implementation=NAME)
