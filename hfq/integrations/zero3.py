"""Loading under DeepSpeed ZeRO-3: every parameter is born sharded, and each rank reads the bytes of its own shards.

transformers is shown the parameters that it merges of several stored tensors or initialises anew, and buffers; those parameters are
partitioned one at a time when it has loaded them. Everything else is hidden from it, as what rests on disk is in a plain load.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hfq.errors import PlacementError, SetupError
from hfq.integrations.blocks import stored_place
from hfq.integrations.deepspeed import Sharder, gather, is_gathered, mark_leaf, watch_forwards
from hfq.integrations.loading import Loading
from hfq.integrations.ranks import exchange, start_distributed
from hfq.integrations.transformers import HfqConfig
from hfq.integrations.zero_config import read_zero_config
from hfq.integrations.zero_fill import Shard, ShardFiller
from hfq.integrations.zero_pool import least_swapped, plan_pool, swap_options
from hfq.integrations.zero_slots import ZeroSlot, find_slots
from hfq.integrations.zero_swap import CheckpointSwapper, ShardSource
from hfq.modules.experts import PackedExperts
from hfq.modules.packed import PackedModule
from hfq.modules.row import ArenaRow, arena_layout
from hfq.placement.zero import ZeroPlan, check_same_plan

__all__ = ["ShardedLoading"]

logger = logging.get_logger("hfq")

_STAYS_NBYTES = 1 << 16
"""Dense shards of at most so many bytes stay in memory where others are read from the checkpoint for every use."""


class ShardedLoading(Loading):
    """A load under ZeRO-3; see `Loading`.

    Attributes:
        zero: The active ZeRO-3 config.
        sharded: The dense parameters that hfq shards, by name, and whether each may be trained.
        zero_plan: How all rows are cut.
        filler: What this rank has read.
        swapper: What swaps shards in from the checkpoint, if anything does.
    """

    zero_plan: ZeroPlan
    filler: ShardFiller

    def __init__(self, model: PreTrainedModel, config: HfqConfig, files: list[str] | None, dtype: torch.dtype | None) -> None:
        self.zero = read_zero_config(dtype or model.dtype)
        self.rank, self.world = start_distributed()
        self.sharded: dict[str, bool] = {}
        self.swapper: CheckpointSwapper | None = None
        if self.zero.home == "nvme" and config.load == "broadcast" and config.nvme == "in_place":
            raise SetupError(
                'HfqConfig(load="broadcast") cannot be used with shards that stay in the checkpoint; nothing was loaded.',
                expected="files that every rank can read", found='offload_param.device nvme, nvme="in_place"',
                fix='pass nvme="swap", or load="ranges"',
            )  # fmt: skip
        super().__init__(model, config, files, dtype)

    def place(self, device_map: dict[str, Any] | None, max_memory: dict[int | str, int] | None = None) -> None:
        """Hides from transformers every parameter that hfq shards."""
        for name in self._tensor_names():
            if self._is_sharded(name):
                self.sharded[name] = self.model.get_parameter(name).requires_grad
                self._prepare(name)
        self._hidden |= self.sharded.keys()

    def finish(self) -> None:
        """After transformers has loaded the rest: makes and fills all shards, and reports."""
        self._hook.remove()
        self.model.__dict__.pop("_keys_to_ignore_on_load_unexpected", None)
        self._cast_dense()
        self._check_ties()
        slots = find_slots(self)
        self.zero_plan = ZeroPlan(tuple(slot.row for slot in slots), self.rank, self.world, self.zero.home, self._settings())
        check_same_plan(exchange(self.zero_plan.digests()))
        self._make_all(slots)
        self._prepare_forwards()
        self._conversions = getattr(self.model, "_weight_conversions", None)
        self.model._weight_conversions = []  # `state_dict` gives the names of the checkpoint itself
        if self.match.unused:
            logger.warning("hfq: no place in %s for %s", type(self.model).__name__, ", ".join(self.match.unused[:20]))
        logger.info(
            "hfq: loaded %s in %.2f s: %s", self.checkpoint.root, time.perf_counter() - self._started, self.describe_shards()
        )

    def describe_shards(self) -> str:
        """What this rank keeps and has read, in one line."""
        plan, filler = self.zero_plan, self.filler
        home = f"{self.zero.home} in place" if self.swapper is not None else self.zero.home
        return (
            f"{len(self.packed)} packed modules ({self.describe_formats()}), {plan.packed_nbytes:,} packed bytes; rank {self.rank} of "
            f"{self.world}: {plan.packed_shard_nbytes:,} of them on {home}, {filler.packed_read + filler.checked_read:,} packed and "
            f"{filler.dense_read:,} dense bytes read{self._pool_text}"
        )

    def _is_sharded(self, name: str) -> bool:
        """Whether a name is that of a dense parameter that is stored as it is, or tied to one."""
        ties = self.model.all_tied_weights_keys
        group = {name, ties.get(name, name)} | {target for target, source in ties.items() if source == ties.get(name, name)}
        is_dense = name not in self._packed_names and not self._is_buffer(name) and not group & self.match.merged.keys()
        return is_dense and stored_place(name, self.model, self.match) is not None

    def _settings(self) -> dict[str, str]:
        """What all ranks must have the same, beside the rows."""
        options = {key: value for key, value in self.config.options().items() if key != "source"}
        sizes = sorted(
            (file.replace("\\", "/").rpartition("/")[2], self.reader.identity(file)[1]) for file in self.checkpoint.headers
        )
        return {
            "hfq version": version("hfq"), "DeepSpeed version": version("deepspeed"), "dtype": str(self.zero.dtype),
            "HfqConfig": repr(sorted(options.items(), key=str)), "sizes of the checkpoint's files": repr(sizes),
            "class of the model": type(self.model).__name__,
        }  # fmt: skip

    def _make_all(self, slots: list[ZeroSlot]) -> None:
        at_once = max(
            (sum(1 for _ in module.modules()) for module in self.model.modules() if isinstance(module, PackedExperts)),
            default=1,
        )
        pool, self._pool_text = None, ""
        if self.zero.home == "nvme":
            is_in_place = self.config.nvme == "in_place"
            pool = plan_pool(self.zero_plan, self.zero.dtype.itemsize, at_once, 0 if is_in_place else least_swapped(self.zero))
            self._pool_text = f"; {pool.count} swap buffers of at most {pool.numel:,} elements, {pool.nbytes:,} B"
            if is_in_place:
                self.swapper, pool = self._in_place(pool.count), None
        self.sharder = Sharder(self.zero, swap_options(self.zero, pool), self.swapper)
        self.filler = ShardFiller(self, self.rank, self.world, self.config.load == "broadcast", self.sharder.device)
        for slot in slots:
            self._make(slot)
        self.filler.finish()
        for parameter in list(self.model.parameters()):
            if not hasattr(parameter, "ds_id"):
                self._partition_whole(parameter)

    def _in_place(self, window: int) -> CheckpointSwapper:
        swapper = CheckpointSwapper(self.reader, is_direct=self.config.stream == "direct")
        swapper.window = window
        return swapper

    def _make(self, slot: ZeroSlot) -> None:
        """Makes one parameter, and fills this rank's shard of it or lets it rest where it is stored."""
        parameter = self.sharder.new_parameter(slot.shape, slot.dtype, slot.requires_grad)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        is_swapped = self._is_swapped(slot)
        tensor = self.sharder.adopt(parameter, is_swapped)
        for owner, local in slot.places:
            owner._parameters[local] = parameter
        if slot.module is not None:
            segments = arena_layout(slot.module.infos)[0]
            slot.module.hold_shard(parameter, segments, partial(is_gathered, parameter))
        if is_swapped and self.swapper is not None:
            nbytes = slot.row.shard_nbytes(self.world)
            self.swapper.place(parameter, ShardSource(slot.row.reads(self.rank, self.world), nbytes, slot.stored))
            if slot.module is not None:
                self.filler.check_unread(slot.module)
            return
        settle = partial(self.sharder.settle, parameter)
        self.filler.add(Shard(slot.row, tensor, slot.stored, slot.module, settle))
        if is_swapped:
            self.filler.flush()  # DeepSpeed's buffer is given back before the next is asked for

    def _is_swapped(self, slot: ZeroSlot) -> bool:
        if self.zero.home != "nvme":
            return False
        if self.swapper is not None:
            return slot.module is not None or slot.row.shard_nbytes(self.world) > _STAYS_NBYTES
        # DeepSpeed's swapper casts the values of every other dtype without a word
        numel = slot.row.shard_numel(self.world)
        return slot.dtype == self.zero.dtype and self.sharder.swapper.swappable_tensor(numel=numel)

    def _partition_whole(self, parameter: nn.Parameter) -> None:
        """Partitions a parameter that every rank has whole: as it is on rank 0."""
        whole = parameter.data.to(self.sharder.device).contiguous()
        flat = whole.reshape(-1)
        if flat.numel():
            dist.broadcast(flat.view(torch.uint8), 0)
        parameter.data = whole
        shard = self.sharder.adopt(parameter, is_swapped=False)
        start = min(self.rank * shard.numel(), flat.numel())
        own = flat[start : start + shard.numel()]
        shard.zero_()
        shard[: own.numel()].copy_(own)

    def _prepare_forwards(self) -> None:
        """Moves buffers, and settles how packed modules are reached whose row is not gathered by a hook of their own."""
        for module in self.model.modules():
            for local, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[local] = buffer.to(self.sharder.device)
            if isinstance(module, PackedExperts):
                mark_leaf(module)
        is_under_way = watch_forwards(self.model, self._check_engine)
        for packed in self.packed.values():
            packed.fetch = partial(_fetch, packed, is_under_way)

    def _check_engine(self) -> None:
        if not hasattr(self.model, "ds_id"):
            raise PlacementError(
                "A model that is sharded by ZeRO-3 was called without DeepSpeed's engine, which gathers its parameters.",
                expected="a forward of the engine", found=type(self.model).__name__,
                fix="call deepspeed.initialize(model=model, config=…)[0], or Accelerator.prepare(model), first",
            )  # fmt: skip


def _fetch(module: PackedModule, is_under_way: Any) -> Mapping[str, torch.Tensor]:
    """The tensors of a packed module whose weight other code reads during a forward, gathered for it."""
    if not is_under_way():
        raise PlacementError(
            f"{module.name} is sharded by ZeRO-3, and was used while its row was not gathered.", found="one rank's shard",
            expected="a forward of the engine that deepspeed.initialize returned",
            fix="call deepspeed.initialize (or Accelerator.prepare) first; outside of a forward, on all ranks: "
            "with deepspeed.zero.GatheredParameters(list(module.parameters())): …",
        )  # fmt: skip
    row = gather(module.packed_row)  # type: ignore[arg-type]
    return ArenaRow(row.view(torch.uint8), arena_layout(module.infos)[0]).tensors()
