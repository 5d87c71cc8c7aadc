"""Tests of `model.dequantize()`: it returns a plain model with the same weights, or an error by name."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from hfq.errors import SetupError
from hfq.modules.quantized_module import QuantizedModule
from tests.support import moe_models
from tests.support.code_models import LLAMA, TOKENS, write
from tests.support.models import load, logits

GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96}


@pytest.mark.parametrize(
    ("kind", "options", "packed"),
    [("llama", LLAMA, r"_proj$"), ("qwen2", LLAMA, r"_proj$"), ("gpt2", GPT2, r"(c_attn|c_proj|c_fc)$")],
)
def test_a_dequantized_model_is_a_plain_one(kind, options, packed, tmp_path):
    plain, folder = write(tmp_path, AutoModelForCausalLM, kind, options, packed)
    model = load(folder)
    assert model.dequantize() is model
    assert not any(isinstance(module, QuantizedModule) for module in model.modules())
    assert torch.equal(model(**TOKENS).logits, plain(**TOKENS).logits)
    assert {name: type(module) for name, module in model.named_modules()} == {
        name: type(module) for name, module in plain.named_modules()
    }
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(again(**TOKENS).logits, plain(**TOKENS).logits)


def test_another_dtype_is_that_of_all_weights():
    model, expected = load(), logits(load(kernel="reference"), TOKENS["input_ids"])
    model.dequantize(dtype=torch.float64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    torch.testing.assert_close(
        logits(model, TOKENS["input_ids"]).float(), expected, rtol=1e-3, atol=1e-3 * expected.abs().max()
    )


def test_halves_of_a_fused_layer_are_joined():
    from hfq.loading.dequantize import dequantize_model
    from hfq.modules.concat_linear import ConcatLinear

    layers = {name: getattr(load().model.layers[0].mlp, name) for name in ("gate_proj", "up_proj")}
    owner = nn.Module()
    owner.config, owner.both = load().config, ConcatLinear(layers)
    x = torch.randn(2, 128)
    expected = owner.both(x)
    dequantize_model(owner, torch.float32)
    assert type(owner.both) is nn.Linear
    torch.testing.assert_close(owner.both(x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["offloaded layers", "experts"])
def test_what_cannot_be_replaced_is_refused_by_name(kind, tmp_path):
    if kind == "experts":
        scheme = moe_models.BY_EXPERT
        moe_models.write(scheme).save(tmp_path)
        model, tokens = load(tmp_path), moe_models.IDS
    else:
        model, tokens = load(device_map={"": "cpu", "model.layers.1": "disk"}), TOKENS["input_ids"]
    expected = logits(model, tokens)
    with pytest.raises(SetupError, match=r"model\.dequantize\(\) does not support model\.layers\.[01]\."):
        model.dequantize()
    assert torch.equal(logits(model, tokens), expected)
    assert isinstance(model.config.quantization_config, HfqConfig)
