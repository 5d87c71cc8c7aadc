"""Tests that damaged journals, damaged side files, and full disks are errors that name the file."""

import errno
import json
import os
import resource
import shutil
import stat

import pytest
from safetensors import SafetensorError

import hfq
from hfq import CheckpointError, Recipe, SetupError
from hfq.checkpoint import write_safetensors
from hfq.loading import whole_save
from hfq.quantization.journal import Journal
from tests.support import tiny_models
from tests.support.models import GPTQ, load

SOURCE = tiny_models.DATA / "tiny-llama"
JOURNAL = ".hfq-journal.json"
SHARD = "model-00001-of-00002.safetensors"
DEEP = "[" * 100_000
ENTRY = {"sha256": "0" * 64, "tensors": ["a"], "notes": {"layers": []}}
JOURNALS = {
    "empty": "",
    "torn": '{"job": {"bits": 4}, "sha',
    "no object": "[]",
    "null": "null",
    "no keys": "{}",
    "no shards": {"job": {"bits": 4}},
    "shards in a list": {"job": {"bits": 4}, "shards": [SHARD]},
    "job in a list": {"job": ["bits", 4], "shards": {}},
    "no digest": {"job": {"bits": 4}, "shards": {SHARD: {"tensors": [], "notes": {}}}},
    "no notes": {"job": {"bits": 4}, "shards": {SHARD: {"sha256": "0" * 64, "tensors": []}}},
    "a string for a shard": {"job": {"bits": 4}, "shards": {SHARD: "0"}},
    "another folder": {"job": {"bits": 4}, "shards": {"../a": ENTRY}},
    "another checksum": {"job": {"bits": 4}, "shards": {SHARD: ENTRY}, "sha256": "0" * 64},
    "no checksum": {"job": {"bits": 4}, "shards": {SHARD: ENTRY}},
    "no text": b"\xff\xfe\x00",
    "deep": DEEP,
}


@pytest.mark.parametrize("content", JOURNALS.values(), ids=JOURNALS)
def test_a_damaged_journal_is_named_and_nothing_is_changed(content, tmp_path):
    folder = tmp_path / ".out.quantizing"
    folder.mkdir()
    content = json.dumps(content) if isinstance(content, dict) else content
    (folder / JOURNAL).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(CheckpointError, match="journal") as caught:
        Journal(tmp_path / "out", {"bits": 4}, set())
    assert caught.value.file == folder / JOURNAL
    assert caught.value.fix == "Remove this folder, and start again."
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_journal_that_is_no_regular_file_is_named_and_not_waited_for(make, tmp_path):
    folder = tmp_path / ".out.quantizing"
    folder.mkdir()
    make(folder / JOURNAL)
    with pytest.raises(CheckpointError, match="journal") as caught:
        Journal(tmp_path / "out", {"bits": 4}, set())
    assert caught.value.file == folder / JOURNAL


TOKENIZERS = {
    "deep": ("tokenizer.json", DEEP),
    "deep and closed": ("tokenizer.json", DEEP + "]" * len(DEEP)),
    "a list": ("tokenizer_config.json", "[]"),
    "a number for tokens": ("tokenizer_config.json", '{"added_tokens_decoder": 5}'),
    "no JSON": ("tokenizer_config.json", "{"),
    "an odd limit": ("tokenizer_config.json", '{"model_max_length": "many"}'),
}


