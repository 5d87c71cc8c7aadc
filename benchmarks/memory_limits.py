"""Copies in memory, touched pages, and a warm page cache."""

from __future__ import annotations

import functools
import mmap
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from hfq.machine_profile.machine_limits import read_files
from hfq.offload.host_memory import huge_buffer

__all__ = ["copy_rate", "touch", "warm_cache"]


@functools.cache
def copy_rate(nbytes: int = 256 << 20, times: int = 5) -> float:
    """Returns the best rate of copies in memory in bytes per second. Each byte is read and written."""
    source, target = huge_buffer(nbytes).fill_(1), huge_buffer(nbytes).fill_(2)
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return nbytes / best


def warm_cache(files: Iterable[Path]) -> None:
    """Reads files into the page cache."""
    read_files(files, direct=False)


def touch(tensors: Iterable[torch.Tensor]) -> int:
    """Reads one byte of every page of the tensors, and returns a checksum.

    Afterwards, all of their bytes are in memory.
    """
    total = 0
    for tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            total += int(flat[:: mmap.PAGESIZE].sum()) + int(flat[-1])
    return total
