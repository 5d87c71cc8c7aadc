"""Warning about more threads than the processors that this process may use."""

from __future__ import annotations

import functools
import logging
import math

import torch

from hfq.checkpoint.cgroups import cpu_quota

__all__ = ["threads_above_quota", "warn_of_threads"]

logger = logging.getLogger(__name__)


def threads_above_quota() -> tuple[int, float] | None:
    """Returns torch's threads and the quota of processors, or None if the threads fit into it.

    torch counts the processors of the machine. Where a cgroup allows the time of fewer, its threads stop one
    another: the kernel pauses all of them once the quota is used up, and each waits for the paused ones.
    """
    threads, quota = torch.get_num_threads(), cpu_quota()
    return (threads, quota) if quota is not None and threads > math.ceil(quota) else None


def warn_of_threads() -> None:
    """Logs a warning, once for each pair of numbers, of more threads than the quota allows."""
    above = threads_above_quota()
    if above is not None:
        _warn(*above)


@functools.cache
def _warn(threads: int, quota: float) -> None:
    logger.warning(
        "hfq: %d threads compute on a quota of %g CPUs, which a control group sets. "
        "Fix: OMP_NUM_THREADS=%d, or torch.set_num_threads(%d).",
        threads,
        quota,
        *2 * (math.ceil(quota),),
    )
