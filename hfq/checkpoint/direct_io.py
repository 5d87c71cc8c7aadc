"""Reads that pass by the page cache, or that touch it without read-ahead: what streaming from disk needs
beside `Reader`.
"""

from __future__ import annotations

import os
import threading
import weakref

from hfq.checkpoint.reader import Reader
from hfq.tensor_spec import ByteRange

__all__ = ["DIRECT_ALIGNMENT", "DirectFiles"]

DIRECT_ALIGNMENT = 4096
"""File offset, length and address of a direct read are multiples of so many bytes (a block of any common
disk).
"""

_O_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFiles:
    """A second pair of descriptors for each file of a reader: one for direct reads, one for reads without
    read-ahead.

    They are opened from the reader's own descriptor, so that they mean the file that was validated even when
    its name has been removed or given to another file since.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._opened: dict[tuple[str, int], int | None] = {}
        self._finalizer = weakref.finalize(self, _close, self._opened)

    def supports_direct(self, file: str) -> bool:
        """Whether the file system of a file takes direct reads."""
        return self._descriptor(file, _O_DIRECT) is not None

    def read_direct(self, source: ByteRange, target: memoryview) -> None:
        """Fills `target` from byte `source.offset` on, past the page cache.

        Args:
            source: The bytes that are needed; the offset is a multiple of 4096.
            target: At an address that is a multiple of 4096, its length a multiple of 4096 that is at least
                `source.nbytes`: what the file has beyond the range is read along.

        Raises:
            CheckpointError: The file ends before the range does, or cannot be read.
        """
        descriptor = self._descriptor(source.file, _O_DIRECT)
        done = 0
        while descriptor is not None and done < source.nbytes and done % DIRECT_ALIGNMENT == 0:
            try:
                count = os.preadv(descriptor, [target[done:]], source.offset + done)
            except OSError:
                break  # the plain read below says what is wrong, or gets along without direct reads
            if count <= 0:
                break
            done += count
            self._reader.count(bytes_read=count, calls=1)
        if done < source.nbytes:
            rest = ByteRange(source.file, source.offset + done, source.nbytes - done)
            self._reader.read_into(rest, target[done : source.nbytes])

    def read_scattered(self, source: ByteRange, target: memoryview) -> None:
        """Fills `target` with the bytes of `source` and reads no page beyond them; for single rows of large
        tables.

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
        """Closes all descriptors; a later read opens them again."""
        with self._lock:
            _close(self._opened)

    def reset_after_fork(self) -> None:
        """The child of a fork has none of the threads that held these locks."""
        self._lock = threading.Lock()
        self._reader.reset_after_fork()

    def _descriptor(self, file: str, flags: int) -> int | None:
        """The descriptor for these flags, or None where the system gives none."""
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
            return None  # no /proc, no permission any more, or a file system without direct reads
        if not flags and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return descriptor


def _close(opened: dict[tuple[str, int], int | None]) -> None:
    while opened:
        _, descriptor = opened.popitem()
        if descriptor is not None:
            os.close(descriptor)
