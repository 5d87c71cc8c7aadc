"""Bandwidth of the disk, with which the bandwidth of offloading is compared."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

from hfq.offload.byte_source import CHUNK_NBYTES, Source
from hfq.offload.host_memory import huge_buffer
from hfq.offload.reader_threads import Pool, Ticket
from hfq.offload.unit_layout import UnitLayout

__all__ = ["measure_limit"]

_THREADS = 8  # the same number as `OffloadOptions.threads`, for a fair comparison
_MOST_NBYTES = 1 << 30


def measure_limit(source: Source, layouts: Sequence[UnitLayout]) -> float | None:
    """Reads at most 1 GiB of offloaded bytes with direct reads of eight threads.

    Returns:
        Bytes per second, or None if the file system has no direct reads or nothing is offloaded.
    """
    wanted = [chunk for layout in layouts for run in layout.runs for chunk, _ in run.chunks(CHUNK_NBYTES)]
    if not wanted or not all(source.files.supports_direct(chunk.file) for chunk in wanted):
        return None
    wanted = wanted[: max(_MOST_NBYTES // CHUNK_NBYTES, 1)]
    buffer = huge_buffer(_THREADS * CHUNK_NBYTES)
    buffer.fill_(1)
    memory, pool = memoryview(buffer.numpy()), Pool(_THREADS)  # type: ignore[arg-type]
    places = [memory[index * CHUNK_NBYTES : (index + 1) * CHUNK_NBYTES] for index in range(_THREADS)]

    def track(index: int) -> None:
        for chunk in wanted[index::_THREADS]:
            source.files.read_direct(chunk, places[index][: -(-chunk.nbytes // 4096) * 4096])

    started = time.perf_counter()
    try:
        pool.submit(Ticket([functools.partial(track, index) for index in range(_THREADS)])).wait()
    finally:
        pool.close()
    return sum(chunk.nbytes for chunk in wanted) / (time.perf_counter() - started)
