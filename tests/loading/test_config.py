"""Tests of HfqConfig: valid and invalid options, and the config that is saved."""

import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
)

from hfq import HfqConfig, SetupError
from hfq.modules.linear import QuantizedLinear
from tests.support import tiny_models
from tests.support.models import load

GPTQ = tiny_models.DATA / "tiny-llama-gptq"
FP8 = tiny_models.DATA / "tiny-llama-fp8"
TOKENS = torch.tensor([[1, 40, 77, 300]])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kernal": "auto"}, "Did you mean 'kernel'"),
        ({"kernel": "referense"}, "Did you mean 'reference'"),
        ({"quantize_activations": "nope"}, "quantize_activations='nope'"),
        ({"cpu_memory": "file"}, "cpu_memory='file'"),
        ({"modules_to_not_convert": "lm_head"}, "a list of module names"),
        (
            {"max_memory": {}},
            r"Fix: Call from_pretrained\(model, max_memory=…, quantization_config=HfqConfig\(\)",
        ),
    ],
)
def test_a_wrong_option_is_named(options, named):
    with pytest.raises(SetupError, match=named):
        HfqConfig(**options)


def test_options_survive_the_take_over():
    model = load(kernel="reference", quantize_activations=False, cpu_memory="private")
    kept = model.hf_quantizer.quantization_config
    assert (kept.kernel, kept.quantize_activations, kept.cpu_memory) == ("reference", False, "private")
    linear = next(module for module in model.modules() if isinstance(module, QuantizedLinear))
    assert list(dict(linear.named_parameters())) == ["flat_buffer"]


def test_a_dict_that_names_hfq_is_taken_like_an_HfqConfig():
    options = {"quant_method": "hfq", "cpu_memory": "private"}
    model = AutoModelForCausalLM.from_pretrained(GPTQ, quantization_config=options, dtype=torch.float32)
    assert model.hf_quantizer.quantization_config.cpu_memory == "private"


def test_a_loaded_models_config_loads_it_again():
    model = load()
    again = AutoModelForCausalLM.from_pretrained(GPTQ, config=model.config, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_the_config_speaks_the_source_dialect(tmp_path):
    model = load()
    source = json.loads((GPTQ / "config.json").read_text())["quantization_config"]
    assert model.config.to_dict()["quantization_config"] == source
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).quantization_config == source


def test_checkpoint_activations_are_quantized_and_others_are_not():
    with torch.no_grad():
        plain, none = load(FP8)(TOKENS).logits, load(FP8, quantize_activations=False)(TOKENS).logits
        quantized = load(FP8, quantize_activations=True)(TOKENS).logits
    assert torch.equal(plain, none)
    difference = (quantized - none).norm() / none.norm()
    assert 1e-4 < difference < 0.2  # FP8 e4m3 rounds an activation by up to 1/16


def test_a_module_that_is_stored_packed_cannot_be_left_unconverted():
    with pytest.raises(SetupError, match=r"(?s)'down_proj', which is stored quantized. Nothing was loaded"):
        load(modules_to_not_convert=["down_proj"])
    with pytest.raises(SetupError, match=r"(?s)'lm_haed'.*Did you mean 'lm_head'"):
        load(modules_to_not_convert=["lm_haed"])
    load(modules_to_not_convert=["lm_head"])


@pytest.mark.parametrize("argument", ["gguf_file", "tp_plan", "state_dict"])
def test_an_argument_that_would_be_ignored_is_refused(argument):
    with pytest.raises(SetupError, match=rf"from_pretrained\({argument}=…\).*Nothing was loaded"):
        AutoModelForCausalLM.from_pretrained(GPTQ, quantization_config=HfqConfig(), **{argument: "x"})


@pytest.mark.parametrize("device_map", [None, "cpu", {"": "disk"}])
def test_a_limit_that_nothing_would_obey_is_refused(device_map):
    with pytest.raises(SetupError, match=r"max_memory=…\) requires.*Nothing was loaded"):
        AutoModelForCausalLM.from_pretrained(
            GPTQ, quantization_config=HfqConfig(), device_map=device_map, max_memory={"cpu": "1KB"}
        )


def test_other_classes_load_too():
    body = load(cls=AutoModel)
    with torch.no_grad():
        hidden = load(cls=LlamaForCausalLM)(TOKENS, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(body(TOKENS).last_hidden_state, hidden)
    classifier = load(cls=AutoModelForSequenceClassification)
    assert classifier.score.weight.device.type == "cpu"
    assert isinstance(classifier.model.layers[0].mlp.up_proj, QuantizedLinear)


def test_an_old_writers_side_file_stands_in_for_the_config(tmp_path):
    import shutil

    shutil.copytree(GPTQ, tmp_path / "old")
    config = json.loads((GPTQ / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "old")(TOKENS).logits, load()(TOKENS).logits)
