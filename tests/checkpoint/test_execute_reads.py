"""A plan carried out: the file's own bytes in their places, whatever the threads and the disk do, and no
thread left behind.
"""

import errno
import hashlib
import itertools
import mmap
import os
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

from hfq.checkpoint import Checkpoint, Reader, read_plan
from hfq.checkpoint import execute_reads as execute
from hfq.checkpoint.execute_reads import cold_ranges, fill_page_cache, read_into_buffer
from hfq.checkpoint.filesystem import resident_fraction
from hfq.checkpoint.read_plan import ModuleRead, ReadBuffer, plan_reads
from hfq.tensor_spec import ByteRange
from tests.support.checkpoint_files import refused, stored_bytes

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8, torch.float8_e8m0fnu, torch.float32]


@pytest.fixture
def checkpoint(tmp_path):
    """Two files of tensors of many dtypes, from one byte to some hundred KiB."""
    generator = torch.Generator().manual_seed(0)
    for file in ("model-1.safetensors", "model-2.safetensors"):
        tensors = {}
        for index, dtype in enumerate(DTYPES):
            for size in (1, 1000 + index, 70_000):
                raw = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
                tensors[f"{file[6]}.{index}.{size}"] = raw.view(dtype)
        save_file(tensors, tmp_path / file)
    return Checkpoint.from_files(sorted(tmp_path.glob("*.safetensors")))


def planned(checkpoint, names=None, kind="private"):
    """A plan that reads these tensors, two to a row."""
    names = sorted(names or checkpoint.tensors)
    reads = [
        ModuleRead(
            name,
            "cpu",
            "read",
            "for a test",
            {local: checkpoint.tensors[local] for local in names[i : i + 2]},
            "arena",
        )
        for i, name in enumerate(names)
        if i % 2 == 0
    ]
    return plan_reads(reads, [ReadBuffer("arena", 0, kind)])


def arena_of(plan):
    (name,) = plan.buffers  # a staging arena's batches have numbers
    return name


def digests(plan, target):
    found = {}
    for read in plan.reads_into(arena_of(plan)):
        for local, segment in read.layout[0].items():
            start = read.offset + segment.offset
            found[local] = hashlib.sha256(target[start : start + segment.nbytes]).hexdigest()
    return found


def expected(checkpoint, names=None):
    return {
        name: hashlib.sha256(stored_bytes(checkpoint.tensors[name])).hexdigest()
        for name in names or checkpoint.tensors
    }


def memory(plan):
    return memoryview(bytearray(b"\xaa" * plan.buffers[arena_of(plan)].nbytes))


def no_threads():
    """Whether no reader is alive; one whose start was interrupted is given the time to end."""
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("hfq-read-") for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("chunk", [4096, 16 << 20])
def test_what_is_read_is_what_is_stored(checkpoint, threads, chunk, monkeypatch):
    monkeypatch.setattr(read_plan, "_MOST_BYTES", chunk)
    plan = planned(checkpoint)
    reader, target, steps = Reader(checkpoint), memory(plan), []
    read_into_buffer(plan, arena_of(plan), target, reader, threads, steps.append)
    assert digests(plan, target) == expected(checkpoint)
    assert reader.counters.bytes_read == plan.bytes_read == sum(steps) == plan.bytes_needed
    assert len(steps) == len(plan.requests[arena_of(plan)]) == reader.counters.calls
    assert (len(steps) > 100) is (chunk == 4096)
    assert no_threads()


def test_gaps_go_nowhere(checkpoint):
    names = [name for name in checkpoint.tensors if not name.endswith(".1000")][::2]
    plan, reader = planned(checkpoint, names), Reader(checkpoint)
    target = memory(plan)
    read_into_buffer(plan, arena_of(plan), target, reader)
    assert digests(plan, target) == expected(checkpoint, names)
    assert reader.counters.bytes_read == plan.bytes_read > plan.bytes_needed
    used = {
        byte
        for read in plan.reads_into(arena_of(plan))
        for segment in read.layout[0].values()
        for byte in range(read.offset + segment.offset, read.offset + segment.offset + segment.nbytes)
    }
    assert {value for byte, value in enumerate(target) if byte not in used} == {0xAA}


