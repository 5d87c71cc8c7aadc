"""Tests that a config.json cannot leave the folder, run code of the Hub, or ask for all memory."""

import json
import sys
import types

import huggingface_hub
import pytest
import torch
from transformers import PreTrainedConfig

from hfq import CheckpointError, FormatError, HfqError
from hfq.checkpoint import Checkpoint
from hfq.loading.config_checks import check_buffers, check_config
from tests.support.checkpoint_files import refused
from tests.support.model_copies import cache_model, copy_model, edit_config, load, opened_files, shard_model

NAMED = "other.safetensors.index.json"


@pytest.fixture
def gptq(tmp_path):
    return copy_model("gptq", tmp_path)


@pytest.fixture
def private(tmp_path):
    """Returns a complete checkpoint beside the one that is loaded."""
    folder = tmp_path / "private"
    folder.mkdir()
    return copy_model("gptq", folder)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def name_index(folder, shard):
    """Lets config.json name an index, all of whose tensors are in one shard."""
    names = Checkpoint.open(folder).tensors
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, str(shard))}
    (folder / NAMED).write_text(json.dumps(index))
    return edit_config(folder, transformers_weights=NAMED)


# transformers_weights


@pytest.mark.parametrize("is_absolute", [False, True])
def test_an_index_that_config_json_names_does_not_lead_outside(gptq, private, is_absolute):
    shard = private / "model.safetensors" if is_absolute else "../private/model-gptq/model.safetensors"
    name_index(gptq, shard)
    with opened_files() as opened, refused("outside its folder", kind=CheckpointError):
        load(gptq)
    assert not [path for path in opened if path.startswith(str(private))]


def test_an_index_that_config_json_names_does_not_lead_outside_by_a_link(gptq, private):
    name_index(gptq, "linked.safetensors")
    (gptq / "linked.safetensors").symlink_to(private / "model.safetensors")
    with refused("outside its folder", kind=CheckpointError):
        load(gptq)


def test_an_index_that_config_json_of_the_hub_cache_names_does_not_lead_outside(
    offline, gptq, private, tmp_path
):
    name_index(gptq, "../../../../private/model-gptq/model.safetensors")
    options = cache_model(gptq, tmp_path)
    with opened_files() as opened, pytest.raises(HfqError, match="private"):
        load("o/n", **options)
    assert not [path for path in opened if path.startswith(str(private))]


@pytest.mark.parametrize("named", ["../private/model-gptq/model.safetensors", "weights.bin", 3])
def test_a_weights_file_that_config_json_names_is_inside_and_safetensors(gptq, private, named):
    with refused("config.json", kind=CheckpointError):
        load(edit_config(gptq, transformers_weights=named))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_weights_that_config_json_names_are_loaded_and_opened(gptq, is_sharded):
    if is_sharded:
        shard_model(gptq)
        (gptq / "model.safetensors.index.json").rename(gptq / NAMED)
    else:
        (gptq / "model.safetensors").rename(gptq / "other.safetensors")
    edit_config(gptq, transformers_weights=NAMED if is_sharded else "other.safetensors")
    assert load(gptq).config.num_hidden_layers == 4
    assert len(Checkpoint.open(gptq).tensors) == 122


# attn_implementation

KERNELS = [
    {"attn_implementation": "evil/kernel"},
    {"_attn_implementation": "evil/kernel@v1:function"},
    {"attn_implementation": {"": "evil/kernel"}},
    {"attn_implementation": {"text_config": "paged|evil/kernel"}},
    {"vision_config": {"_attn_implementation": "evil/kernel"}},
    {"parts": [{"deeper": {"attn_implementation": "evil/kernel"}}]},
]


@pytest.fixture
def fetched(monkeypatch):
    """Returns the kernels that a stand-in for the package kernels fetches."""
    names = []
    kernels = types.ModuleType("kernels")
    kernels.__spec__ = types.SimpleNamespace(name="kernels", origin=None, submodule_search_locations=None)
    kernels.get_kernel = lambda name, *_, **__: names.append(name)
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    return names


@pytest.mark.parametrize("changes", KERNELS, ids=str)
def test_a_kernel_of_the_hub_that_config_json_names_is_refused(gptq, changes, fetched):
    with refused("attention kernel", "kernel", kind=FormatError, file=gptq / "config.json"):
        load(edit_config(gptq, **changes))
    assert fetched == []


