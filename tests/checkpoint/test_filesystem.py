"""Tests of file system types, page cache residency, and reads into the page cache."""

import errno
import os
import threading

import pytest

from hfq.checkpoint import filesystem
from hfq.checkpoint.filesystem import filesystem_type, is_network, populate, resident_fraction
from hfq.tensor_spec import ByteRange
from tests.support.checkpoint_files import refused

MIB = 1 << 20
MOUNTS = r"""22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:44 / /data rw master:3 shared:7 - nfs4 server:/export rw,vers=4.2
31 30 0:45 / /data/local rw - xfs /dev/sdb rw
32 22 0:46 / /data\040with\040blanks rw - fuse.sshfs host:/ rw
33 22 0:47 / /win rw - fuse.ntfs-3g /dev/sdc rw
34 22 0:48 / /over rw - ext4 /dev/sdd rw
35 34 0:49 / /over rw - lustre mgs:/fs rw
this line is damaged
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/home/model.safetensors", "ext4", False),
        ("/data/model.safetensors", "nfs4", True),
        ("/data", "nfs4", True),
        ("/database/model.safetensors", "ext4", False),
        ("/data/local/model.safetensors", "xfs", False),
        ("/data with blanks/model.safetensors", "fuse.sshfs", True),
        ("/win/model.safetensors", "fuse.ntfs-3g", False),
        ("/over/model.safetensors", "lustre", True),
    ],
)
def test_the_nearest_mount_gives_the_type(path, kind, network, monkeypatch):
    assert filesystem_type(path, MOUNTS) == kind
    monkeypatch.setattr(filesystem, "filesystem_type", lambda _: kind)
    assert is_network(path) is network


def test_links_are_followed(tmp_path):
    mounts = f"1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / {os.path.realpath(tmp_path)}/real rw - nfs x rw\n"
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert filesystem_type(tmp_path / "link" / "file", mounts) == "nfs"
    assert filesystem_type(tmp_path / "file", mounts) == "ext4"


def test_a_system_that_does_not_tell_is_taken_as_local(monkeypatch):
    assert filesystem_type("/x", "") is None
    monkeypatch.setattr(filesystem, "filesystem_type", lambda _: None)
    assert is_network("/x") is False


@pytest.fixture
def file(tmp_path):
    """(descriptor, path) of a file of 40 MiB and 3 bytes, all hole: its pages are brought in and let go as
    any others.
    """
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 40 * MIB + 3)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor, str(path)
    os.close(descriptor)


def evict(descriptor, source):
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_fraction(descriptor, source) != 0:
        pytest.skip("this file system does not let go of pages")


def check_brings_in(descriptor, source, fill, cold=None):
    """Every page of a cold range is in memory after `fill`; where the system takes pages back meanwhile,
    after another try.
    """
    for _ in range(5):
        evict(descriptor, cold or source)
        fill()
        if resident_fraction(descriptor, source) == 1:
            return
    pytest.fail(f"{resident_fraction(descriptor, source)} of the range were brought in")


@pytest.mark.parametrize("by_reading", [False, True])
def test_a_cold_range_is_brought_in_and_no_more_than_asked(file, by_reading):
    descriptor, path = file
    whole = ByteRange(path, 0, 40 * MIB + 3)
    source = ByteRange(path, 17, 17 * MIB)
    check_brings_in(descriptor, source, lambda: populate(descriptor, source, by_reading), cold=whole)
    assert resident_fraction(descriptor, whole) < 0.8  # the system may read some megabytes ahead


def test_the_last_bytes_are_brought_in(file):
    descriptor, path = file
    source = ByteRange(path, 39 * MIB + 5, MIB - 2)
    check_brings_in(descriptor, source, lambda: populate(descriptor, source))


def test_an_old_kernel_is_served_by_reading(file, monkeypatch):
    descriptor, path = file
    source, read, asked, counts = ByteRange(path, 0, 20 * MIB), os.preadv, [], []
    monkeypatch.setattr(filesystem, "_fault_in", lambda *arguments: asked.append(arguments) or False)
    monkeypatch.setattr(os, "preadv", lambda *arguments: counts.append(read(*arguments)) or counts[-1])

    def fill():
        asked.clear()
        counts.clear()
        populate(descriptor, source)

    check_brings_in(descriptor, source, fill)
    assert sum(counts) == 20 * MIB
    assert len(asked) == 1  # it is not asked again for the second window


@pytest.mark.parametrize("by_reading", [False, True])
def test_a_range_beyond_the_end_is_an_error(file, by_reading):
    descriptor, path = file
    with refused("changed while the model was using it", file=path):
        populate(descriptor, ByteRange(path, 39 * MIB, 2 * MIB), by_reading)


@pytest.mark.parametrize("by_reading", [False, True])
def test_a_file_that_is_cut_after_it_was_measured_is_an_error_and_no_signal(file, monkeypatch, by_reading):
    descriptor, path = file
    size = os.stat(path)
    os.truncate(path, 8 * MIB)  # after the first half of a window
    monkeypatch.setattr(os, "fstat", lambda _: size)
    with refused("changed while the model was using it", file=path):
        populate(descriptor, ByteRange(path, 0, 20 * MIB), by_reading)


def test_a_disk_that_fails_is_an_error(file, monkeypatch):
    descriptor, path = file

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with refused("Input/output error", file=path):
        populate(descriptor, ByteRange(path, 0, 8), by_reading=True)


def test_short_reads_are_continued(file, monkeypatch):
    descriptor, path = file
    whole, counts = os.preadv, []

    def short(fd, buffers, offset):
        counts.append(whole(fd, [buffers[0][:70_000]], offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", short)
    populate(descriptor, ByteRange(path, 3, MIB), by_reading=True)
    assert sum(counts) == MIB


def test_nothing_is_said_of_an_empty_range_or_of_somebody_elses_file(file, monkeypatch):
    descriptor, path = file
    assert resident_fraction(descriptor, ByteRange(path, 0, 0)) is None
    monkeypatch.setattr(filesystem, "_may_ask", lambda _: False)
    assert resident_fraction(descriptor, ByteRange(path, 0, 8)) is None


def test_pages_are_brought_in_by_threads_at_once(file):
    descriptor, path = file
    parts = [ByteRange(path, 10 * MIB * i, 10 * MIB) for i in range(4)]

    def fill():
        threads = [threading.Thread(target=populate, args=(descriptor, part)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    check_brings_in(descriptor, ByteRange(path, 0, 40 * MIB), fill)


def test_the_file_system_of_a_folder_has_a_type(tmp_path):
    if not os.path.exists("/proc/self/mountinfo"):
        pytest.skip("not Linux")
    assert filesystem_type(tmp_path)
