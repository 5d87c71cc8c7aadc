"""Creation of a model's sharded parameters.

Parameters are partitioned at creation. If this version of DeepSpeed lacks the internals for that, every rank
creates whole parameters first, and DeepSpeed partitions them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.utils import logging

from hfq.errors import PlacementError
from hfq.integrations.deepspeed.checkpoint_swapper import CheckpointSwapper, ShardSource
from hfq.integrations.deepspeed.fill_shards import Shard, ShardFiller
from hfq.integrations.deepspeed.private_api import (
    Sharder,
    is_gathered,
    least_swapped,
    missing_internals,
    partition_whole_model,
)
from hfq.integrations.deepspeed.sharded_parameters import ShardedParameter
from hfq.integrations.deepspeed.swap_buffers import plan_pool, swap_options
from hfq.integrations.deepspeed.zero_config import ZeroConfig
from hfq.loading.state import LoadState
from hfq.modules.experts import QuantizedExperts
from hfq.modules.flat_buffer import flat_layout
from hfq.modules.quantized_module import QuantizedModule
from hfq.placement.zero.shards import ZeroPlan

__all__ = ["ShardMaker"]

logger = logging.get_logger("hfq")

_STAYS_NBYTES = 1 << 16
"""Largest unquantized shard in bytes that stays in memory.

