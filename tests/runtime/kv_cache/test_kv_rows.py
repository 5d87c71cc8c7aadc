"""Tests of the rows of a layer in memory and in a file."""

import errno
import os
import zlib

import pytest
import torch

from hfq.errors import CheckpointError, SetupError
from hfq.runtime.kv_cache import kv_rows
from hfq.runtime.kv_cache.kv_rows import FileRows, MemoryRows


def allocate(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


@pytest.fixture(params=["memory", "file"])
def rows(request, tmp_path):
    return MemoryRows(6, allocate) if request.param == "memory" else FileRows(6, tmp_path / "rows.kv")


def some(count, first=0):
    return torch.arange(first, first + count * 6, dtype=torch.uint8).view(count, 6)


def test_rows_are_read_as_they_were_appended(rows):
    for first, count in ((0, 3), (3, 1), (4, 20)):
        rows.append(some(count, first * 6))
    assert rows.nbytes == 144
    assert torch.equal(rows.read(allocate), some(24).view(-1))


def test_rows_past_the_count_are_overwritten(rows):
    rows.append(some(4))
    rows.count = 2
    rows.append(some(1, 100))
    assert torch.equal(rows.read(allocate).view(3, 6), torch.cat([some(2), some(1, 100)]))


def test_rewritten_rows_may_have_another_size(rows, monkeypatch):
    monkeypatch.setattr(kv_rows, "_CHUNK_NBYTES", 13)  # two rows
    rows.append(some(5))
    rows.rewrite(lambda each: torch.cat([each, each], 1), 12)
    rows.append(torch.zeros(1, 12, dtype=torch.uint8))
    found = rows.read(allocate).view(6, 12)
    assert torch.equal(found[:5], torch.cat([some(5), some(5)], 1))
    assert not found[5].any()


def test_a_file_resumes_with_the_rows_that_it_is_told(tmp_path):
    FileRows(6, tmp_path / "rows.kv").append(some(4))
    assert torch.equal(FileRows(6, tmp_path / "rows.kv", 3).read(allocate), some(3).view(-1))


def test_a_checksum_reads_only_rows_that_it_has_not_seen(tmp_path, monkeypatch):
    def checksum(rows, expected, reads):
        read.clear()
        assert rows.checksum() == zlib.crc32(expected.numpy().tobytes())
        assert read == reads

    read, read_into = [], FileRows._read_into
    monkeypatch.setattr(kv_rows, "_CHUNK_NBYTES", 13)  # two rows
    monkeypatch.setattr(
        FileRows, "_read_into", lambda rows, target, at: (read.append(at), read_into(rows, target, at))
    )
    rows = FileRows(6, tmp_path / "rows.kv")
    rows.append(some(3))
    checksum(rows, some(3), [0, 12])
    checksum(rows, some(3), [])
    rows.append(some(1, 18))
    checksum(rows, some(4), [18])
    rows.count = 2  # as a crop does
    checksum(rows, some(2), [0])
    rows.count = 1
    rows.append(some(2, 100))
    checksum(rows, torch.cat([some(1), some(2, 100)]), [0, 12])
    rows.rewrite(lambda each: each + 1, 6)
    checksum(rows, torch.cat([some(1), some(2, 100)]) + 1, [0, 12])


def test_a_truncated_file_is_refused(tmp_path):
    rows = FileRows(6, tmp_path / "rows.kv")
    rows.append(some(4))
    os.truncate(tmp_path / "rows.kv", 20)
    with pytest.raises(CheckpointError, match="too short") as caught:
        rows.read(allocate)
    assert (caught.value.expected, caught.value.found) == ("24 B", "20 B")
    with pytest.raises(CheckpointError, match="too short"):
        FileRows(6, tmp_path / "rows.kv", 4)


def test_a_full_disk_keeps_the_earlier_rows(tmp_path, monkeypatch):
    rows = FileRows(6, tmp_path / "rows.kv")
    rows.append(some(2))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(SetupError, match="cannot be written"):
        patched.setattr(os, "pwrite", full)
        rows.append(some(1))
    assert torch.equal(rows.read(allocate), some(2).view(-1))


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SetupError, match="cannot be opened") as caught:
        FileRows(6, tmp_path / "missing" / "rows.kv")
    assert caught.value.found == "No such file or directory"
