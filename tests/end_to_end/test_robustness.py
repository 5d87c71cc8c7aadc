"""Tests of import orders, threads, unusual models, and damage that looks valid."""

import copy
import json
import pickle
import shutil
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM

from hfq import FormatError, HfqError, PlacementError, SetupError, pretrained_config
from hfq.formats.gptq import Gptq
from tests.support import tiny_models
from tests.support.models import load, logits

GPTQ = tiny_models.DATA / "tiny-llama-gptq"
TOKENS = torch.tensor([[3, 4, 5, 6, 7, 8]])
CONFIG = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4, "group_size": 32, "sym": True}


def written(tmp_path, change=lambda tensors: None, **config):
    weight_format = Gptq(4, 32, True, "stored", g_idx_length=128)
    tensors = tiny_models.model_tensors(weight_format)
    change(tensors)
    return tiny_models.write_model(tmp_path, tensors, {**CONFIG, **config})


def test_threads_that_load_without_the_patch_wait_for_each_other_too():
    expected, found = logits(load(), TOKENS), []

    def work():
        for _ in range(3):
            found.append(
                logits(
                    AutoModelForCausalLM.from_pretrained(
                        GPTQ, config=pretrained_config(GPTQ), dtype=torch.float32
                    ),
                    TOKENS,
                )
            )

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 9
    assert all(torch.equal(other, expected) for other in found)


def test_take_over_is_guarded_as_well():
    with pytest.raises(SetupError, match="state_dict"):
        AutoModelForCausalLM.from_pretrained(GPTQ, config=pretrained_config(GPTQ), state_dict={})
    with pytest.raises(HfqError, match=r"(?s)no such GGUF file.*x\.gguf"):
        AutoModelForCausalLM.from_pretrained(GPTQ, config=pretrained_config(GPTQ), gguf_file="x.gguf")
    with pytest.raises(HfqError, match="no checkpoint at this path"):
        pretrained_config("/nope/x")


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop(f"{tiny_models.FIRST}.g_idx"),
        lambda t: t.__setitem__(f"{tiny_models.FIRST}.g_idx", torch.zeros(1, dtype=torch.int32)),
        lambda t: t.__setitem__(f"{tiny_models.FIRST}.g_idx", torch.zeros(128, dtype=torch.int32)),
    ],
    ids=["absent", "one", "zeros"],
)
def test_act_order_without_its_index_is_refused(tmp_path, change):
    with pytest.raises(FormatError, match=rf"(?s){tiny_models.FIRST}.g_idx"):
        load(written(tmp_path, change, desc_act=True))


def test_a_bias_that_the_model_does_not_have_is_refused_unless_it_is_zero(tmp_path):
    name = f"{tiny_models.FIRST}.bias"
    with pytest.raises(
        FormatError, match=rf"(?s)stores a bias for a layer that has none. Nothing was loaded.*{name}"
    ):
        load(written(tmp_path / "bias", lambda t: t.__setitem__(name, torch.ones(128, dtype=torch.float16))))
    zero = load(
        written(tmp_path / "zero", lambda t: t.__setitem__(name, torch.zeros(128, dtype=torch.float16)))
    )
    assert torch.equal(logits(zero, TOKENS), logits(load(written(tmp_path / "none")), TOKENS))


def test_what_transformers_keeps_in_float32_stays_so_in_every_placement():
    class Kept(LlamaForCausalLM):
        _keep_in_fp32_modules_strict = ["norm"]

    resident, disk = (
        load(device_map=device_map, cls=Kept, dtype=torch.bfloat16) for device_map in (None, {"": "disk"})
    )
    assert resident.model.norm.weight.dtype == disk.model.norm.weight.dtype == torch.float32
    assert resident.model.embed_tokens.weight.dtype == disk.model.embed_tokens.weight.dtype == torch.bfloat16


def test_a_device_map_that_splits_a_packed_layer_is_refused():
    with pytest.raises(PlacementError, match=r"splits a quantized module. Nothing was loaded"):
        load(device_map={"": "cpu", "model.layers.0.self_attn.q_proj.scales": "disk"})


def test_a_head_is_new_only_for_another_class_than_the_checkpoints(tmp_path):
    path = tmp_path / "classifier"
    shutil.copytree(GPTQ, path)
    load(path, cls=AutoModelForSequenceClassification)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]})
    )
    with pytest.raises(FormatError, match=r"score.weight: missing"):
        load(path, cls=AutoModelForSequenceClassification)


def test_a_cast_of_a_model_on_disk_is_followed():
    resident, disk = (load(device_map=device_map).to(torch.bfloat16) for device_map in (None, {"": "disk"}))
    assert logits(disk, TOKENS).dtype == torch.bfloat16
    assert torch.equal(logits(disk, TOKENS), logits(resident, TOKENS))


def test_a_model_on_disk_says_where_it_computes():
    model = load(device_map={"": "disk"})
    assert model.device == model.model.device == torch.device("cpu")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.generate(TOKENS.to(model.device), max_new_tokens=3, do_sample=False).shape == (1, 9)


def test_a_copy_or_a_pickle_that_cannot_work_is_refused():
    with pytest.raises(SetupError, match="cannot be copied"):
        copy.deepcopy(load(device_map={"": "disk"}))
    with pytest.raises(SetupError, match="cannot be pickled"):
        pickle.dumps(load(device_map={"": "disk"}).hf_quantizer.loading.reader)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "banana"},
        {"rope_parameters": {"rope_theta": "x"}},
        {"dtype": "banana"},
        {"pad_token_id": 10**9},
    ],
)
def test_what_transformers_chokes_on_is_one_error_of_hfq(tmp_path, changes):
    shutil.copytree(GPTQ, tmp_path / "model")
    config = json.loads((GPTQ / "config.json").read_text()) | changes
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(HfqError, match="Fix:"):
        load(tmp_path / "model", dtype="auto")


@pytest.mark.parametrize("pattern", ["(" * 2000, "*("])
def test_a_pattern_that_is_not_valid_is_refused(tmp_path, pattern):
    with pytest.raises(FormatError, match="pattern in dynamic"):
        load(written(tmp_path, dynamic={pattern: {"bits": 4}}))
    load(written(tmp_path / "good", dynamic={r"+:.*layers\.(1|2)\..*": {"bits": 4}, r"-:.*[a-z]+_gate$": {}}))
