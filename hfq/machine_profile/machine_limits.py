"""Limits of the disk and of the page cache, from plain reads of files."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hfq.errors import SetupError
from hfq.offload.host_memory import huge_buffer

__all__ = ["CHUNK_NBYTES", "cached_share", "drop_cache", "read_files", "reading_buffers"]

CHUNK_NBYTES = 16 << 20
_PAGE = mmap.PAGESIZE


def read_files(files: Iterable[Path], *, direct: bool, threads: int = 4) -> float | None:
    """Reads whole files with plain reads, in 16 MiB pieces into reused buffers.

    Args:
        files: The files.
        direct: True to bypass the page cache (O_DIRECT, into 2 MiB pages).
        threads: Number of concurrent reads.

    Returns:
        Seconds, or None if the file system does not support direct reads.

    Raises:
        SetupError: A file cannot be read.
    """
    flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0)
    if direct and not hasattr(os, "O_DIRECT"):
        return None
    descriptors: dict[int, int] = {}
    errors: list[OSError] = []
    try:
        for file in files:
            descriptors[os.open(file, flags)] = file.stat().st_size
        chunks = iter(
            [(fd, offset) for fd, size in descriptors.items() for offset in range(0, size, CHUNK_NBYTES)]
        )
        buffers = reading_buffers(threads)
        readers = [threading.Thread(target=_read_chunks, args=(chunks, buffer, errors)) for buffer in buffers]
        started = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        seconds = time.perf_counter() - started
    except OSError as error:
        errors.append(error)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    if errors and direct:
        return None
    if errors:
        raise SetupError(
            "The checkpoint to measure with cannot be read.",
            found=errors[0],
            expected="readable files",
            fix="Check the disk.",
        ) from errors[0]
    return seconds


def drop_cache(files: Iterable[Path]) -> None:
    """Writes files to disk and drops their pages from the page cache.

    Pages that a process has mapped and touched stay.
    """
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_share(files: Iterable[Path]) -> float | None:
    """Returns the fraction of the files' pages in the page cache (mincore), or None if unknown."""
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (OSError, AttributeError):
        return None
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    cached = total = 0
    for file in files:
        pages = _pages_cached(file, mincore)
        if pages is None:
            return None
        cached, total = cached + sum(pages), total + len(pages)
    return cached / max(total, 1)


@functools.cache
def reading_buffers(threads: int) -> list[memoryview]:
    """Returns reusable memory to read into, one view per thread."""
    memory = memoryview(huge_buffer(threads * CHUNK_NBYTES).fill_(0).numpy())  # type: ignore[arg-type]
    return [memory[index * CHUNK_NBYTES : (index + 1) * CHUNK_NBYTES] for index in range(threads)]


def _read_chunks(chunks: Iterator[tuple[int, int]], buffer: memoryview, errors: list[OSError]) -> None:
    for descriptor, offset in chunks:  # shared: a list iterator never returns an item to two threads
        try:
            os.preadv(descriptor, [buffer], offset)
        except OSError as error:
            errors.append(error)
            return


def _pages_cached(file: Path, mincore: Callable[..., int]) -> list[int] | None:
    size = file.stat().st_size
    if size == 0:
        return []
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), size, access=mmap.ACCESS_COPY) as memory:
        pages = (ctypes.c_ubyte * -(-size // _PAGE))()
        start = ctypes.c_char.from_buffer(memory)
        failed = mincore(ctypes.addressof(start), size, pages)
        del start  # a map with pointers into it cannot be closed
    return None if failed else [page & 1 for page in pages]
