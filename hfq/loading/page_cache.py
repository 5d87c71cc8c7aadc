"""Reads into the page cache while transformers still builds the meta model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.execute_reads import cold_ranges, fill_page_cache
from hfq.checkpoint.filesystem import is_network
from hfq.checkpoint.memory_limit import available_memory
from hfq.errors import HfqError
from hfq.loading.context import within_load
from hfq.tensor_spec import ByteRange

__all__ = ["PageCacheReads", "filling_page_cache"]

_SMALL = 64 << 20


class _Stopped(Exception):
    """Exception that ends the reads of a failed load."""


class PageCacheReads:
    """Background threads that read a checkpoint into the page cache.

    Errors are ignored here. The load meets them again and reports them.

    Attributes:
        populated: Bytes read so far.
        is_complete: True once all bytes are in the page cache.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._reader = Reader(checkpoint)
        self._ranges = [ByteRange(file, 0, header.nbytes) for file, header in checkpoint.headers.items()]
        self._lock, self._is_stopped = threading.Lock(), False
        self._report: Callable[[int], object] | None = None
        self.populated, self.is_complete = 0, False
        self._thread = threading.Thread(target=self._run, name="hfq-early", daemon=True)
        self._thread.start()

    def wait(self, report: Callable[[int], object]) -> None:
        """Waits until all bytes are read.

        Args:
            report: Called with numbers of bytes, first with those already read.
        """
        with self._lock:
            report(self.populated)
            self._report = report
        self._thread.join()

    def stop(self) -> None:
        """Ends the reads after the requests in progress."""
        self._is_stopped = True
        self._thread.join()

    def _run(self) -> None:
        try:
            fill_page_cache(cold_ranges(self._ranges, self._reader), self._reader, progress=self._note)
        except (_Stopped, HfqError, OSError):
            return
        self.is_complete = True

    def _note(self, nbytes: int) -> None:
        with self._lock:
            self.populated += nbytes
            if self._report is not None:
                self._report(nbytes)
        if self._is_stopped:
            raise _Stopped


@contextmanager
def filling_page_cache(checkpoint: Checkpoint | None, device_map: Any, cpu_memory: str) -> Iterator[None]:
    """Reads a checkpoint that will be mapped completely, until the load ends or fails.

    Nothing is read if a part is not on the CPU, or if the checkpoint is on a network file system or exceeds
    the available memory. Nothing is read if `cpu_memory` copies the weights, since the page cache would keep
    a second copy.
    """
    if (
        checkpoint is None
        or cpu_memory in ("private", "shared")
        or not _is_mapped_whole(checkpoint, device_map)
    ):
        yield
        return
    reads = PageCacheReads(checkpoint)
    try:
        with within_load(page_cache_reads=reads):
            yield
    finally:
        reads.stop()


def _is_mapped_whole(checkpoint: Checkpoint, device_map: Any) -> bool:
    whole = {"": "cpu" if device_map is None else device_map}
    devices = set(map(str, (device_map if isinstance(device_map, Mapping) else whole).values()))
    available = available_memory()
    fits = available is not None and _SMALL <= checkpoint.nbytes <= available
    return devices == {"cpu"} and fits and not any(map(is_network, checkpoint.headers))
