"""Tests that a save replaces an older checkpoint at its end, or not at all."""

import pytest
from transformers import modeling_utils

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


def test_the_folder_of_a_killed_save_is_a_leftover(tmp_path):
    hidden = tmp_path / ".save.abcd1234.tmp"
    hidden.mkdir()
    (hidden / "model.safetensors").write_bytes(bytes(9))
    (found,) = find_leftovers([tmp_path], least_age=0)
    assert (found.path, found.nbytes, found.what) == (hidden, 9, "a save")
