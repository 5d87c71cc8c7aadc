"""Tests that a quantization removes only files that an earlier run of it made."""

import os

import pytest

import hfq
from hfq import CheckpointError, Recipe
from hfq.quantization.journal import Journal
from tests.support import tiny_models

SOURCE = tiny_models.DATA / "tiny-llama"
SHARD = "model-00001-of-00002.safetensors"
SIDE_FILES = {"config.json"}


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def begun(target):
    """Leaves an unfinished run behind, with one finished shard."""
    journal = Journal(target, {"bits": 4}, SIDE_FILES)
    journal.add(SHARD, {"a": ("U8", (4,), b"1234")}, {"layers": []})
    journal.close()
    return journal.folder


def refused(target, named):
    with pytest.raises(CheckpointError, match=named) as caught:
        Journal(target, {"bits": 4}, SIDE_FILES)
    assert "Nothing was changed" in caught.value.message
    assert not target.exists()


def test_a_link_is_not_followed(tmp_path):
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "thesis.tex").write_text("mine")
    (tmp_path / ".out.quantizing").symlink_to(thesis)
    with pytest.raises(CheckpointError, match="a symbolic link"):
        hfq.quantize(SOURCE, Recipe("rtn", group_size=64), output_dir=tmp_path / "out")
    assert content(thesis) == {"thesis.tex": b"mine"}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["notes.txt", SHARD, "config.json"])
def test_files_without_a_journal_are_not_known_to_be_of_hfq(name, tmp_path):
    folder = tmp_path / ".out.quantizing"
    folder.mkdir()
    (folder / name).write_text("mine")
    refused(tmp_path / "out", name)
    assert content(folder) == {name: b"mine"}


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", ".hfq-journal.json.bak"])
def test_other_files_next_to_a_journal_are_named_and_kept(name, tmp_path):
    folder = begun(tmp_path / "out")
    (folder / name).write_text("mine")
    before = content(folder)
    refused(tmp_path / "out", name)
    assert content(folder) == before


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/etc/passwd", path)])
def test_an_entry_that_is_no_file_is_named_and_kept(make, tmp_path):
    folder = begun(tmp_path / "out")
    make(folder / "model-00002-of-00002.safetensors")
    refused(tmp_path / "out", "model-00002-of-00002.safetensors")
    assert os.path.lexists(folder / "model-00002-of-00002.safetensors")


def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    folder = begun(tmp_path / "out")
    before = content(folder)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refused(tmp_path / "out", "a folder of user")
    assert content(folder) == before


def test_leftovers_of_an_earlier_run_are_removed(tmp_path):
    folder = begun(tmp_path / "out")
    for name in ("model-00002-of-00002.safetensors", f".{SHARD}.0a_b1c2d.tmp", "config.json"):
        (folder / name).write_text("half")
    (folder / ".hfq-journal.json.new").write_text("half")
    journal = Journal(tmp_path / "out", {"bits": 4}, SIDE_FILES)
    assert SHARD in journal
    assert set(content(folder)) == {SHARD, ".hfq-journal.json"}
    journal.close()


def test_a_run_that_was_killed_before_its_first_journal_starts_again(tmp_path):
    folder = tmp_path / ".out.quantizing"
    folder.mkdir()
    (folder / ".hfq-journal.json.new").write_text("{")
    Journal(tmp_path / "out", {"bits": 4}, SIDE_FILES).close()
    assert set(content(folder)) == {".hfq-journal.json"}


def test_a_folder_that_was_renamed_meanwhile_is_not_used(tmp_path, monkeypatch):
    """Another process finished between the opening and the lock."""
    folder = begun(tmp_path / "out")
    before = content(folder)
    opened = os.open

    def open_and_rename(path, *arguments, **options):
        descriptor = opened(path, *arguments, **options)
        if path == folder:
            folder.rename(tmp_path / "out")
        return descriptor

    monkeypatch.setattr(os, "open", open_and_rename)
    with pytest.raises(hfq.SetupError, match="Another process"):
        Journal(tmp_path / "out", {"bits": 4}, SIDE_FILES)
    assert content(tmp_path / "out") == before
