"""Tests of `hfq.compare`: equal models in other placements and bytes, and all kinds of difference."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfq
from hfq import HfqConfig, SetupError
from hfq.checkpoint import write_safetensors
from tests.contract.cases import CASES
from tests.support import tiny_models

HALF = {"": "cpu", "model.layers.1": "disk"}
ROWS = {case.id: case for case in CASES}
Q_PROJ = f"{tiny_models.FIRST}.weight"


def write(folder, tensors, config):
    return tiny_models.write_model(folder, tensors, config)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints of one random model: GPTQ v1, v2 with equal values, FP8, and unquantized v1 values."""
    folder = tmp_path_factory.mktemp("made")
    v1 = ROWS["gptq-v1-w4-asym"]
    tensors = tiny_models.model_tensors(v1.format)
    paths = {"v1": write(folder / "v1", tensors, v1.config)}
    other = dict(tensors)
    for name in tensors:
        if name.endswith(".qzeros"):
            other[name] = tensors[name] + 0x11111111
    paths["v2"] = write(folder / "v2", other, v1.config | {"checkpoint_format": "gptq_v2"})
    fp8 = ROWS["fp8-block"]
    paths["fp8"] = write(folder / "fp8", tiny_models.model_tensors(fp8.format), fp8.config)
    model = AutoModelForCausalLM.from_pretrained(
        paths["v1"], quantization_config=HfqConfig(), dtype=torch.float32
    )
    unquantized = {name: tensor for name, tensor in tensors.items() if "_proj" not in name}
    for name, module in model.hf_quantizer.loading.quantized.items():
        unquantized[f"{name}.weight"] = module.weight.detach().clone()
    paths["dense"] = write(folder / "dense", unquantized, None)
    return paths


def kinds(found) -> dict[str, int]:
    listed = [each.kind for each in found.differences]
    return {kind: listed.count(kind) for kind in listed}


@pytest.mark.parametrize("placement", ["disk", HALF, json.dumps(HALF)], ids=["disk", "half", "json"])
def test_placements_of_one_checkpoint_are_the_same_model(made, placement):
    found = hfq.compare(made["v1"], made["v1"], device_map_b=placement)
    assert found.equal
    assert found.verdict == "the same model"
    assert found.identical == found.weights == 14 + 4 + 3
    assert found.logits.is_equal
    assert found.logits.kl_mean == found.logits.max_abs == 0
    digests = tiny_models.digests(made["v1"])
    assert found.digests[Q_PROJ]["qweight"] == (digests[f"{tiny_models.FIRST}.qweight"][2],) * 2


def test_progress_names_each_weight_and_then_the_logits(made):
    reports = []
    found = hfq.compare(made["v1"], made["v1"], on_progress=reports.append)
    assert [report.done for report in reports] == [*range(found.weights + 1)]
    assert {report.total for report in reports} == {found.weights + 1}
    assert {report.step for report in reports} == {*found.digests, "logits"}


def test_loaded_models_can_be_compared(made):
    model = AutoModelForCausalLM.from_pretrained(
        made["v1"],
        quantization_config=HfqConfig(kernel="reference"),
        dtype=torch.float32,
        device_map={"": "disk"},
    )
    assert hfq.compare(model, made["v1"]).equal
    stock = AutoModelForCausalLM.from_pretrained(made["dense"], dtype=torch.float32)
    with pytest.raises(SetupError, match="not loaded by hfq"):
        hfq.compare(made["v1"], stock)


def test_the_same_numbers_in_another_dialect_are_the_same_model(made):
    found = hfq.compare(made["v1"], made["v2"], device_map_b="disk")
    assert found.equal
    assert found.verdict == "the same model: equal values in other bytes"
    assert kinds(found) == {"other format": 14}
    assert all(each.distance.is_equal and each.distance.max_abs == 0 for each in found.differences)
    assert found.logits.is_equal


def test_the_same_bytes_under_another_label_are_another_model(made, tmp_path):
    path = shutil.copytree(made["v1"], tmp_path / "mislabelled")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (path / "config.json").write_text(json.dumps(config))
    found = hfq.compare(made["v1"], path)
    assert not found.equal
    assert kinds(found) == {"other values": 14}


def test_an_inflated_model_is_found_though_its_numbers_are_the_same(made):
    found = hfq.compare(made["v1"], made["dense"])
    assert not found.equal
    assert kinds(found) == {"inflated": 14}
    assert all(each.distance.is_equal for each in found.differences)
    assert found.differences[0].second == "unquantized F32"
    assert kinds(hfq.compare(made["dense"], made["v1"], logits=False)) == {"quantized": 14}


def test_distances_are_those_of_the_dequantized_weights(made):
    found = hfq.compare(made["v1"], made["fp8"])
    assert not found.equal
    assert kinds(found) == {"other values": 14}
    weights = [
        AutoModelForCausalLM.from_pretrained(made[name], quantization_config=HfqConfig(), dtype=torch.float32)
        .get_submodule(tiny_models.FIRST)
        .weight
        for name in ("v1", "fp8")
    ]
    (apart,) = (each.distance for each in found.differences if each.name == Q_PROJ)
    gap = (weights[0] - weights[1]).double()
    assert apart.max_abs == pytest.approx(
        float(gap.abs().max()), rel=1e-12
    )  # a difference of two float32 in float64
    # sums of float64 in another order
    assert apart.relative_l2 == pytest.approx(float(gap.norm() / weights[0].double().norm()), rel=1e-9)
    assert found.logits.kl_mean > 0
    assert "14 weights other values" in found.verdict
    json.dumps(found.to_dict())


def test_a_weight_of_random_numbers_is_called_re_initialised(made, tmp_path):
    path = shutil.copytree(made["dense"], tmp_path / "again")
    tensors = tiny_models.stored_tensors(path)
    tensors[Q_PROJ] = torch.randn(128, 128, generator=torch.Generator().manual_seed(9)) * 0.08
    stored = {name: tiny_models.as_stored(tensor) for name, tensor in tensors.items()}
    write_safetensors(path / "model.safetensors", stored, {"format": "pt"})
    found = hfq.compare(made["dense"], path)
    assert [(each.name, each.kind) for each in found.differences] == [(Q_PROJ, "re-initialised")]
    assert found.differences[0].distance.relative_l2 > 1
    assert not found.equal


def test_a_wider_copy_of_a_dense_weight_holds_the_same_numbers(made, tmp_path):
    path = shutil.copytree(made["dense"], tmp_path / "wide")
    tensors = tiny_models.stored_tensors(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].float()
    stored = {name: tiny_models.as_stored(tensor) for name, tensor in tensors.items()}
    write_safetensors(path / "model.safetensors", stored, {"format": "pt"})
    found = hfq.compare(made["dense"], path)
    assert [(each.name, each.kind) for each in found.differences] == [("lm_head.weight", "other dtype")]
    assert found.equal


def test_a_tied_head_is_missing_and_a_layer_more_is_extra(made, tmp_path):
    tied = shutil.copytree(made["dense"], tmp_path / "tied")
    tensors = tiny_models.stored_tensors(tied)
    del tensors["lm_head.weight"]
    stored = {name: tiny_models.as_stored(tensor) for name, tensor in tensors.items()}
    write_safetensors(tied / "model.safetensors", stored, {"format": "pt"})
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    found = hfq.compare(made["dense"], tied)
    assert [(each.name, each.kind) for each in found.differences] == [("lm_head.weight", "missing")]
    assert not found.logits.is_equal
    assert kinds(hfq.compare(tied, made["dense"])) == {"extra": 1}