Larger shards are read from the checkpoint for every use.
"""


class ShardMaker:
    """Maker of the sharded parameters of one load.

    Args:
        loading: The load.
        zero: The active ZeRO-3 config.
        plan: The shards of every parameter.

    Attributes:
        device: Device on which parameters are gathered.
        filler: The filler, which counts the bytes that this rank has read.
        swapper: Swapper that reads shards from the checkpoint, or None if it is not used.
        missing: DeepSpeed internals that are not available. If any is missing, every rank reads the whole
            model.
        pool: Description of the swap buffers for logs, or "" if there are none.
    """

    def __init__(self, loading: LoadState, zero: ZeroConfig, plan: ZeroPlan) -> None:
        self._loading = loading
        self._zero = zero
        self._plan = plan
        self._is_scattered = loading.config.reader_ranks == "rank0"
        self.missing = missing_internals()
        self.pool = ""
        self.swapper: CheckpointSwapper | None = None
        options = self._options()
        if self.missing:
            self._refuse_without_internals()
            self.device = torch.device("cpu")
            self._whole_options = options
        else:
            self._sharder = Sharder(self._zero, options, self.swapper)
            self.device = self._sharder.device
        self.filler = ShardFiller(loading, self._plan.rank, self._plan.world, self._is_scattered, self.device)

    def make(self, sharded_parameters: list[ShardedParameter]) -> None:
        """Makes and fills every parameter, then partitions those that transformers has loaded.

        Raises:
            HfqError: This rank or another could not read, or found impossible values.
        """
        for sharded in sharded_parameters:
            if self.missing:
                self._make_whole(sharded)
            else:
                self._make(sharded)
        self.filler.finish()
        model = self._loading.model
        if self.missing:
            self.device = partition_whole_model(model, self._whole_options)
            return
        for parameter in list(model.parameters()):
            if not hasattr(parameter, "ds_id"):
                self._partition(parameter)

    def _options(self) -> dict[str, Any]:
        """Returns the options for DeepSpeed, with a pool of swap buffers if shards are swapped."""
        if self._zero.shard_device != "nvme":
            return swap_options(self._zero, None)
        is_in_place = self._loading.config.nvme_source == "checkpoint" and not self.missing
        experts = [module for module in self._loading.model.modules() if isinstance(module, QuantizedExperts)]
        at_once = max(
            (sum(isinstance(part, QuantizedModule) for part in module.modules()) for module in experts),
            default=1,
        )
        least = 0 if is_in_place else least_swapped(self._zero)
        pool = plan_pool(self._plan, self._zero.dtype.itemsize, at_once, least)
        self.pool = f"; at most {pool.count} swap buffers of {pool.numel:,} elements, {pool.nbytes:,} bytes"
        if not is_in_place:
            return swap_options(self._zero, pool)
        self.swapper = CheckpointSwapper(
            self._loading.reader, is_direct=self._loading.config.disk_io == "direct"
        )
        self.swapper.window = pool.count
        return swap_options(self._zero, None)

    def _make(self, sharded: ShardedParameter) -> None:
        """Makes one parameter, and fills this rank's shard or leaves it in the checkpoint."""
        parameter = self._sharder.new_parameter(sharded.shape, sharded.dtype, sharded.requires_grad)
        is_swapped = self._is_swapped(sharded)
        tensor = self._sharder.adopt(parameter, is_swapped)
        _hold(sharded, parameter)
        if is_swapped and self.swapper is not None:
            rank, world = self._plan.rank, self._plan.world
            source = ShardSource(
                sharded.flat.reads(rank, world), sharded.flat.shard_nbytes(world), sharded.stored
            )
            self.swapper.place(parameter, source)
            if sharded.module is not None:
                self.filler.check_unread(sharded.module)
            return
        self.filler.add(
            Shard(
                sharded.flat, tensor, sharded.stored, sharded.module, partial(self._sharder.settle, parameter)
            )
        )
        if is_swapped:
            self.filler.flush()  # returns DeepSpeed's buffer before the next one is requested

    def _is_swapped(self, sharded: ShardedParameter) -> bool:
        # DeepSpeed keeps small parameters gathered and gathers them again after each step, without swapping
        # them in (stage3.py:2841 of 0.19.8).
        if self._zero.shard_device != "nvme" or sharded.shape.numel() <= self._zero.kept_numel:
            return False
        if self.swapper is not None:
            return sharded.module is not None or sharded.flat.shard_nbytes(self._plan.world) > _STAYS_NBYTES
        # DeepSpeed's swapper silently casts the values of every other dtype.
        numel = sharded.flat.shard_numel(self._plan.world)
        return sharded.dtype == self._zero.dtype and self._sharder.swapper.swappable_tensor(numel=numel)

    def _partition(self, parameter: nn.Parameter) -> None:
        """Partitions a parameter that every rank has whole, with the values of rank 0."""
        whole = parameter.data.to(self.device).contiguous()
        flat = whole.reshape(-1)
        if flat.numel():
            dist.broadcast(flat.view(torch.uint8), 0)
        parameter.data = whole
        shard = self._sharder.adopt(parameter, is_swapped=False)
        start = min(self._plan.rank * shard.numel(), flat.numel())
        own = flat[start : start + shard.numel()]
        shard.zero_()
        shard[: own.numel()].copy_(own)

    def _make_whole(self, sharded: ShardedParameter) -> None:
        """Makes one parameter that this rank holds whole, for DeepSpeed to partition."""
        tensor = torch.empty(sharded.flat.numel, dtype=sharded.stored)
        self.filler.read_whole(sharded.flat, tensor, sharded.module)
        parameter = nn.Parameter(
            tensor.view(sharded.shape).to(sharded.dtype), requires_grad=sharded.requires_grad
        )
        _hold(sharded, parameter)

    def _refuse_without_internals(self) -> None:
        names = ", ".join(self.missing)
        mixed = {flat.itemsize for flat in self._plan.parameters} != {self._zero.dtype.itemsize}
        if self._is_scattered or (self._zero.shard_device == "nvme" and mixed):
            raise PlacementError(
                "This version of DeepSpeed lacks internals that hfq needs to shard this model without "
                "changing its bytes. Nothing was loaded.",
                found=f"no {names}",
                expected="DeepSpeed 0.19.8 or a compatible version",
                fix='Install DeepSpeed 0.19.8, or offload parameters to cpu with reader_ranks="all".',
            )
        logger.warning(
            "hfq: this version of DeepSpeed lacks %s, so every rank reads the whole model before DeepSpeed "
            "partitions it",
            names,
        )


def _hold(sharded: ShardedParameter, parameter: nn.Parameter) -> None:
    """Assigns a parameter to the modules that own it."""
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    for owner, local in sharded.places:
        owner._parameters[local] = parameter
    if sharded.module is not None:
        sharded.module.hold_shard(
            parameter, flat_layout(sharded.module.infos)[0], partial(is_gathered, parameter)
        )
