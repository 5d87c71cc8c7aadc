"""Execution of a read plan by several threads, without copies.

The first error stops all of them.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from hfq.checkpoint.filesystem import WINDOW, populate, resident_fraction, resident_pages
from hfq.checkpoint.read_plan import ReadPlan, Request, coalesce
from hfq.checkpoint.reader import Reader
from hfq.tensor_spec import ByteRange

__all__ = ["fill_page_cache", "cold_ranges", "read_all", "read_into_buffer"]

_WHOLE = 0.9
"""Least fraction of a file to be read for which the system's read-ahead pays off."""

_PIECE = 16 << 20

_COLD = 0.5
"""A range is cold if a smaller fraction of it is in the page cache."""

Progress = Callable[[int], object]


def read_into_buffer(
    plan: ReadPlan,
    buffer: str,
    target: memoryview,
    reader: Reader,
    threads: int = 4,
    progress: Progress | None = None,
) -> None:
    """Reads the flat buffers of one read buffer of a plan.

    Unless the buffer is a staging buffer, pages that were not cached before are dropped from the page cache
    after the read: the buffer replaces them.

    Args:
        plan: The plan.
        buffer: Name of the read buffer.
        target: Writable bytes, at least as many as the read buffer has.
        reader: Reader of the checkpoint.
        threads: Number of requests that run concurrently.
        progress: Called with the bytes of each finished request, by one thread at a time. None: not called.

    Raises:
        CheckpointError: A file changed or cannot be read. All threads have ended by then, also after an
            interrupt.
    """
    requests, flat = plan.requests[buffer], target.cast("B")
    gap = max(
        (nbytes for request in requests for offset, nbytes in request.targets if offset is None), default=0
    )
    scratch = memoryview(bytearray(gap))  # never read, so all threads share it
    files = {request.source.file for request in requests}
    is_copy = plan.buffers[buffer].kind != "staging"
    drop = {request.source for request in requests if is_copy and _is_cold(reader, request.source) is True}

    def read(request: Request) -> int:
        parts = [
            scratch[:n] if offset is None else flat[offset : offset + n] for offset, n in request.targets
        ]
        reader.read_vectored(request.source, parts)
        if request.source in drop:
            _advise(reader, request.source, "DONTNEED")
        return request.source.nbytes

    wanted = plan.bytes_by_file
    for file in files:
        size = reader.identity(file)[1]
        # read-ahead can double the bytes read if the next request is not adjacent
        _advise(reader, ByteRange(file, 0, 0), "SEQUENTIAL" if wanted[file] >= _WHOLE * size else "RANDOM")
    try:
        _run([partial(read, request) for request in requests], threads, progress)
    finally:
        for file in files:  # the advice also applies to maps of the file
            _advise(reader, ByteRange(file, 0, 0), "NORMAL")


def read_all(reader: Reader, jobs: Iterable[tuple[ByteRange, memoryview]], threads: int = 4) -> None:
    """Reads byte ranges in file order, each into its own memory.

    Args:
        reader: Reader of the checkpoint.
        jobs: Pairs of a range and writable bytes of its size.
        threads: Number of reads that run concurrently.

    Raises:
        CheckpointError: A file changed or cannot be read. All threads have ended by then.
    """

    def read(source: ByteRange, target: memoryview) -> int:
        reader.read_into(source, target)
        return source.nbytes

    ordered = sorted(jobs, key=lambda job: (job[0].file, job[0].offset))
    pieces = [
        (
            ByteRange(source.file, source.offset + done, min(_PIECE, source.nbytes - done)),
            target[done : done + _PIECE],
        )
        for source, target in ordered
        for done in range(0, source.nbytes, _PIECE)
    ]
    _run([partial(read, *piece) for piece in pieces], threads, None)


def cold_ranges(ranges: Iterable[ByteRange], reader: Reader) -> list[ByteRange]:
    """Returns the parts of ranges that are mostly missing from the page cache, or may be."""
    return coalesce((window for source in ranges for window in _cold_windows(source, reader)), 0)


def fill_page_cache(
    ranges: Iterable[ByteRange],
    reader: Reader,
    threads: int = 4,
    by_reading: bool = False,
    progress: Progress | None = None,
) -> None:
    """Reads ranges into the page cache at full disk speed, which saves page faults of maps.

    Args:
        ranges: The ranges.
        reader: Reader of the checkpoint.
        threads: Number of windows that are read concurrently.
        by_reading: See `filesystem.populate`.
        progress: See `read_into_buffer`.

    Raises:
        CheckpointError: A file was truncated, or cannot be read.
    """

    def fill_window(window: ByteRange) -> int:
        populate(reader.descriptor(window.file), window, by_reading)
        reader.count(populated=window.nbytes)
        return window.nbytes

    _run([partial(fill_window, window) for window in _windows(ranges)], threads, progress)


def _windows(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    return [
        ByteRange(source.file, source.offset + done, min(WINDOW, source.nbytes - done))
        for source in ranges
        for done in range(0, source.nbytes, WINDOW)
    ]


def _cold_windows(source: ByteRange, reader: Reader) -> Iterator[ByteRange]:
    """Yields the cold windows of a range; one call of the system tells them all."""
    pages = resident_pages(reader.descriptor(source.file), source)
    before = source.offset // mmap.PAGESIZE
    for window in _windows([source]):
        first, end = window.offset // mmap.PAGESIZE, -(-(window.offset + window.nbytes) // mmap.PAGESIZE)
        if pages is None or pages.count(1, first - before, end - before) < _COLD * (end - first):
            yield window


def _is_cold(reader: Reader, source: ByteRange) -> bool | None:
    fraction = resident_fraction(reader.descriptor(source.file), source)
    return None if fraction is None else fraction < _COLD


def _advise(reader: Reader, source: ByteRange, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        descriptor = reader.descriptor(source.file)
        os.posix_fadvise(descriptor, source.offset, source.nbytes, getattr(os, f"POSIX_FADV_{advice}"))


def _run(tasks: Sequence[Callable[[], int]], threads: int, progress: Progress | None) -> None:
    """Runs tasks, each returning its number of bytes. No thread outlives the call."""
    pending = iter(tasks)
    lock = threading.Lock()
    errors = list[BaseException]()

    def work() -> None:
        while True:
            with lock:
                task = None if errors else next(pending, None)
            if task is None:
                return
            try:
                done = task()
                if progress is not None:
                    with lock:
                        progress(done)
            except BaseException as error:
                errors.append(error)

    workers = [
        threading.Thread(target=work, name=f"hfq-read-{n}", daemon=True)
        for n in range(min(threads, len(tasks)))
    ]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except BaseException as error:  # an interrupt from the keyboard, or no more threads
        errors.append(error)
        raise
    finally:
        for worker in workers:  # one whose start was interrupted may still run; it sees the error and ends
            if worker.is_alive():
                worker.join()
    if errors:
        raise errors.pop(0)  # an error left in the list would keep its frames alive, and their buffers