def test_a_kernel_of_the_hub_that_another_config_file_names_is_refused(gptq, fetched):
    other = {**json.loads((gptq / "config.json").read_text()), "attn_implementation": "evil/kernel"}
    (gptq / "config.1.0.json").write_text(json.dumps(other))
    with refused("attention kernel", kind=FormatError):
        load(edit_config(gptq, configuration_files=["config.1.0.json"]))


def test_flash_attention_that_config_json_names_is_not_fetched(gptq, fetched):
    with refused("flash_attention_2", kind=FormatError):
        load(edit_config(gptq, attn_implementation="flash_attention_2"))


def test_a_kernel_of_the_hub_in_a_hub_model_is_refused(offline, gptq, tmp_path):
    with refused("attention kernel", kind=FormatError):
        load("o/n", **cache_model(edit_config(gptq, attn_implementation="evil/kernel"), tmp_path))


def test_the_user_chooses_the_attention(gptq):
    edit_config(gptq, attn_implementation="evil/kernel")
    assert load(gptq, attn_implementation="eager").config._attn_implementation == "eager"


def test_an_attention_of_transformers_in_config_json_is_kept(gptq):
    assert load(edit_config(gptq, attn_implementation="eager")).config._attn_implementation == "eager"


# sizes

HUGE = [
    {"num_labels": 3 * 10**9},
    {"text_config": {"num_labels": 3 * 10**9}},
    {"attention_types": [[["global", "local"], 10**10]]},
    {"num_stages": 10**9},
    {"backbone": {"depths": [2, 2, 10**9]}},
    {"num_experts": 10**6},
    {"backbone_config": {"num_classes": 10**9}},
    {"H_cycles": 10**9},
    {"num_feature_levels": 10**9},
]


@pytest.fixture
def built(monkeypatch):
    """Returns the configs that transformers builds."""
    found = []
    monkeypatch.setattr(PreTrainedConfig, "from_dict", lambda *_, **__: found.append(1))
    return found


@pytest.mark.parametrize("changes", HUGE, ids=str)
def test_a_count_that_the_headers_do_not_support_is_refused_before_a_config_is_built(gptq, changes, built):
    with refused("config.json", "does not fit this checkpoint", kind=FormatError):
        load(edit_config(gptq, **changes))
    assert built == []


@pytest.mark.parametrize("changes", [HUGE[0], HUGE[2]], ids=str)
def test_a_count_of_a_hub_model_is_checked_before_its_files_are_known(offline, gptq, tmp_path, changes):
    options = cache_model(edit_config(gptq, **changes), tmp_path)
    with refused("does not fit this checkpoint", kind=FormatError):
        load("o/n", **options)


def test_another_config_file_is_checked_too(gptq):
    other = {**json.loads((gptq / "config.json").read_text()), "num_labels": 3 * 10**9}
    (gptq / "config.1.0.json").write_text(json.dumps(other))
    with refused("num_labels=3000000000", kind=FormatError):
        load(edit_config(gptq, configuration_files=["config.1.0.json"]))


def test_counts_of_ordinary_configs_are_allowed(gptq):
    names = {str(index): f"block {index}" for index in range(21843)}
    check_config(
        {"id2label": names, "label2id": {name: int(key) for key, name in names.items()}}, "config.json"
    )
    config = {
        **json.loads((gptq / "config.json").read_text()),
        "label2id": {"time stage": 21842, "building block": 21841},
        "num_labels": 1000,
        "max_position_embeddings": 10_485_760,
        "vocab_size_per_layer_input": 262_144,
        "intermediate_size": [256] * 4,
        "rope_theta": 10**9,
        "vision_feature_layer": -2,
        "block_size": 131_072,
        "encoder_hash_byte_group_vocab": 500_002,
        "depthwise_separable_out_channel": 1024,
        "eos_token_id": [151_643, 151_645],
    }
    check_config(config, "config.json", Checkpoint.open(gptq))


def test_computed_tensors_are_limited(gptq):
    checkpoint = Checkpoint.open(gptq)
    with torch.device("meta"):
        model = torch.nn.Linear(1, 1)
        model.register_buffer("positions", torch.empty(1 << 30), persistent=False)
    with pytest.raises(FormatError, match="positions"):
        check_buffers(model, checkpoint)
    model.positions = model.positions[:1000]
    check_buffers(model, checkpoint)
