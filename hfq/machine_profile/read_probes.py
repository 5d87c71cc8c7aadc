"""Probes of file reads, alone and while the machine computes."""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hfq.machine_profile.machine_limits import CHUNK_NBYTES, read_files, reading_buffers
from hfq.machine_profile.product_probes import ProductProbe
from hfq.placement.estimate.pipeline import SideBySide

__all__ = ["BesideProbe", "ReadProbe"]

_LEAST_SHARE = 0.02


class ReadProbe:
    """Reads of a file, from the page cache or past it.

    Args:
        file: The file.
        is_direct: True to bypass the page cache if the file system supports it.
    """

    def __init__(self, file: Path, is_direct: bool) -> None:
        self.file, self.is_direct = file, is_direct and _seconds(file, True) is not None
        self.threads = 8 if self.is_direct else 4
        self._samples: list[float] = []

    def measure(self) -> None:
        """Adds a sample."""
        self._samples.append(_seconds(self.file, self.is_direct) or float("inf"))

    def forget(self) -> None:
        """Drops all samples."""
        self._samples.clear()

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.file.stat().st_size / statistics.median(self._samples)


class BesideProbe:
    """Slowdown of reading and computing at the same time.

    Args:
        product: Probe that computes.
        read: Probe of the file to read.
        seconds: Least duration of computing, both alone and while reading.
    """

    def __init__(self, product: ProductProbe, read: ReadProbe, seconds: float = 0.15) -> None:
        self._product = product
        self._read = read
        self._seconds = seconds
        self._samples: list[tuple[float, float]] = []

    def measure(self) -> None:
        """Adds a sample."""
        alone = self._compute()
        with _reading(self._read) as count:
            first, started = count[0], time.perf_counter()
            together = self._compute()
            read = (count[0] - first) / (time.perf_counter() - started)
        reading = self._read.file.stat().st_size / (
            _seconds(self._read.file, self._read.is_direct) or float("inf")
        )
        self._samples.append((_share(alone / together), _share(read / reading)))

    def forget(self) -> None:
        """Drops all samples."""
        self._samples.clear()

    @property
    def shares(self) -> SideBySide:
        """Medians of all samples."""
        computing, reading = zip(*self._samples, strict=True)
        return SideBySide(statistics.median(computing), statistics.median(reading))

    def _compute(self) -> float:
        """Returns the mean seconds of a product, over as many passes as fit the duration."""
        passes, started = [self._product.run()], time.perf_counter()
        while time.perf_counter() - started < self._seconds:
            passes.append(self._product.run())
        return statistics.mean(passes)


@contextmanager
def _reading(probe: ReadProbe) -> Iterator[list[int]]:
    """Reads a file repeatedly until the context ends. Yields a list of the bytes read so far."""
    descriptor = os.open(probe.file, os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if probe.is_direct else 0))
    whole = probe.file.stat().st_size // CHUNK_NBYTES * CHUNK_NBYTES or 1
    offsets = itertools.cycle(range(0, whole, CHUNK_NBYTES))
    stop = threading.Event()
    count = [0]
    lock = threading.Lock()

    def read(buffer: memoryview) -> None:
        for offset in offsets:  # implemented in C, so threads never get the same item
            if stop.is_set():
                return
            nbytes = os.preadv(descriptor, [buffer], offset)
            with lock:
                count[0] += nbytes

    threads = [
        threading.Thread(target=read, args=(buffer,), daemon=True)
        for buffer in reading_buffers(probe.threads)
    ]
    try:
        for thread in threads:
            thread.start()
        yield count
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        os.close(descriptor)


def _seconds(file: Path, is_direct: bool) -> float | None:
    return read_files([file], direct=is_direct, threads=8 if is_direct else 4)


def _share(value: float) -> float:
    return min(max(value, _LEAST_SHARE), 1.0)