@pytest.mark.parametrize(("name", "content"), TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("verb", ["quantize", "evaluate"])
def test_a_damaged_tokenizer_is_an_error_that_names_the_folder(verb, name, content, tmp_path):
    folder = shutil.copytree(SOURCE, tmp_path / "model")
    (folder / name).write_text(content)
    with pytest.raises(SetupError, match="tokenizer") as caught:
        if verb == "quantize":
            recipe = Recipe("gptq", group_size=64)
            hfq.quantize(folder, recipe, tmp_path / "out", SOURCE / "held_out.txt", 1, 32)
        else:
            hfq.evaluate([folder], SOURCE / "held_out.txt")
    assert str(caught.value.file) == str(folder)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_a_side_file_that_cannot_be_copied_is_found_at_the_start(tmp_path):
    folder = shutil.copytree(SOURCE, tmp_path / "model")
    os.mkfifo(folder / "notes.json")
    with pytest.raises(CheckpointError, match="cannot be copied") as caught:
        hfq.quantize(folder, Recipe("rtn", group_size=64), tmp_path / "out")
    assert caught.value.file == folder / "notes.json"
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_a_readme_that_is_not_utf_8_costs_no_run(tmp_path):
    folder = shutil.copytree(SOURCE, tmp_path / "model")
    (folder / "README.md").write_bytes(b"# Gr\xfc\xdfe\n")
    hfq.quantize(folder, Recipe("rtn", group_size=64), tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text(encoding="utf-8").startswith("# Gr\ufffd\ufffde\n")


@pytest.mark.parametrize("umask", [0o077, 0o002, 0o022])
def test_shards_have_the_permissions_of_the_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        write_safetensors(tmp_path / "new.safetensors", {"a": ("U8", (4,), b"1234")})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.safetensors").stat().st_mode) == 0o666 & ~umask


@pytest.fixture(scope="module")
def model():
    return load(GPTQ, {"": "disk"})


def old_checkpoint(folder):
    """A folder with files of other programs and of an earlier save."""
    folder.mkdir()
    for name in ("notes.txt", "config.json", "model.safetensors"):
        (folder / name).write_text("old")


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()} if folder.exists() else None


@pytest.mark.parametrize("prepare", [lambda folder: None, lambda folder: folder.mkdir(), old_checkpoint])
def test_a_disk_that_is_too_small_is_noticed_before_a_save(prepare, model, tmp_path, monkeypatch):
    folder = tmp_path / "saved"
    prepare(folder)
    before, usage = content(folder), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(whole_save.shutil, "disk_usage", lambda path: usage._replace(free=500_000))
    with pytest.raises(CheckpointError, match="Nothing was written") as caught:
        model.save_pretrained(folder)
    assert caught.value.file == folder
    assert caught.value.found == "500,000 bytes"
    assert content(folder) == before


def test_a_save_needs_no_more_than_it_writes(model, tmp_path, monkeypatch):
    usage, written = shutil.disk_usage(tmp_path), (GPTQ / "model.safetensors").stat().st_size
    monkeypatch.setattr(whole_save.shutil, "disk_usage", lambda path: usage._replace(free=written))
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").exists()


def test_a_file_system_that_reports_no_size_is_not_full(model, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(whole_save.shutil, "disk_usage", lambda path: usage._replace(total=0, used=0, free=0))
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "prepare", [lambda folder: None, lambda folder: (folder / "mine").mkdir(parents=True)]
)
def test_a_disk_that_fills_up_during_a_save_leaves_nothing_new(prepare, model, tmp_path):
    folder, limits = tmp_path / "saved", resource.getrlimit(resource.RLIMIT_FSIZE)
    prepare(folder)
    before = {path.name for path in folder.iterdir()} if folder.exists() else None
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be saved") as caught:
            model.save_pretrained(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in str(caught.value)
    assert "bytes were free" in str(caught.value)
    assert ({path.name for path in folder.iterdir()} if folder.exists() else None) == before


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("Error while serializing")]
)
def test_files_that_were_there_before_are_kept(error, model, tmp_path, monkeypatch):
    folder = tmp_path / "saved"
    old_checkpoint(folder)

    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", fail)
    with pytest.raises(CheckpointError, match="New files of this save were removed"):
        model.save_pretrained(folder)
    assert set(content(folder)) == {"notes.txt", "config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_text() == "old"


def test_an_error_of_the_network_removes_nothing(model, tmp_path, monkeypatch):
    """An upload comes after the files are written."""
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", lambda *arguments, **options: None)
    with pytest.raises(ConnectionError), whole_save.whole_save(tmp_path / "saved", 0):
        model.save_pretrained(tmp_path / "saved")
        raise ConnectionError("no route to the Hub")
    assert (tmp_path / "saved" / "config.json").exists()
