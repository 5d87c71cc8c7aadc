"""Direct reads, which bypass the page cache, and reads without read-ahead."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence

from hfq.checkpoint.reader import Reader
from hfq.tensor_spec import ByteRange

__all__ = ["DIRECT_ALIGNMENT", "DirectFiles"]

DIRECT_ALIGNMENT = 4096
"""Alignment in bytes of a direct read's file offset, length, and address.

It is a multiple of the sector size of all common disks.
"""

_O_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFiles:
    """Descriptors for direct reads and for reads without read-ahead, two per file of a reader.

    They are opened from the reader's own descriptor. So they refer to the validated file, even if its name
    was removed or now belongs to another file.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._opened: dict[tuple[str, int], int | None] = {}
        self._finalizer = weakref.finalize(self, _close, self._opened)

    def supports_direct(self, file: str) -> bool:
        """Returns True if the file system of a file supports direct reads."""
        return self._descriptor(file, _O_DIRECT) is not None

    def read_direct(self, source: ByteRange, target: memoryview) -> None:
        """Reads from byte `source.offset` into `target`, bypassing the page cache.

        Args:
            source: The bytes to read. The offset is a multiple of 4096.
            target: Memory whose address and length are multiples of 4096, of at least `source.nbytes` bytes.
                Its end may receive bytes of the file that follow the range.

        Raises:
            CheckpointError: The file ends before the range does, or cannot be read.
        """
        descriptor = self._descriptor(source.file, _O_DIRECT)
        done = 0
        while descriptor is not None and done < source.nbytes and done % DIRECT_ALIGNMENT == 0:
            try:
                count = os.preadv(descriptor, [target[done:]], source.offset + done)
            except OSError:
                break  # the plain read below succeeds without direct I/O, or raises the error
            if count <= 0:
                break
            done += count
            self._reader.count(bytes_read=count, calls=1)
        if done < source.nbytes:
            rest = ByteRange(source.file, source.offset + done, source.nbytes - done)
            self._reader.read_into(rest, target[done : source.nbytes])

    def read_parts(self, source: ByteRange, targets: Sequence[memoryview]) -> bool:
        """Reads from byte `source.offset` into several parts of memory, by one request.

        Args:
            source: The bytes to read. The offset is a multiple of 4096.
            targets: Memory as in `read_direct`, filled one part after the other.

        Returns:
            False if the system has no direct reads, or read fewer bytes.
        """
        descriptor = self._descriptor(source.file, _O_DIRECT)
        if descriptor is None:
            return False
        try:
            count = os.preadv(descriptor, targets, source.offset)
        except OSError:
            return False
        self._reader.count(bytes_read=count, calls=1)
        return count >= source.nbytes

    def read_scattered(self, source: ByteRange, target: memoryview) -> None:
        """Reads the bytes of `source` into `target` without read-ahead, for rows of large matrices.

        Raises:
            CheckpointError: The file ends before the range does, or cannot be read.
        """
        descriptor, done = self._descriptor(source.file, 0), 0
        if descriptor is not None:
            try:
                done = os.preadv(descriptor, [target[: source.nbytes]], source.offset)
            except OSError:
                done = 0
            self._reader.count(bytes_read=done, calls=1)
        if done < source.nbytes:
            rest = ByteRange(source.file, source.offset + done, source.nbytes - done)
            self._reader.read_into(rest, target[done : source.nbytes])

    def close(self) -> None:
        """Closes all descriptors. A later read opens them again."""
        with self._lock:
            _close(self._opened)

    def reset_after_fork(self) -> None:
        """Replaces the locks in the child of a fork, where the threads that held them do not exist."""
        self._lock = threading.Lock()
        self._reader.reset_after_fork()

    def _descriptor(self, file: str, flags: int) -> int | None:
        """Returns the descriptor opened with these flags, or None if the system cannot open it."""
        with self._lock:
            key = file, flags
            if key not in self._opened:
                self._opened[key] = self._open(file, flags)
            return self._opened[key]

    def _open(self, file: str, flags: int) -> int | None:
        own = self._reader.descriptor(file)
        try:
            descriptor = os.open(f"/proc/self/fd/{own}", os.O_RDONLY | os.O_CLOEXEC | flags)
        except OSError:
            return None  # no /proc, permission lost, or a file system without direct reads
        if not flags and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor


def _close(opened: dict[tuple[str, int], int | None]) -> None:
    while opened:
        _, descriptor = opened.popitem()
        if descriptor is not None:
            os.close(descriptor)
