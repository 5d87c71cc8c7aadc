"""How streamed bytes are read: past the page cache or through it, checked or not."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from typing import Literal

from hfq.checkpoint import Reader
from hfq.checkpoint.direct_io import DirectFiles
from hfq.checkpoint.memory_limit import available_memory
from hfq.errors import CheckpointError
from hfq.offload.unit_layout import PAGE
from hfq.tensor_spec import ByteRange

__all__ = ["CHUNK_NBYTES", "Mode", "Source"]

logger = logging.getLogger("hfq")

Mode = Literal["direct", "buffered"]

CHUNK_NBYTES = 8 << 20
"""One request of one reader thread."""

_BUFFERED_AT_ONCE = 4
"""Buffered reads copy, on cores that compute too; direct reads only wait."""

_SHARE_OF_MEMORY = 0.5


class Source:
    """Reads page-aligned chunks of a checkpoint.

    `"direct"` reads pass by the page cache: memory stays bounded, and a disk gives all it has. `"buffered"`
    reads fill the page cache, so that a later pass finds the bytes there. `"auto"` is buffered where all that
    is streamed fits into half of the memory that is available when a pass begins, and direct where it does
    not.

    Args:
        reader: The checkpoint's reader.
        asked: `"auto"`, `"direct"`, `"buffered"`.
        nbytes: All that a pass streams.
        verify: Which reads are checked against the CRC-32 that `record` took: none, the first of each chunk,
            or all.
        names: The files that are streamed from; where one takes no direct reads, a warning says that reads
            are buffered.

    Attributes:
        mode: How the present pass reads.
        nbytes_read: What was read so far, without the bytes that `record` read.
        on_read: Called in the thread that has read a chunk, with the times of `time.perf_counter` when it
            began and was done.
    """

    def __init__(
        self, reader: Reader, asked: str, nbytes: int, verify: str = "off", names: Collection[str] = ()
    ) -> None:
        self.reader, self.files = reader, DirectFiles(reader)
        self._asked = asked
        self._nbytes = nbytes
        self._verify = verify
        self._sums: dict[ByteRange, int] = {}
        self._lock, self._copying = threading.Lock(), threading.Semaphore(_BUFFERED_AT_ONCE)
        self._names, self._has_warned = tuple(names), False
        self.mode: Mode = "buffered"
        self.nbytes_read = 0
        self.on_read: Callable[[ByteRange, float, float], None] | None = None
        self.choose()

    def choose(self) -> None:
        """Settles the mode of the next pass."""
        if self._asked == "auto":
            available = available_memory()
            fits = available is None or self._nbytes <= available * _SHARE_OF_MEMORY
            self.mode = "buffered" if fits else "direct"
        else:
            self.mode = "direct" if self._asked == "direct" else "buffered"
        if self.mode == "direct" and not all(map(self.files.supports_direct, self._names)):
            self.mode = "buffered"
            if not self._has_warned:
                logger.warning(
                    "hfq: the file system of this checkpoint takes no direct reads; they go through the page "
                    "cache"
                )
            self._has_warned = True

    def begin_pass(self) -> None:
        """Checks that the files are those that were loaded, and chooses the mode of the next pass.

        Raises:
            CheckpointError: The inode, size, or modification time of a file changed.
        """
        self.reader.check_unchanged(self._names)
        self.choose()

    def read(self, wanted: ByteRange, target: memoryview) -> None:
        """Fills `target` with a chunk.

        Args:
            wanted: The chunk; its offset is a multiple of 4096.
            target: At an address that is a multiple of 4096; as long as the chunk, rounded up to 4096.

        Raises:
            CheckpointError: The file was truncated, cannot be read, or (with `verify`) holds other bytes than
                it did.
        """
        is_direct = self.mode == "direct"
        with contextlib.nullcontext() if is_direct else self._copying:
            started = time.perf_counter()
            if is_direct:
                self.files.read_direct(wanted, target[: -(-wanted.nbytes // PAGE) * PAGE])
            else:
                self.reader.read_into(wanted, target[: wanted.nbytes])
            ended = time.perf_counter()
        with self._lock:
            self.nbytes_read += wanted.nbytes
        on_read = self.on_read
        if on_read is not None:
            on_read(wanted, started, ended)
        if self._verify != "off":
            self._check(wanted, target)

    def record(self, chunks: Iterable[ByteRange], scratch: memoryview) -> None:
        """Reads chunks once and keeps their checksums, which later reads are compared with."""
        for wanted in chunks:
            self.reader.read_into(wanted, scratch[: wanted.nbytes])
            self._sums[wanted] = zlib.crc32(scratch[: wanted.nbytes])

    def reset_after_fork(self) -> None:
        """The child of a fork has none of the threads that held these locks."""
        self._lock, self._copying = threading.Lock(), threading.Semaphore(_BUFFERED_AT_ONCE)
        self.files.reset_after_fork()

    @property
    def is_verified(self) -> bool:
        return self._verify != "off"

    def _check(self, wanted: ByteRange, target: memoryview) -> None:
        expected = self._sums.get(wanted)
        if expected is None:
            return
        found = zlib.crc32(target[: wanted.nbytes])
        if found != expected:
            raise CheckpointError(
                "Bytes on disk changed after the model was loaded.",
                file=wanted.file,
                expected=f"CRC-32 {expected:08x}",
                found=f"CRC-32 {found:08x} in {wanted.nbytes} bytes from byte {wanted.offset}",
                fix="check the disk; download this file again and load the model again",
            )
        if self._verify == "first":
            self._sums.pop(wanted, None)
