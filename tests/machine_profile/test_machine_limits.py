"""Tests of raw reads, dropping the page cache, and counting cached pages."""

import os

import pytest

from hfq import SetupError
from hfq.machine_profile import machine_limits as limits


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "CHUNK_NBYTES", 64 << 10)
    limits.reading_buffers.cache_clear()
    for index, size in enumerate((200_000, 1, 65_536)):
        (tmp_path / f"{index}.bin").write_bytes(os.urandom(size))
    yield sorted(tmp_path.iterdir())
    limits.reading_buffers.cache_clear()


def test_every_chunk_is_read_once(files, monkeypatch):
    counts = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: counts.append(real(*arguments)) or counts[-1])
    assert limits.read_files(files, direct=False, threads=2) > 0
    assert sum(counts) == 200_000 + 1 + 65_536


def test_direct_reads_are_measured_or_said_to_be_impossible(files):
    seconds = limits.read_files(files, direct=True)
    assert seconds is None or seconds > 0


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(SetupError, match="cannot be read"):
        limits.read_files([missing], direct=False)


def test_the_page_cache_is_filled_and_dropped(files):
    limits.read_files(files, direct=False)
    if limits.cached_share(files) is None:
        pytest.skip("the system cannot tell what is cached")
    assert limits.cached_share(files) == 1
    limits.drop_cache(files)
    if limits.cached_share(files) == 1:
        pytest.skip("this file system lives in memory")
    assert limits.cached_share(files) == 0
