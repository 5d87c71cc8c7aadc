"""Tests that leftovers of killed runs are removed, and all other files are left."""

import fcntl
import os
import tempfile

import pytest

from hfq.checkpoint.cleanup import find_leftovers


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with leftovers, and with what only looks like them; the folder of temporary files is
    another.
    """
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    folder = tmp_path / "models"
    (folder / ".packed.abcdefgh.tmp").mkdir(parents=True)
    (folder / ".packed.abcdefgh.tmp" / "model.safetensors").write_bytes(b"12345")
    (folder / ".model.safetensors.abcd1234.tmp").write_bytes(b"123")
    (folder / ".hfq-calibrate-abcd1234").write_bytes(b"1")
    (folder / ".model.headers.zip.abcd1234.tmp").write_bytes(b"12")
    (folder / ".notes.abcd1234.tmp").write_text("mine")
    (folder / "model.safetensors").write_bytes(b"1")
    nested = folder / ".deep.abcdefgh.tmp" / "below"
    nested.mkdir(parents=True)
    (tmp_path / "tmp" / "hfq-abcd1234").mkdir()
    (tmp_path / "tmp" / "hfq-nested12" / "my-model").mkdir(parents=True)
    (tmp_path / "tmp" / "hfq-nested12" / "my-model" / "config.json").write_bytes(b"1234")
    (tmp_path / "tmp" / "hfq-deeper12" / "my-model" / "below").mkdir(parents=True)
    return folder


def find(folder, **kwargs):
    found = find_leftovers([folder], **{"shared": folder / "none", "least_age": 0.0} | kwargs)
    return {leftover.path.name: leftover for leftover in found}


def test_leftovers_are_found_with_their_bytes_and_removed(folder):
    found = find(folder)
    sizes = {
        ".packed.abcdefgh.tmp": 5,
        ".model.safetensors.abcd1234.tmp": 3,
        ".hfq-calibrate-abcd1234": 1,
        "hfq-abcd1234": 0,
    }
    sizes |= {".model.headers.zip.abcd1234.tmp": 2, "hfq-nested12": 4}
    assert {name: leftover.nbytes for name, leftover in found.items()} == sizes
    for leftover in found.values():
        leftover.remove()
        leftover.remove()  # gone already
    assert find(folder) == {}
    assert {entry.name for entry in folder.iterdir()} == {
        ".notes.abcd1234.tmp",
        "model.safetensors",
        ".deep.abcdefgh.tmp",
    }


def test_what_is_young_or_open_is_left_alone(folder):
    assert find(folder, least_age=3600.0) == {}
    with (
        (folder / ".model.safetensors.abcd1234.tmp").open("rb"),
        (folder / ".packed.abcdefgh.tmp" / "model.safetensors").open("rb"),
        (folder.parent / "tmp" / "hfq-nested12" / "my-model" / "config.json").open("rb"),
    ):
        assert set(find(folder)) == {
            ".hfq-calibrate-abcd1234",
            ".model.headers.zip.abcd1234.tmp",
            "hfq-abcd1234",
        }


def test_shared_memory_without_a_lock_is_left_over(tmp_path, folder):
    shared = tmp_path / "shm"
    shared.mkdir()
    for name in ("used", "stale"):
        file = shared / f"hfq-{os.getuid()}-{name}"
        file.touch(0o600)
    with (shared / f"hfq-{os.getuid()}-used").open("rb+") as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        found = find_leftovers([], shared)
    assert [leftover.path.name for leftover in found if leftover.path.parent == shared] == [
        f"hfq-{os.getuid()}-stale"
    ]
