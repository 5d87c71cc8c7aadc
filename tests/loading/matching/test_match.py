"""Tests of matching: a second stored tensor for one parameter raises an error."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import FormatError, HfqConfig
from hfq.formats.fp8 import Fp8
from tests.contract.cases import CASES
from tests.support import tiny_models

CONFIG = {"quant_method": "fbgemm_fp8"}
LAYER = "layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def tensors():
    return tiny_models.model_tensors(Fp8(strategy="channel"))


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


def load_as_is(path):
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=HfqConfig(), dtype=torch.float32)


def test_a_layer_that_predicts_further_tokens_is_left_out_where_the_config_has_it(tensors, tmp_path):
    more = {
        name.replace("layers.1.", "layers.2."): tensor
        for name, tensor in tensors.items()
        if "layers.1." in name
    }
    assert more
    path = tiny_models.write_model(
        tmp_path, tensors | more | {"model.layers.2.eh_proj.weight": torch.ones(128, 256)}, CONFIG
    )
    with pytest.raises(FormatError, match=r"model\.layers\.2"):
        load_as_is(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    expected = load(tmp_path / "without", tensors)
    with torch.no_grad():
        ids = torch.tensor([[1, 40, 77, 9]])
        assert torch.equal(load_as_is(path)(ids).logits, expected(ids).logits)


def test_metadata_of_torchao_may_have_the_names_of_the_model_where_the_file_has_others(tmp_path):
    case = next(case for case in CASES if case.id == "torchao-int8")
    tensors = tiny_models.model_tensors(case.format)
    metadata = tiny_models.schemas(tensors, case.schema)
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    found, expected = (
        load_as_is(tiny_models.write_model(tmp_path / name, stored, case.config, metadata))
        for name, stored in (("renamed", renamed), ("as they are", tensors))
    )
    with torch.no_grad():
        ids = torch.tensor([[1, 40, 77, 9]])
        assert torch.equal(found(ids).logits, expected(ids).logits)
