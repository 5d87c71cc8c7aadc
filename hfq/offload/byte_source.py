"""Reads of offloaded bytes: direct or buffered, with or without checksums."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
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
"""Bytes of one request of one reader thread."""

_BUFFERED_AT_ONCE = 4
"""Most buffered reads at a time. They copy on cores that also compute; direct reads only wait."""

_SHARE_OF_MEMORY = 0.5


class Source:
    """Reads page-aligned chunks of a checkpoint.

    `"direct"` reads bypass the page cache: memory stays bounded, and the disk reaches its full speed.
    `"buffered"` reads fill the page cache, so that a later pass finds the bytes there. `"auto"` is buffered
    if all offloaded bytes fit into half of the memory that is available when a pass begins, without that of
    mapped weights, and direct otherwise. Mapped weights are in the page cache too, and more reads would evict
    them.

    Args:
        reader: The checkpoint's reader.
        asked: `"auto"`, `"direct"`, or `"buffered"`.
        nbytes: The bytes of all offloaded weights.
        verify: Reads that are compared with the CRC-32 of `record`: `"off"`, `"first"` (the first read of
            each chunk), or `"always"`.
        names: The files with offloaded bytes. If one does not support direct reads, a warning says that reads
            are buffered.
        mapped_nbytes: The bytes of the weights that are mapped, which `available_memory` counts as available.

    Attributes:
        mode: Mode of the current pass.
        nbytes_read: The bytes read so far, without those read by `record`.
        on_read: Called in the reader thread after each chunk, with the start and the end of the read in
            seconds of `time.perf_counter`.
    """

    def __init__(
        self,
        reader: Reader,
        asked: str,
        nbytes: int,
        verify: str = "off",
        names: Collection[str] = (),
        mapped_nbytes: int = 0,
    ) -> None:
        self.reader, self.files = reader, DirectFiles(reader)
        self._asked = asked
        self._nbytes, self._mapped_nbytes = nbytes, mapped_nbytes
        self._verify = verify
        self._sums: dict[ByteRange, int] = {}
        self._lock, self._copying = threading.Lock(), threading.Semaphore(_BUFFERED_AT_ONCE)
        self._names, self._has_warned = tuple(names), False
        self.mode: Mode = "buffered"
        self.nbytes_read = 0
        self.on_read: Callable[[ByteRange, float, float], None] | None = None
        self.choose()

    def choose(self) -> None:
        """Chooses the mode of the next pass."""
        if self._asked == "auto":
            available = available_memory()
            fits = available is None or self._nbytes <= (available - self._mapped_nbytes) * _SHARE_OF_MEMORY
            self.mode = "buffered" if fits else "direct"
        else:
            self.mode = "direct" if self._asked == "direct" else "buffered"
        if self.mode == "direct" and not all(map(self.files.supports_direct, self._names)):
            self.mode = "buffered"
            if not self._has_warned:
                logger.warning(
                    "hfq: the file system of this checkpoint has no direct reads; reads are buffered"
                )
            self._has_warned = True

    def read(self, wanted: ByteRange, target: memoryview) -> None:
        """Fills `target` with a chunk.

        Args:
            wanted: The chunk; its offset is a multiple of 4096.
            target: Memory at an address that is a multiple of 4096, of the chunk's size rounded up to 4096.

        Raises:
            CheckpointError: The file was truncated, cannot be read, or (with `verify`) holds other bytes than
                at the load.
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

    def read_together(self, chunks: Sequence[tuple[ByteRange, memoryview]]) -> bool:
        """Fills several targets in one direct request.

        Args:
            chunks: Pairs of a chunk and its target, as in `read`, the target in whole pages. In the file,
                each chunk begins in the page in which the one before it ends, or with the next page. A page
                of two chunks is read once, and copied.

        Returns:
            False if the reads are not direct, are compared with checksums, or failed. Then the chunks must be
            read one by one.
        """
        if self.mode != "direct" or self._verify != "off":
            return False
        file, first, end = chunks[0][0].file, chunks[0][0].offset, chunks[0][0].offset
        parts, last = list[memoryview](), chunks[-1][0]
        for wanted, target in chunks:
            parts.append(target[end - wanted.offset :])
            end = wanted.offset + len(target)
        whole = ByteRange(file, first, last.offset + last.nbytes - first)
        started = time.perf_counter()
        if not self.files.read_parts(whole, [part for part in parts if len(part)]):
            return False
        ended = time.perf_counter()
        for (_, before), (_, target), part in zip(chunks, chunks[1:], parts[1:], strict=False):
            shared = len(target) - len(part)
            target[:shared] = before[len(before) - shared :]
        with self._lock:
            self.nbytes_read += whole.nbytes
        on_read = self.on_read
        for wanted, _ in chunks if on_read is not None else ():
            on_read(wanted, started, ended)  # type: ignore[misc]
        return True

    def record(self, chunks: Iterable[ByteRange], scratch: memoryview) -> None:
        """Reads chunks once and keeps their checksums for the comparison with later reads."""
        for wanted in chunks:
            self.reader.read_into(wanted, scratch[: wanted.nbytes])
            self._sums[wanted] = zlib.crc32(scratch[: wanted.nbytes])

    def reset_after_fork(self) -> None:
        """Makes new locks, since the child of a fork lacks the threads that held the old ones."""
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
                fix="Check the disk, download this file again, and load the model again.",
            )
        if self._verify == "first":
            self._sums.pop(wanted, None)
