"""Tests that a save replaces an older checkpoint at its end, or not at all."""

import os
import stat

import pytest
import torch
from transformers import AutoModelForCausalLM, modeling_utils

from hfq import HfqConfig
from hfq.checkpoint.cleanup import find_leftovers
from hfq.errors import CheckpointError
from tests.support.models import GPTQ, load
from tests.support.tiny_models import digests


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_save_that_fails_leaves_the_older_checkpoint_whole(tmp_path, monkeypatch):
    model = load()
    model.save_pretrained(tmp_path)
    before = contents(tmp_path)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(modeling_utils, "safe_save_file", fail)
    model.config.rope_theta = 5.0
    with pytest.raises(CheckpointError, match="cannot be saved") as caught:
        model.save_pretrained(tmp_path)
    assert caught.value.file == tmp_path
    assert contents(tmp_path) == before


def test_a_save_replaces_the_shards_of_an_older_one(tmp_path):
    model = load(dtype=None)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    model.save_pretrained(tmp_path, max_shard_size="400KB")
    shards = {file.name for file in tmp_path.glob("model-*.safetensors")}
    assert len({name[-len("00001.safetensors") :] for name in shards}) == 1
    assert digests(tmp_path) == digests(GPTQ)
    assert [file for file in tmp_path.iterdir() if file.name.startswith(".")] == []


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("sizes", [("100KB", "9MB"), ("9MB", "100KB")], ids=["one file", "shards"])
def test_a_load_reads_the_newer_save(sizes, variant, tmp_path):
    model = load(dtype=None)
    model.save_pretrained(tmp_path, max_shard_size=sizes[0], variant=variant)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(tmp_path, max_shard_size=sizes[1], variant=variant)
    names = {file.name for file in tmp_path.iterdir()}
    suffix = "" if variant is None else f".{variant}"
    assert (f"model{suffix}.safetensors" in names) is (sizes[1] == "9MB")
    assert (f"model.safetensors.index{suffix}.json" in names) is (sizes[1] == "100KB")
    found = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=HfqConfig(), variant=variant)
    assert torch.equal(found.model.norm.weight, model.model.norm.weight)


def test_other_files_of_the_folder_stay(tmp_path):
    others = [
        "adapter_model.safetensors",
        "other.safetensors.index.json",
        "model.fp16.safetensors",
        "notes.txt",
    ]
    for name in others:
        (tmp_path / name).write_bytes(b"{}")
    load(dtype=None).save_pretrained(tmp_path, max_shard_size="100KB")
    assert all((tmp_path / name).read_bytes() == b"{}" for name in others)


@pytest.mark.parametrize("umask", [0o077, 0o002, 0o022])
def test_saved_files_have_the_permissions_of_the_umask(umask, tmp_path):
    model = load(dtype=None)
    before = os.umask(umask)
    try:
        model.save_pretrained(tmp_path / "new")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "new").iterdir()}
    assert modes == {0o666 & ~umask}


def test_the_folder_of_a_killed_save_is_a_leftover(tmp_path):
    hidden = tmp_path / ".save.abcd1234.tmp"
    hidden.mkdir()
    (hidden / "model.safetensors").write_bytes(bytes(9))
    (found,) = find_leftovers([tmp_path], least_age=0)
    assert (found.path, found.nbytes, found.what) == (hidden, 9, "a save")
