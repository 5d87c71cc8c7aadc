"""Each place of a model is filled by one stored tensor: a second one under another of its names is refused, not chosen from."""

import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM

from hfq import FormatError, HfqConfig
from hfq.formats.fp8 import Fp8

CONFIG = {"quant_method": "fbgemm_fp8"}
LAYER = "layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def tensors():
    return tiny_models.packed_tensors(Fp8(strategy="channel"))


def load(folder, tensors):
    path = tiny_models.write_model(folder, tensors, CONFIG)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=HfqConfig(), dtype=torch.float32)


def test_a_packed_layer_stored_with_and_without_the_prefix_is_refused(tensors, tmp_path):
    again = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if LAYER in name}
    with pytest.raises(FormatError, match=rf"{LAYER}: stored a second time"):
        load(tmp_path, tensors | again)


@pytest.mark.parametrize("name", ["norm.weight", "embed_tokens.weight", "layers.1.input_layernorm.weight"])
def test_a_dense_tensor_stored_with_and_without_the_prefix_is_refused(tensors, tmp_path, name):
    with pytest.raises(FormatError, match=name):
        load(tmp_path, tensors | {name: -tensors[f"model.{name}"]})


def test_a_dense_weight_beside_a_packed_one_of_another_name_is_refused(tensors, tmp_path):
    with pytest.raises(FormatError, match=LAYER):
        load(tmp_path, tensors | {f"{LAYER}.weight": torch.ones(128, 128)})