@pytest.mark.parametrize("threads", [1, 4])
def test_short_reads_are_continued(checkpoint, threads, monkeypatch):
    whole, lock, turns = os.preadv, threading.Lock(), iter(range(10**9))

    def short(fd, buffers, offset):
        with lock:
            turn = next(turns)
        first = buffers[0][: 1 + turn % 5000]
        return whole(fd, [first], offset) if turn % 3 else whole(fd, [*buffers[:2]], offset)

    monkeypatch.setattr(os, "preadv", short)
    plan, reader = planned(checkpoint), Reader(checkpoint)
    target = memory(plan)
    read_into_buffer(plan, arena_of(plan), target, reader, threads)
    assert digests(plan, target) == expected(checkpoint)
    assert reader.counters.bytes_read == plan.bytes_read
    assert reader.counters.calls > len(plan.requests[arena_of(plan)])


def test_the_first_error_ends_all_threads(checkpoint, monkeypatch):
    monkeypatch.setattr(read_plan, "_MOST_BYTES", 4096)
    whole, lock, callers = os.preadv, threading.Lock(), []

    def failing(fd, buffers, offset):
        with lock:
            callers.append(threading.current_thread())
            number = len(callers)
        if number == 10:
            raise OSError(errno.EIO, "Input/output error")
        if number > 10:
            callers[9].join(30)  # then its error is noted
        return whole(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    plan = planned(checkpoint)
    with refused("Input/output error", "cannot be read any more"):
        read_into_buffer(plan, arena_of(plan), memory(plan), Reader(checkpoint), 4)
    assert no_threads()
    assert 10 <= len(callers) <= 10 + 3
    assert len(plan.requests[arena_of(plan)]) > 100


@pytest.mark.parametrize("is_open", [False, True])
def test_a_truncated_file_is_an_error(checkpoint, is_open, monkeypatch):
    plan, reader = planned(checkpoint), Reader(checkpoint)
    file = sorted(checkpoint.headers)[1]
    if is_open:
        reader.descriptor(file)
    os.truncate(file, 100_000)
    with refused("changed while the model was using it", file=file):
        read_into_buffer(plan, arena_of(plan), memory(plan), reader, 4)
    assert no_threads()


def test_an_error_of_the_progress_callback_is_raised(checkpoint):
    def fail(_):
        raise ZeroDivisionError

    plan = planned(checkpoint)
    with pytest.raises(ZeroDivisionError):
        read_into_buffer(plan, arena_of(plan), memory(plan), Reader(checkpoint), 4, fail)
    assert no_threads()


def test_an_interrupt_ends_all_threads(checkpoint, monkeypatch):
    monkeypatch.setattr(read_plan, "_MOST_BYTES", 4096)
    whole, calls, main = os.preadv, itertools.count(1), threading.main_thread().ident
    is_raised = threading.Event()

    def interrupt(*_):
        is_raised.set()
        raise KeyboardInterrupt

    def interrupting(fd, buffers, offset):
        number = next(calls)
        if number == 5:
            signal.pthread_kill(main, signal.SIGINT)
        if number >= 5:
            is_raised.wait(30)
        threading.Event().wait(0.002)
        return whole(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", interrupting)
    plan, handler = planned(checkpoint), signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            read_into_buffer(plan, arena_of(plan), memory(plan), Reader(checkpoint), 4)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert no_threads()
    assert next(calls) <= len(plan.requests[arena_of(plan)])


def test_two_threads_are_at_work_at_once(checkpoint, monkeypatch):
    """The first two reads wait for each other: with one thread they would wait for ever."""
    meeting, whole, turns = threading.Barrier(2), os.preadv, iter(range(10**9))

    def meet(fd, buffers, offset):
        if next(turns) < 2:
            meeting.wait(30)
        return whole(fd, buffers, offset)

    monkeypatch.setattr(read_plan, "_MOST_BYTES", 4096)
    monkeypatch.setattr(os, "preadv", meet)
    plan = planned(checkpoint)
    read_into_buffer(plan, arena_of(plan), memory(plan), Reader(checkpoint), 2)


@pytest.fixture
def advice(monkeypatch):
    """The advice that was given, as (name, offset, bytes)."""
    names = {
        getattr(os, name): name.removeprefix("POSIX_FADV_")
        for name in dir(os)
        if name.startswith("POSIX_FADV_")
    }
    given = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _, offset, nbytes, kind: given.append((names[kind], offset, nbytes))
    )
    return given


def test_a_file_that_is_read_whole_is_read_ahead_and_a_part_is_not(checkpoint, advice):
    first = [name for name in checkpoint.tensors if name.startswith("1.")]
    one = "2.0.70000"
    plan = planned(checkpoint, [*first, one], kind="staging")
    read_into_buffer(plan, arena_of(plan), memory(plan), Reader(checkpoint))
    assert sorted(advice[:2]) == [("RANDOM", 0, 0), ("SEQUENTIAL", 0, 0)]
    assert advice[2:] == [("NORMAL", 0, 0)] * 2


@pytest.mark.parametrize("kind", ["private", "shared", "staging"])
@pytest.mark.parametrize("fraction", [0.0, 1.0, None])
def test_pages_are_let_go_behind_a_copy_that_stays_unless_they_were_cached_before(
    checkpoint, advice, kind, fraction, monkeypatch
):
    monkeypatch.setattr(execute, "resident_fraction", lambda *_: fraction)
    plan = planned(checkpoint, kind=kind)
    read_into_buffer(plan, arena_of(plan), memory(plan), Reader(checkpoint))
    dropped = [(offset, nbytes) for name, offset, nbytes in advice if name == "DONTNEED"]
    sources = [(request.source.offset, request.source.nbytes) for request in plan.requests[arena_of(plan)]]
    assert sorted(dropped) == (sorted(sources) if kind != "staging" and fraction == 0.0 else [])


def test_cold_ranges_are_found_and_brought_in(checkpoint):
    reader, steps = Reader(checkpoint), []
    ranges = [ByteRange(file, 0, header.nbytes) for file, header in checkpoint.headers.items()]
    for source in ranges:
        descriptor = os.open(source.file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    if any(resident_fraction(reader.descriptor(source.file), source) != 0 for source in ranges):
        pytest.skip("this file system does not let go of pages")
    fill_page_cache(ranges[:1], reader, progress=steps.append)
    assert cold_ranges(ranges, reader) == ranges[1:]
    fill_page_cache(ranges, reader, progress=steps.append)
    assert cold_ranges(ranges, reader) == []
    assert reader.counters.populated == sum(steps) == 2 * ranges[0].nbytes + ranges[1].nbytes
    assert reader.counters.bytes_read == 0


def test_windows_of_a_range_are_cold_by_their_own_pages(checkpoint, monkeypatch):
    """The range starts within a page; one request tells the pages of all its windows."""
    file, page = next(iter(checkpoint.headers)), mmap.PAGESIZE
    monkeypatch.setattr(execute, "WINDOW", 4 * page)
    source = ByteRange(file, 5 * page + 100, 12 * page)
    pages, asked = bytes([1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1]), []
    monkeypatch.setattr(execute, "resident_pages", lambda _, source: asked.append(source) or pages)
    first = source.offset + 4 * page
    assert cold_ranges([source], Reader(checkpoint)) == [ByteRange(file, first, 8 * page)]
    assert asked == [source]


def test_what_may_be_cold_is_brought_in(checkpoint, monkeypatch):
    monkeypatch.setattr(execute, "resident_pages", lambda *_: None)
    source = ByteRange(next(iter(checkpoint.headers)), 0, 8)
    assert cold_ranges([source], Reader(checkpoint)) == [source]


def test_a_file_truncated_before_it_is_brought_in_is_an_error(checkpoint):
    reader, file = Reader(checkpoint), next(iter(checkpoint.headers))
    reader.descriptor(file)
    os.truncate(file, 100_000)
    with refused("changed while the model was using it", file=file):
        fill_page_cache([ByteRange(file, 0, 200_000)], reader)
    assert no_threads()
