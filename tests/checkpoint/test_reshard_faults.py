"""`reshard_checkpoint` when something is in the way: a named error, and nothing left behind."""

import errno
import os
import shutil
from pathlib import Path

import pytest

import hfq
from hfq.checkpoint import write_checkpoint as folder
from hfq.checkpoint.reshard import reshard_checkpoint
from tests.support import programs
from tests.support.checkpoint_files import refused
from tests.support.reshard_files import ODD, assert_nothing_left, assert_packed, made_up


@pytest.fixture
def odd(tmp_path):
    return made_up(tmp_path / "source", ODD, {"format": "pt", "note": "ü"})


def test_a_link_out_of_the_folder_is_refused(tmp_path, odd):
    (tmp_path / "secret").write_text("x")
    (Path(odd.root) / "notes.txt").symlink_to(tmp_path / "secret")
    with refused("is outside its folder"):
        reshard_checkpoint(odd, tmp_path / "packed")
    assert_nothing_left(tmp_path, "secret")


def test_a_pipe_among_the_files_is_refused_and_not_waited_for(tmp_path, odd):
    os.mkfifo(Path(odd.root) / "pipe")
    with refused("cannot be copied", "not a regular file", file=Path(odd.root) / "pipe"):
        reshard_checkpoint(odd, tmp_path / "packed")
    assert_nothing_left(tmp_path)


def test_a_target_that_is_taken_is_refused_and_left_alone(tmp_path, odd):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "file").write_text("x")
    for name, found in (("full", "a folder with content"), ("file", "a file")):
        with refused("cannot be used", f"found: {found}", file=tmp_path / name):
            reshard_checkpoint(odd, tmp_path / name)
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file").read_text() == "x"
    assert_nothing_left(tmp_path, "full", "file")


def test_a_mount_point_is_refused_before_the_wrong_disk_is_filled(tmp_path, odd, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "disk")
    with refused("cannot be used", "found: a mount point", str(tmp_path / "disk" / "new")):
        reshard_checkpoint(odd, tmp_path / "disk")


@pytest.mark.parametrize("inside", ["source", "source/packed", "link/packed"])
def test_a_target_within_the_source_is_refused(tmp_path, odd, inside):
    (tmp_path / "link").symlink_to("source")
    before = sorted(os.listdir(odd.root))
    with refused("cannot be written into its source"):
        reshard_checkpoint(odd, tmp_path / inside)
    assert sorted(os.listdir(odd.root)) == before


def test_a_target_without_a_parent_is_refused(tmp_path, odd):
    with refused("parent folder of the new checkpoint does not exist", file=tmp_path / "none" / "packed"):
        reshard_checkpoint(odd, tmp_path / "none" / "packed")
    assert_nothing_left(tmp_path)


def test_a_short_disk_is_found_before_anything_is_copied(tmp_path, odd, monkeypatch):
    calls = []

    def allocate(descriptor, offset, nbytes):
        calls.append(nbytes)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(folder.Reader, "read_into", lambda *_: pytest.fail("something was copied"))
    with refused(
        "Nothing was left behind", "bytes of free space", "No space left on device; ", "bytes were free"
    ) as caught:
        reshard_checkpoint(odd, tmp_path / "packed")
    assert int(caught.value.expected.split()[0]) > odd.nbytes
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("system", ["without the call", "that cannot", "that cannot, and is full"])
def test_the_free_space_decides_on_a_system_that_cannot_reserve(tmp_path, odd, monkeypatch, system):
    def unsupported(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    if system == "without the call":
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", unsupported)
    if "full" in system:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6 - 5, 5))
        with refused("Nothing was left behind", "5 bytes were free"):
            reshard_checkpoint(odd, tmp_path / "packed")
        assert_nothing_left(tmp_path)
    else:
        reshard_checkpoint(odd, tmp_path / "packed")
        assert_packed(odd.root, tmp_path / "packed")


def test_a_real_limit_leaves_nothing_behind(tmp_path, odd):
    result = programs.run("reshard_on_full_disk", odd.root, tmp_path / "packed")
    assert result.returncode == 0, result.stderr
    assert "found: File too large; " in result.stdout
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("call", ["fsync", "rename", "posix_fallocate"])
@pytest.mark.parametrize(
    "fault", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error"), ZeroDivisionError()]
)
def test_whatever_interrupts_leaves_nothing_behind(tmp_path, odd, monkeypatch, call, fault):
    def fail(*_):
        raise fault

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(hfq.CheckpointError if isinstance(fault, OSError) else type(fault)):
        reshard_checkpoint(odd, tmp_path / "packed")
    assert_nothing_left(tmp_path)


def test_a_progress_that_raises_leaves_nothing_behind(tmp_path, odd):
    def interrupt(nbytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reshard_checkpoint(odd, tmp_path / "packed", interrupt)
    assert_nothing_left(tmp_path)


def cut_short(path):
    os.truncate(path, path.stat().st_size - 1)


def rewrite(path):
    with open(path, "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"!")
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("moment", ["before", "midway"])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("change", [cut_short, rewrite, os.unlink])
def test_a_source_that_changes_is_refused(tmp_path, odd, change, file, moment, monkeypatch):
    path = Path(odd.root) / file
    if file == "config.json":
        path.write_text('{"a": 1}')
    changes = [lambda: change(path)]
    if moment == "before":
        reserve = folder._reserve
        monkeypatch.setattr(
            folder, "_reserve", lambda *args, **options: (reserve(*args, **options), changes.pop()())
        )
        pack_it = [None]
    else:
        pack_it = [lambda nbytes: changes and changes.pop()()]
    with refused(kind=hfq.CheckpointError, file=path):
        reshard_checkpoint(odd, tmp_path / "packed", *pack_it)
    assert not changes
    assert_nothing_left(tmp_path)


def test_a_copy_that_does_not_read_back_is_refused(tmp_path, odd, monkeypatch):
    sync = os.fsync

    def spoil(descriptor):
        """Stands for a disk that gives back other bytes: every float32 has become an int32."""
        raw = os.pread(descriptor, 4096, 0)
        if b'"F32"' in raw:
            os.pwrite(descriptor, raw.replace(b'"F32"', b'"I32"'), 0)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", spoil)
    with refused("does not read back", "expected: F32", "found: I32", tensor="lm_head.bias"):
        reshard_checkpoint(odd, tmp_path / "packed")
    assert_nothing_left(tmp_path)


def test_a_killed_pack_never_leaves_a_part_under_the_name(tmp_path, odd):
    assert programs.run("reshard_until_killed", odd.root, tmp_path / "packed").returncode == -9
    assert not (tmp_path / "packed").exists()
    reshard_checkpoint(odd, tmp_path / "packed")
    assert_packed(odd.root, tmp_path / "packed")
