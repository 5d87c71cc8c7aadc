"""Tests of matching: a second stored tensor for one parameter raises an error."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfq import FormatError, HfqConfig
from hfq.formats.fp8 import Fp8
from hfq.loading.dry_run import open_model
from hfq.loading.matching import match
from hfq.loading.matching.renaming import Names
from tests.contract.cases import CASES
from tests.support import moe_models, tiny_models

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
    model, expected = load_as_is(path), load(tmp_path / "without", tensors)
    with torch.no_grad():
        ids = torch.tensor([[1, 40, 77, 9]])
        assert torch.equal(model(ids).logits, expected(ids).logits)
    model.save_pretrained(tmp_path / "saved")
    saved, source = tiny_models.digests(tmp_path / "saved"), tiny_models.digests(path)
    assert saved.keys() == source.keys()
    left_out = [name for name in source if "layers.2." in name]
    assert {name: saved[name] for name in left_out} == {name: source[name] for name in left_out}


def test_tensors_under_mtp_are_left_out_and_saved_again(tensors, tmp_path):
    more = {
        name.replace("model.layers.1.", "mtp.0."): t for name, t in tensors.items() if "layers.1." in name
    }
    path = tiny_models.write_model(tmp_path / "source", tensors | more, CONFIG)
    load_as_is(path).save_pretrained(tmp_path / "saved")
    saved, source = tiny_models.digests(tmp_path / "saved"), tiny_models.digests(path)
    assert {name: saved[name] for name in more} == {name: source[name] for name in more}


def test_fused_experts_under_mtp_are_counted_once(tmp_path):
    case = next(case for case in CASES if case.id == "fp8-block")
    tensors = tiny_models.model_tensors(case.format)
    stem = "model.layers.1.mlp.down_proj"
    fused = {
        f"mtp.0.mlp.experts.down_proj.{local}": torch.stack([tensors[f"{stem}.{local}"]] * 3)
        for local in ("weight", "weight_scale_inv")
    }
    path = tiny_models.write_model(tmp_path, tensors | fused, case.config)
    nbytes = sum(tensor.nbytes for tensor in fused.values())
    assert open_model(path).describe()["mtp_nbytes"] == nbytes


@pytest.mark.parametrize(
    ("model_type", "kept", "dropped"),
    [
        ("glm4_moe", "model.layers.92.eh_proj.weight", "model.layers.91.surplus.weight"),
        ("ernie4_5_moe", "model.mtp_block.0.self_attn.q_proj.weight", "mtpx.weight"),
        ("qwen2_moe", "model.mtp_layers.0.enorm.weight", "model.rotary_emb.inv_freq"),
    ],
)
def test_layers_that_a_model_class_leaves_out_are_saved_again(model_type, kept, dropped):
    config = AutoConfig.for_model(model_type, num_hidden_layers=1)
    with torch.device("meta"):
        names = Names(AutoModelForCausalLM.from_config(config))
    assert names.is_ignored(kept)
    assert names.is_predicting(kept)
    assert not names.is_predicting(dropped)


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


def mixture():
    return moe_models.write(
        next(each for each in moe_models.SCHEMES if each.id == "mixtral of gptqmodel, gptq")
    )


def test_layers_of_one_kind_are_compared_with_their_specs_once(tmp_path, monkeypatch):
    compare, compared = match._Matcher._compare, []

    def counted(self, module, *arguments):
        compared.append(module)
        return compare(self, module, *arguments)

    monkeypatch.setattr(match._Matcher, "_compare", counted)
    model = load_as_is(mixture().save(tmp_path))
    layers = model.hf_quantizer.loading.match.quantized.values()
    sizes = {(layer.target.in_features, layer.target.out_features) for layer in layers}
    assert len(layers) == moe_models.LAYERS * (4 + 3 * moe_models.EXPERTS)
    assert len(compared) <= 2 * len(sizes)  # of attention, and of experts
    assert len({id(layer.format) for layer in layers}) <= 2 * len(sizes)


def test_each_layer_of_a_kind_that_does_not_match_is_listed(tmp_path):
    written = mixture()
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj.scales" for layer, expert in ((0, 1), (1, 3))
    ]
    wrong = {name: written.tensors[name][:1].clone() for name in names}
    with pytest.raises(FormatError) as caught:
        load_as_is(written.save(tmp_path, written.tensors | wrong))
    assert len(caught.value.problems) == 2
    for name, problem in zip(names, caught.value.problems, strict=True):
        assert problem == f"{name}: expected F16 or BF16 or F32 [2, 96], found F16 [1, 96]"
