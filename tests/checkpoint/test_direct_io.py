"""Direct reads and reads of single rows: the right bytes, or a named error, whatever the system does."""

import errno
import mmap
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.direct_io import DirectFiles
from hfq.tensor_spec import ByteRange
from tests.support.checkpoint_files import refused, write_raw

PAGE, SIZE = 4096, 40_000  # about ten pages; not a multiple
NOISE = random.Random(0).randbytes(SIZE)


@pytest.fixture
def file(tmp_path):
    header = {"a": {"dtype": "U8", "shape": [SIZE], "data_offsets": [0, SIZE]}}
    return write_raw(tmp_path / "model.safetensors", header, NOISE)


@pytest.fixture
def files(file):
    return DirectFiles(Reader(Checkpoint.open(file.parent)))


@pytest.fixture
def reader(files):
    return files._reader


def aligned(nbytes: int) -> memoryview:
    return memoryview(
        mmap.mmap(-1, max(-(-nbytes // PAGE) * PAGE, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    )


def direct(files, file, offset: int, nbytes: int) -> bytes:
    target = aligned(nbytes)
    files.read_direct(ByteRange(str(file), offset, nbytes), target)
    return bytes(target[:nbytes])


def scattered(files, file, offset: int, nbytes: int) -> bytes:
    target = memoryview(bytearray(nbytes))
    files.read_scattered(ByteRange(str(file), offset, nbytes), target)
    return bytes(target)


@pytest.mark.parametrize("offset", [0, PAGE, 4 * PAGE])
@pytest.mark.parametrize("nbytes", [1, 511, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 7])
def test_a_range_of_any_length_gives_its_bytes(files, file, offset, nbytes):
    assert direct(files, file, offset, nbytes) == file.read_bytes()[offset : offset + nbytes]


def test_the_tail_of_the_file_is_read_to_its_last_byte(files, reader, file):
    content = file.read_bytes()
    start = len(content) // PAGE * PAGE
    assert 0 < len(content) - start < PAGE
    for first in (start, start - PAGE):
        before = reader.counters.bytes_read
        assert direct(files, file, first, len(content) - first) == content[first:]
        assert reader.counters.bytes_read - before == len(content) - first


def test_whole_pages_are_read_and_counted_where_the_file_has_them(files, reader, file):
    if not files.supports_direct(str(file)):
        pytest.skip("no direct reads here")
    direct(files, file, PAGE, 10)
    assert (reader.counters.bytes_read, reader.counters.calls) == (PAGE, 1)


@settings(max_examples=40)
@given(offset=st.integers(0, SIZE), nbytes=st.integers(0, 3000))
def test_rows_at_odd_offsets_give_their_bytes_and_no_more_is_read(tmp_path_factory, offset, nbytes):
    folder = tmp_path_factory.getbasetemp() / "rows"
    folder.mkdir(exist_ok=True)
    file = folder / "model.safetensors"
    if not file.exists():
        write_raw(file, {"a": {"dtype": "U8", "shape": [SIZE], "data_offsets": [0, SIZE]}}, NOISE)
    content = file.read_bytes()
    nbytes = min(nbytes, len(content) - offset)
    files = DirectFiles(Reader(Checkpoint.open(folder)))
    assert scattered(files, file, offset, nbytes) == content[offset : offset + nbytes]
    assert files._reader.counters.bytes_read == nbytes


def without_direct(monkeypatch):
    """A file system that opens no file for direct reads."""
    really = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)


def test_a_file_system_without_direct_reads_is_read_through_the_page_cache(files, file, monkeypatch):
    without_direct(monkeypatch)
    assert not files.supports_direct(str(file))
    assert direct(files, file, PAGE, 5000) == file.read_bytes()[PAGE : PAGE + 5000]


def test_permission_lost_or_no_proc_leaves_the_descriptor_that_was_validated(
    files, reader, file, monkeypatch
):
    content = file.read_bytes()
    reader.descriptor(str(file))

    def refuse(path, flags, *rest, **more):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert direct(files, file, PAGE, 5000) == content[PAGE : PAGE + 5000]
    assert scattered(files, file, 77, 100) == content[77:177]


def test_permission_lost_before_the_first_read_is_a_named_error(files, file, monkeypatch):
    def refuse(path, flags, *rest, **more):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with refused("cannot be opened any more", "Permission denied", file=file):
        direct(files, file, 0, 10)


def faulty(monkeypatch, fault):
    """Lets `fault(really, descriptor, targets, offset)` stand for `os.preadv`."""
    really = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda descriptor, targets, offset: fault(really, descriptor, targets, offset)
    )


@pytest.mark.parametrize("most", [1, 100, PAGE])
@pytest.mark.parametrize("read", [direct, scattered])
def test_short_reads_are_taken_up_where_they_ended(files, file, monkeypatch, read, most):
    content = file.read_bytes()
    faulty(
        monkeypatch,
        lambda really, descriptor, targets, offset: really(descriptor, [targets[0][:most]], offset),
    )
    assert read(files, file, PAGE, PAGE + 300) == content[PAGE : 2 * PAGE + 300]


@pytest.mark.parametrize("error", [errno.EINTR, errno.EINVAL, errno.EAGAIN])
@pytest.mark.parametrize("read", [direct, scattered])
def test_an_error_of_the_direct_read_alone_is_got_over(files, file, monkeypatch, read, error):
    content, calls = file.read_bytes(), []

    def once(really, descriptor, targets, offset):
        calls.append(offset)
        if len(calls) == 1:
            raise OSError(error, os.strerror(error))
        return really(descriptor, targets, offset)

    faulty(monkeypatch, once)
    assert read(files, file, PAGE, 5000) == content[PAGE : PAGE + 5000]
    assert len(calls) == 2


@pytest.mark.parametrize("read", [direct, scattered])
def test_a_failing_disk_is_a_named_error_and_the_next_read_works(files, file, read):
    def fail(really, descriptor, targets, offset):
        raise OSError(errno.EIO, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        faulty(patch, fail)
        with refused(
            "cannot be read any more", "Input/output error", f"5000 bytes from byte {PAGE}", file=file
        ):
            read(files, file, PAGE, 5000)
    assert read(files, file, PAGE, 5000) == file.read_bytes()[PAGE : PAGE + 5000]


@pytest.mark.parametrize("kept", [0, PAGE, 2 * PAGE, 2 * PAGE + 100])
@pytest.mark.parametrize("read", [direct, scattered])
def test_a_truncated_file_is_a_named_error(files, file, read, kept):
    read(files, file, PAGE, 5000)
    os.truncate(file, kept)
    with refused("changed while the model was using it", file=file):
        read(files, file, PAGE, 5000)


def test_a_file_truncated_between_two_calls_of_one_read_is_a_named_error(files, file, monkeypatch):
    def cut(really, descriptor, targets, offset):
        count = really(descriptor, [targets[0][:PAGE]], offset)
        os.truncate(file, 2 * PAGE)
        return count

    faulty(monkeypatch, cut)
    with refused("changed while the model was using it", file=file):
        direct(files, file, PAGE, 3 * PAGE)


@pytest.mark.parametrize("read", [direct, scattered])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_file_that_is_unlinked_or_replaced_goes_on_giving_its_old_bytes(files, reader, file, read, is_open):
    content = file.read_bytes()
    reader.descriptor(str(file))
    if is_open:
        read(files, file, PAGE, 100)
    other = file.with_name("other")
    other.write_bytes(bytes(len(content)))
    os.replace(other, file)
    assert read(files, file, PAGE, 5000) == content[PAGE : PAGE + 5000]
    file.unlink()
    assert read(files, file, PAGE, 5000) == content[PAGE : PAGE + 5000]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_descriptors_are_closed_with_the_files_and_opened_again(file):
    reader = Reader(Checkpoint.open(file.parent))
    reader.descriptor(str(file))
    before = descriptors()
    files = DirectFiles(reader)
    expected = direct(files, file, 0, 100) + scattered(files, file, 5, 5)
    assert descriptors() == before + 2
    files.close()
    assert descriptors() == before
    assert direct(files, file, 0, 100) + scattered(files, file, 5, 5) == expected
    del files
    assert descriptors() == before
