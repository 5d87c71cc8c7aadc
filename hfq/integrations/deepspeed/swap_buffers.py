"""Number and size of the buffers that shards on NVMe are swapped into.

Every swapped parameter fits into a buffer, and no buffer stays idle.
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
        count: Number of shards in memory at a time: the shards that one module needs together, and the
            prefetched shards.
        numel: Number of elements of the largest shard.
        itemsize: Bytes per element.
    """

    count: int
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """The largest number of bytes that the buffers occupy."""
        return self.count * self.numel * self.itemsize


def plan_pool(plan: ZeroPlan, itemsize: int, at_once: int, least_nbytes: int = 0) -> Pool:
    """Returns the swap buffers for a plan.

    Args:
        plan: The sharded parameters, including embeddings.
        itemsize: Bytes per element of the dtype that ZeRO runs in.
        at_once: Largest number of parameters that one module needs together, such as all experts of a layer.
        least_nbytes: Size in bytes below which shards are never swapped.
    """
    sizes = [flat.shard_numel(plan.world) for flat in plan.parameters]
    swapped = [size for size in sizes if size * itemsize >= least_nbytes]
    count = min(len(swapped), max(at_once, 1) + _AHEAD)
    return Pool(max(count, 1), max(swapped, default=0), itemsize)


def swap_options(zero: ZeroConfig, pool: Pool | None) -> dict[str, Any]:
    """Returns the options for `deepspeed.zero.Init`.

    DeepSpeed's own swapper empties its folder when it starts, so each load gets a separate folder.

    Args:
        zero: The active ZeRO-3 config.
        pool: Buffers of DeepSpeed's own swapper, or None if nothing is swapped out.

    Raises:
        PlacementError: The config names no folder for DeepSpeed's swapper.
    """
    if zero.shard_device != "nvme":
        return zero.options
    if pool is None:
        return zero.with_offload(nvme_path=zero.nvme_path or os.devnull, pin_memory=False)
    if zero.nvme_path is None:
        raise PlacementError(
            'HfqConfig(nvme_source="swap_files") requires a folder for swap files, but '
            "offload_param.nvme_path is missing. Nothing was loaded.",
            expected="zero_optimization.offload_param.nvme_path",
            found="none",
            fix='Set nvme_path to a folder on a fast disk, or pass HfqConfig(nvme_source="checkpoint"), '
            "which writes nothing.",
        )
    folder = os.path.join(zero.nvme_path, f"hfq-{next(_loads)}")
    return zero.with_offload(nvme_path=folder, buffer_count=pool.count, buffer_size=max(pool.numel, 1))
