"""`write_safetensors`: what others read back, and that a failure or the end of the process leaves the old
file or the new.
"""

import errno
import os
import random
import signal
import subprocess

import pytest
import torch
from safetensors import safe_open

from hfq.checkpoint import read_header, write_safetensors
from hfq.tensor_spec import DTYPE_BITS
from tests.support import programs
from tests.support.checkpoint_files import refused

OLD = {"a": ("U8", (4,), b"old!")}
NEW = {"a": ("U8", (4,), b"new!")}
DTYPES = list(DTYPE_BITS)


@pytest.fixture
def path(tmp_path):
    """A folder's only file, with the old content."""
    write_safetensors(tmp_path / "model.safetensors", OLD)
    return tmp_path / "model.safetensors"


def content(path):
    with safe_open(path, "pt") as file:
        return {
            name: bytes(file.get_tensor(name).reshape(-1).view(torch.uint8).tolist())
            for name in file.keys()  # noqa: SIM118
        }


def assert_untouched(path):
    """The old file is as it was, and nothing lies beside it."""
    assert content(path) == {"a": b"old!"}
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_reads_every_dtype_as_it_was_written(tmp_path, dtype):
    data = bytes([1, 0] * 3 * DTYPE_BITS[dtype])[: 6 * DTYPE_BITS[dtype] // 8]
    size = write_safetensors(tmp_path / "x", {"t": (dtype, (3, 2), data)})
    assert size == os.path.getsize(tmp_path / "x")
    with safe_open(tmp_path / "x", "pt") as file:
        stored = file.get_slice("t")
        assert (stored.get_dtype(), stored.get_shape()) == (dtype, [3, 2])
    assert content(tmp_path / "x") == {"t": data}


def test_names_order_and_metadata_are_kept(tmp_path):
    tensors = {
        "z": ("U8", (1,), b"z"),
        "é": ("I16", (2,), memoryview(b"1234")),
        "none": ("F32", (0, 3), b""),
        "s": ("I8", (), b"s"),
    }
    write_safetensors(tmp_path / "x", tensors, {"format": "pt", "k": "ü\n"})
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"format": "pt", "k": "ü\n"}
    header = read_header(tmp_path / "x")
    assert list(header.tensors) == list(tensors)
    assert sorted(header.tensors.values(), key=lambda info: info.range.offset) == list(
        header.tensors.values()
    )
    assert content(tmp_path / "x") == {"z": b"z", "é": b"1234", "none": b"", "s": b"s"}


def test_the_data_starts_on_eight_bytes(tmp_path):
    for length in range(1, 10):
        write_safetensors(tmp_path / "x", {"n" * length: ("U8", (1,), b"x")})
        assert read_header(tmp_path / "x").data_start % 8 == 0


def test_a_file_may_hold_nothing(tmp_path):
    write_safetensors(tmp_path / "x", {})
    assert content(tmp_path / "x") == {}


def test_a_buffer_of_wider_elements_is_written_by_its_bytes(tmp_path):
    write_safetensors(tmp_path / "x", {"t": ("F32", (3,), memoryview(torch.ones(3).numpy()))})
    with safe_open(tmp_path / "x", "pt") as file:
        assert torch.equal(file.get_tensor("t"), torch.ones(3))


def test_an_old_file_is_replaced_and_readable_by_others(path):
    write_safetensors(path, NEW)
    assert content(path) == {"a": b"new!"}
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("data", [b"", b"new", b"new!!"])
def test_bytes_that_do_not_match_are_refused_before_anything_is_written(path, data, monkeypatch):
    monkeypatch.setattr("hfq.checkpoint.writer._replace", lambda *_, **__: pytest.fail("a file was made"))
    words = ("Nothing was written", "expected: 4 bytes for U8 [4]", f"found: {len(data)} bytes")
    with refused(*words, file=path, tensor="b"):
        write_safetensors(path, {**NEW, "b": ("U8", (4,), data)})
    assert_untouched(path)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_old_file_and_nothing_else(path, call, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with refused("Nothing was left behind", "found: No space left on device", file=path):
        write_safetensors(path, NEW)
    assert_untouched(path)


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_safetensors(path, NEW)
    assert_untouched(path)


def test_the_file_is_synced_before_it_takes_the_name(path, monkeypatch):
    calls, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), replace(*names)))
    write_safetensors(path, NEW)
    assert calls == ["fsync", "replace"]


def test_a_full_disk_midway_leaves_the_old_file_and_nothing_else(path):
    result = programs.run("write_on_full_disk", path)
    assert result.returncode == 0, result.stderr
    assert "Nothing was left behind" in result.stdout
    assert "found: File too large" in result.stdout
    assert_untouched(path)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with refused("could not be written", "No such file", file=tmp_path / "none" / "x"):
        write_safetensors(tmp_path / "none" / "x", NEW)
    assert os.listdir(tmp_path) == []


def test_a_folder_in_place_of_the_file_is_refused(tmp_path):
    (tmp_path / "x").mkdir()
    with refused("could not be written", "Is a directory", file=tmp_path / "x"):
        write_safetensors(tmp_path / "x", NEW)
    assert os.listdir(tmp_path) == ["x"]


def test_a_killed_writer_leaves_the_old_file_or_the_new_and_never_a_part(path):
    dice = random.Random(0)
    for finished in (0, 0, 0, 1, 2, 3, 4, 5):
        with programs.start("write_without_end", path) as child:
            assert [child.stdout.readline() for _ in range(finished + 1)][-1] == f"{finished}\n"
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(timeout=dice.uniform(0.0, 0.02))
            child.kill()
            assert child.wait() == -signal.SIGKILL
        header = read_header(path)
        data = path.read_bytes()[header.data_start :]
        assert data in (b"\1" * (4 << 20), b"\2" * (4 << 20)) or (data == b"old!" and not finished)


UNREADABLE = [
    pytest.param({"a": ("F4", (4,), b"")}, {}, id="four bits are no byte"),
    pytest.param({"a": ("U8", (-2, -2), b"1234")}, {}, id="negative sizes"),
    pytest.param({"a": ("U8", (4.0,), b"1234")}, {}, id="sizes that are no integers"),
    pytest.param({"a": ("F3", (4,), b"1234")}, {}, id="unknown dtype"),
    pytest.param({"a/b": ("U8", (4,), b"1234")}, {}, id="a path as a name"),
    pytest.param({"__metadata__": ("U8", (4,), b"1234")}, {}, id="a reserved name"),
    pytest.param({"a": ("U8", (4,), b"1234")}, {"k": 1}, id="metadata that is no string"),
    pytest.param({"a": ("U8", (4,), memoryview(b"1-2-3-4-")[::2])}, {}, id="bytes that do not lie in a row"),
]


@pytest.mark.parametrize(("tensors", "metadata"), UNREADABLE)
def test_what_cannot_be_read_back_is_refused(tmp_path, tensors, metadata):
    with refused("Nothing was written", file=tmp_path / "x"):
        write_safetensors(tmp_path / "x", tensors, metadata)
    assert os.listdir(tmp_path) == []
