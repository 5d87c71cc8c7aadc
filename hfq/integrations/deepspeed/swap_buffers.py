"""The memory that shards on NVMe are swapped into: how many buffers of which size, so that every parameter
fits and none is idle.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

from hfq.errors import PlacementError
from hfq.integrations.deepspeed.zero_config import ZeroConfig
from hfq.placement.zero.shards import ZeroPlan

__all__ = ["Pool", "plan_pool", "swap_options"]

_AHEAD = 4
_loads = itertools.count()


@dataclass(frozen=True)
class Pool:
    """Swap buffers.

    Attributes:
        count: How many shards are in memory at a time: those that one module needs at once, and those that
            are read ahead.
        numel: The elements of the largest shard.
        itemsize: Bytes of one element.
    """

    count: int
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """The most bytes that they take."""
        return self.count * self.numel * self.itemsize


def plan_pool(plan: ZeroPlan, itemsize: int, at_once: int, least_nbytes: int = 0) -> Pool:
    """The pool for a plan.

    Args:
        plan: The rows, embeddings among them.
        itemsize: Bytes of one element of the dtype that ZeRO runs in.
        at_once: The most rows that one module needs at once, as all experts of a layer.
        least_nbytes: Smaller shards are never swapped.
    """
    sizes = [flat.shard_numel(plan.world) for flat in plan.parameters]
    swapped = [size for size in sizes if size * itemsize >= least_nbytes]
    count = min(len(swapped), max(at_once, 1) + _AHEAD)
    return Pool(max(count, 1), max(swapped, default=0), itemsize)


def swap_options(zero: ZeroConfig, pool: Pool | None) -> dict[str, Any]:
    """The options for `deepspeed.zero.Init`.

    Args:
        zero: The active ZeRO-3 config.
        pool: For DeepSpeed's own swapper: its buffers; it is given a folder of its own for each load, since
            it empties its folder when it starts. None where nothing is swapped out.

    Raises:
        PlacementError: DeepSpeed's swapper has no folder.
    """
    if zero.shard_device != "nvme":
        return zero.options
    if pool is None:
        return zero.with_offload(nvme_path=zero.nvme_path or os.devnull, pin_memory=False)
    if zero.nvme_path is None:
        raise PlacementError(
            'offload_param.device is nvme, HfqConfig(nvme_source="swap_files") is asked for, and no folder '
            "is named. Nothing was loaded.",
            expected="zero_optimization.offload_param.nvme_path",
            found="none",
            fix='name a folder on a fast disk, or pass HfqConfig(nvme_source="checkpoint"), which writes '
            "nothing",
        )
    folder = os.path.join(zero.nvme_path, f"hfq-{next(_loads)}")
    return zero.with_offload(nvme_path=folder, buffer_count=pool.count, buffer_size=max(pool.numel, 1))
