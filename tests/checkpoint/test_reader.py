"""`Reader`: the file's own bytes by `pread` and by map, from any thread and process, and never those of
another file.
"""

import contextlib
import copy
import errno
import gc
import os
import threading
import weakref

import pytest

from hfq import HfqError
from hfq.checkpoint import Reader, reader
from hfq.tensor_spec import ByteRange, ByteRuns
from tests.support.checkpoint_files import refused, stored_bytes


def read(source, info):
    target = bytearray(info.nbytes)
    source.read_into(info.range, memoryview(target))
    return bytes(target)


def expected(checkpoint):
    return {name: stored_bytes(info) for name, info in checkpoint.tensors.items()}


def open_files():
    return [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]


def test_read_into_gives_the_bytes_of_the_file(checkpoint):
    source = Reader(checkpoint)
    assert {name: read(source, info) for name, info in checkpoint.tensors.items()} == expected(checkpoint)


def test_counters_count_bytes_and_calls_and_maps(checkpoint):
    source = Reader(checkpoint)
    assert (source.counters.bytes_read, source.counters.calls, source.counters.maps) == (0, 0, 0)
    for name in ("small", "tiny", "small"):
        read(source, checkpoint.tensors[name])
    assert (source.counters.bytes_read, source.counters.calls, source.counters.maps) == (64 + 2 + 64, 3, 0)
    file = checkpoint.tensors["tiny"].range.file
    assert source.map(file) is source.map(file)
    assert (source.counters.bytes_read, source.counters.calls, source.counters.maps) == (64 + 2 + 64, 3, 1)


def test_a_map_lasts_as_long_as_something_refers_to_it(checkpoint):
    source, file = Reader(checkpoint), checkpoint.tensors["tiny"].range.file
    view = memoryview(source.map(file))
    assert source.map(file) is view.obj
    ended = weakref.ref(view.obj)
    del view
    assert ended() is None
    assert source.map(file) is not None
    assert source.counters.maps == 2


def test_an_empty_range_is_read_without_a_call(checkpoint):
    source = Reader(checkpoint)
    source.read_into(ByteRange(checkpoint.tensors["tiny"].range.file, 8, 0), memoryview(bytearray()))
    assert source.counters.calls == 0


def test_a_read_larger_than_one_call_is_whole(checkpoint, monkeypatch):
    monkeypatch.setattr(reader, "_MOST_BYTES_A_CALL", 100_000)
    source = Reader(checkpoint)
    assert read(source, checkpoint.tensors["big"]) == stored_bytes(checkpoint.tensors["big"])
    assert source.counters.calls == 3


def test_a_read_that_the_system_cuts_short_is_continued(checkpoint, monkeypatch):
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:7]], offset))
    source = Reader(checkpoint)
    assert read(source, checkpoint.tensors["small"]) == stored_bytes(checkpoint.tensors["small"])
    assert source.counters.calls == 10


def runs_of(checkpoint, start: int, stop: int) -> tuple[ByteRuns, bytes]:
    """Columns of `big`, uint8 [512, 512], and their bytes."""
    info, stored = checkpoint.tensors["big"], stored_bytes(checkpoint.tensors["big"])
    columns = b"".join(stored[row + start : row + stop] for row in range(0, len(stored), 512))
    return ByteRuns(info.range.file, info.range.offset + start, stop - start, 512, 512), columns


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (100, 300), (511, 512)])
def test_runs_are_read_one_after_another_and_nothing_between_them(checkpoint, start, stop):
    source, (runs, columns) = Reader(checkpoint), runs_of(checkpoint, start, stop)
    target = bytearray(len(columns))
    source.read_runs(runs, memoryview(target))
    assert bytes(target) == columns
    assert (source.counters.bytes_read, source.counters.calls) == (len(columns), 512)


def test_a_run_that_the_system_cuts_short_is_continued(checkpoint, monkeypatch):
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:70]], offset))
    source, (runs, columns) = Reader(checkpoint), runs_of(checkpoint, 100, 200)
    target = bytearray(len(columns))
    source.read_runs(runs, memoryview(target))
    assert bytes(target) == columns
    assert source.counters.bytes_read == len(columns)


def test_runs_of_a_file_that_was_truncated_are_refused(folder, checkpoint):
    source, (runs, columns) = Reader(checkpoint), runs_of(checkpoint, 100, 200)
    target = memoryview(bytearray(len(columns)))
    source.read_runs(runs, target)
    os.truncate(folder / "model.safetensors", runs.offset + 512 * 7 + 50)
    with refused(
        "changed while the model was using it", f"found: {runs.offset + 512 * 7 + 50} bytes", file=runs.file
    ):
        source.read_runs(runs, target)


def test_a_map_is_the_whole_file(checkpoint):
    file = checkpoint.tensors["tiny"].range.file
    with open(file, "rb") as stream:
        assert Reader(checkpoint).map(file)[:] == stream.read()


