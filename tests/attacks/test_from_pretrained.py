"""Promises 12 to 14: in `from_pretrained`, each mistake of a user raises one error of hfq.

The error names the location of the mistake.
"""

import json
import os
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hfq import FormatError, PlacementError
from tests.support import programs
from tests.support.checkpoint_files import refused
from tests.support.model_copies import cache_model, copy_model, edit_config, load, shard_model

WHOLE = {
    "model.embed_tokens": "cpu",
    "model.layers": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


def test_unspoilt_copies_load(model):
    """Shows that the tests below fail because of the damage alone."""
    assert load(model, device_map={"": "cpu"}).hfq_device_map == {"": "cpu"}
    shard_model(model)
    assert load(model).config.num_hidden_layers == 4


# 12. A path without a checkpoint, or with a part of one, raises an error that names it.


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("name", ["none", "none/at/all"])
def test_a_path_that_is_not_there_is_named(tmp_path, name, kind):
    with refused("no checkpoint at this path", file=tmp_path / name):
        load(kind(tmp_path / name))


@pytest.mark.parametrize("name", ["./none", "../none/model", "none/at/all"])
def test_a_relative_path_that_is_not_there_is_named(name):
    with refused("no checkpoint at this path", file=Path(name)):
        load(name)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_in_place_of_a_folder_is_named(model, name):
    with refused("this is a file", f"Fix: Pass its folder, {model}.", file=model / name):
        load(model / name)


@pytest.mark.parametrize("prefix", ["", "./"])
def test_a_path_that_is_too_long_is_refused(prefix):
    with refused():
        load(prefix + "a" * 300)


def test_no_path_is_refused():
    with refused("requires a checkpoint", "None"):
        load(None)


def test_a_missing_shard_is_named(model):
    shards = shard_model(model)
    shards[1].unlink()
    with refused(f"Shard {shards[1].name} is missing.", file=shards[1]):
        load(model)


def test_missing_weights_and_a_missing_or_broken_config_are_named(model):
    (model / "config.json").rename(model / "kept")
    with refused("no config.json", file=model):
        load(model)
    (model / "config.json").write_text("{")
    with refused("JSON file of the checkpoint cannot be read", file=model / "config.json"):
        load(model)
    (model / "kept").rename(model / "config.json")
    (model / "model.safetensors").unlink()
    with refused("holds no checkpoint", file=model):
        load(model)


def test_a_dense_checkpoint_is_loaded_as_it_is(tmp_path):
    path, tokens = copy_model("", tmp_path), torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(
            load(path)(tokens).logits, AutoModelForCausalLM.from_pretrained(path)(tokens).logits
        )


def test_codes_without_a_dialect_are_refused_and_not_taken_for_a_dense_checkpoint(tmp_path):
    path = copy_model("", tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.qweight"] = tensors.pop("model.layers.0.mlp.up_proj.weight").to(
        torch.int32
    )
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with refused("model.layers.0.mlp.up_proj", kind=FormatError):
        load(path)


# 13. An invalid or incomplete device map raises an error that names its key or value.


@pytest.mark.parametrize(
    ("device_map", "words"),
    [
        ("atuo", "found: 'atuo'"),
        ("atuo", "Did you mean 'auto'?"),
        ("dsik", "Did you mean 'disk'?"),
        ("meta", "found: 'meta'"),
        ({"": "dsik"}, "found: 'dsik'"),
        ({"": "meta"}, "found: 'meta'"),
        ({"": None}, "found: None"),
        ({"": True}, "found: True"),
        ({"": -1}, "found: -1"),
        ({"": "cuda:99"}, "found: 'cuda:99'"),
        ({"": 99}, "found: 99"),
        ({"": "cpu", "model.norm": "dsik"}, "device_map['model.norm'] is not a device. Did you mean 'disk'?"),
        ({"model.layers.1x": "cpu", "": "cpu"}, "- 'model.layers.1x'. Did you mean 'model.layers.1'?"),
        ({"model.layers.9": "cpu", "": "cpu"}, "- 'model.layers.9'"),
        ({"model.layer": "cpu", "": "cpu"}, "- 'model.layer'"),
        ({**WHOLE, "model.layers": "cpu", "model.nrom": "cpu"}, "- 'model.nrom'. Did you mean 'model.norm'?"),
        ({}, "- model\n"),
        ({"model.layers.1": "cpu"}, "- model.layers.0\n"),
        ({key: value for key, value in WHOLE.items() if key != "model.norm"}, "- model.norm\n"),
        ({1: "cpu"}, "1"),
        (["cpu"], "cpu"),
    ],
    ids=str,
)
def test_a_device_map_that_means_nothing_is_refused(model, device_map, words):
    with refused(words, "Nothing was loaded", kind=PlacementError):
        load(model, device_map=device_map)


def test_a_refused_load_leaves_nothing_behind(model):
    with refused(kind=PlacementError):
        load(model, device_map={"": "dsik"})
    intact = (model / "config.json").read_text()
    with refused(kind=FormatError):
        load(edit_config(model, hidden_size=2**40))
    (model / "config.json").write_text(intact)
    assert load(model, device_map={"": "disk"}).hfq_device_map == {"": "disk"}


# 14. No checkpoint ends the process, regardless of its claimed size and of truncation.


@pytest.fixture
def offline(monkeypatch):
    """Prevents requests to the Hub, which are retried for half a minute without a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_a_damaged_file_of_the_hub_cache_is_named(offline, gptq, tmp_path):
    os.truncate(gptq / "model.safetensors", 100_000)
    with refused("truncated by", "models--o--n/snapshots/abc/model.safetensors"):
        load("o/n", **cache_model(gptq, tmp_path))


@pytest.mark.parametrize("subfolder", ["", "sub"])
def test_a_model_of_the_hub_cache_loads(offline, gptq, tmp_path, subfolder):
    assert load("o/n", **cache_model(gptq, tmp_path, subfolder)).config.num_hidden_layers == 4


def test_sizes_of_a_model_of_the_hub_cache_are_checked_before_it_is_built(offline, gptq, tmp_path):
    with refused("config.json has num_hidden_layers=500", kind=FormatError):
        load("o/n", **cache_model(edit_config(gptq, num_hidden_layers=500), tmp_path))


HUGE = {
    "hidden_size": 2**40,
    "vocab_size": 2**40,
    "intermediate_size": 2**40,
    "head_dim": 2**40,
    "num_hidden_layers": 10**9,
}
DANGEROUS = {
    **{key: ("FormatError", f"{key}={value}") for key, value in HUGE.items()},
    "truncated file": ("CheckpointError", "truncated by 1 bytes"),
    "truncated shard": ("CheckpointError", "model-00002-of-00002.safetensors"),
    "not cached": ("CheckpointError", "nobody/no-such-model"),
}


def dangerous(kind, folder) -> list:
    """Returns the paths of the dangerous checkpoints."""
    folders = {danger: copy_model(kind, folder / str(index)) for index, danger in enumerate(DANGEROUS)}
    for key, value in HUGE.items():
        edit_config(folders[key], **{key: value})
    whole = folders["truncated file"] / "model.safetensors"
    os.truncate(whole, os.path.getsize(whole) - 1)
    shard = shard_model(folders["truncated shard"])[1]
    os.truncate(shard, os.path.getsize(shard) // 2)
    return list({**folders, "not cached": "nobody/no-such-model"}.values())


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Runs a separate process that loads the dangerous checkpoints of both kinds.

    The process is offline and has an empty cache.
    """
    paths = [path for kind in ("gptq", "fp8") for path in dangerous(kind, tmp_path_factory.mktemp(kind))]
    return programs.run(
        "load_each", *paths, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path_factory.mktemp("cache"))
    )


@pytest.fixture(params=["gptq", "fp8"])
def endings(request, ended):
    """Returns the exit status and the output of that process for each checkpoint of one kind."""
    lines = list(map(json.loads, ended.stdout.splitlines()))
    mine = lines[: len(DANGEROUS)] if request.param == "gptq" else lines[len(DANGEROUS) :]
    return ended.returncode, dict(zip(DANGEROUS, mine, strict=False)), ended.stderr


def test_no_dangerous_checkpoint_ends_the_process(endings):
    returncode, said, stderr = endings
    assert (returncode, list(said)) == (0, list(DANGEROUS)), stderr[-2000:]


@pytest.mark.parametrize("danger", DANGEROUS)
def test_a_dangerous_checkpoint_is_refused_by_name(endings, danger):
    kind, words = DANGEROUS[danger]
    found, text = endings[1][danger]
    assert found == kind, text
    assert words in text
    assert text.count("\nFix: ") == 1