def test_what_is_written_to_a_map_stays_in_this_process(checkpoint):
    info, before = checkpoint.tensors["small"], expected(checkpoint)
    source = Reader(checkpoint)
    mapped = source.map(info.range.file)
    mapped[info.range.offset : info.range.offset + 4] = b"\xff\xff\xff\xff"
    assert mapped[info.range.offset : info.range.offset + 4] == b"\xff\xff\xff\xff"
    assert expected(checkpoint) == before
    assert read(source, info) == before["small"]


def test_a_file_truncated_while_it_is_open_is_refused(folder, checkpoint):
    source, info = Reader(checkpoint), checkpoint.tensors["big"]
    read(source, info)
    os.truncate(folder / "model.safetensors", info.range.offset + 1000)
    with refused(
        "changed while the model was using it",
        f"found: {info.range.offset + 1000} bytes",
        file=info.range.file,
    ):
        read(source, info)
    with refused("changed while the model was using it", file=info.range.file):
        source.map(info.range.file)


def test_a_file_truncated_before_it_is_opened_is_refused(folder, checkpoint):
    os.truncate(folder / "model.safetensors", 1000)
    for touch in (
        lambda: Reader(checkpoint).map(str(folder / "model.safetensors")),
        lambda: read_tiny(checkpoint),
    ):
        with refused("changed while the model was using it", file=folder / "model.safetensors"):
            touch()


def read_tiny(checkpoint):
    return read(Reader(checkpoint), checkpoint.tensors["tiny"])


def replace_by_another(path):
    content = path.read_bytes()
    path.with_suffix(".new").write_bytes(content[:-1] + b"x")
    os.replace(path.with_suffix(".new"), path)


def overwrite_in_place(path):
    with open(path, "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"x")
    os.utime(path, ns=(0, 0))


@pytest.mark.parametrize("change", [replace_by_another, overwrite_in_place])
def test_a_file_changed_between_open_and_first_read_is_refused(folder, checkpoint, change):
    change(folder / "model.safetensors")
    with refused(
        "changed while the model was using it", "(inode, size, mtime)", file=folder / "model.safetensors"
    ):
        read_tiny(checkpoint)
    assert str(folder / "model.safetensors") not in open_files()


def test_a_file_removed_between_open_and_first_read_is_refused(folder, checkpoint):
    os.unlink(folder / "model.safetensors")
    with refused("cannot be opened any more", "No such file", file=folder / "model.safetensors"):
        read_tiny(checkpoint)


def test_a_file_replaced_after_the_first_read_is_still_the_one_that_was_validated(folder, checkpoint):
    before, source = expected(checkpoint), Reader(checkpoint)
    read(source, checkpoint.tensors["tiny"])
    replace_by_another(folder / "model.safetensors")
    assert {name: read(source, info) for name, info in checkpoint.tensors.items()} == before
    assert expected(checkpoint) != before


def test_a_read_only_target_is_not_written(checkpoint):
    with pytest.raises(BufferError):
        Reader(checkpoint).read_into(checkpoint.tensors["tiny"].range, memoryview(bytes(2)))


def test_no_byte_beyond_the_source_is_read(checkpoint):
    info, target = checkpoint.tensors["small"], bytearray(checkpoint.tensors["small"].nbytes + 8)
    with contextlib.suppress(HfqError, ValueError):
        Reader(checkpoint).read_into(info.range, memoryview(target))
    assert bytes(target[-8:]) == bytes(8)


def test_a_disk_that_fails_is_named(checkpoint, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with refused("Input/output error", file=checkpoint.tensors["tiny"].range.file):
        read_tiny(checkpoint)


def test_a_file_is_opened_once_and_closed_with_the_reader(checkpoint):
    file = checkpoint.tensors["tiny"].range.file
    source = Reader(checkpoint)
    assert open_files().count(file) == 0
    for info in checkpoint.tensors.values():
        read(source, info)
    assert open_files().count(file) == 1
    del source
    gc.collect()
    assert open_files().count(file) == 0


def test_a_deep_copy_is_the_reader_itself(checkpoint):
    source = Reader(checkpoint)
    assert copy.deepcopy({"reader": source})["reader"] is source


def test_threads_that_read_at_once_get_the_right_bytes(checkpoint):
    source, right, wrong = Reader(checkpoint), expected(checkpoint), []
    start = threading.Barrier(8)

    def work(seed):
        start.wait()
        names = sorted(right)
        for turn in range(60):
            name = names[(seed + turn) % len(names)]
            if read(source, checkpoint.tensors[name]) != right[name]:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert open_files().count(checkpoint.tensors["tiny"].range.file) == 1


def test_parent_and_child_of_a_fork_read_the_right_bytes_at_once(checkpoint):
    source, right = Reader(checkpoint), expected(checkpoint)
    read(source, checkpoint.tensors["tiny"])
    child = os.fork()
    if not child:
        try:
            good = all(
                read(source, checkpoint.tensors[name]) == right[name] for name in ["small", "tiny"] * 200
            )
            os._exit(0 if good else 1)
        finally:
            os._exit(2)
    good = all(read(source, checkpoint.tensors[name]) == right[name] for name in ["big", "small"] * 50)
    _, status = os.waitpid(child, 0)
    assert (good, os.waitstatus_to_exitcode(status)) == (True, 0)
