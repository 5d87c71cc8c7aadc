"""Loading under DeepSpeed ZeRO-3.

Every parameter is partitioned at creation, and each rank reads the bytes of its own shards.

transformers loads only buffers and the parameters that it merges from several stored tensors or initializes.
hfq partitions those parameters afterwards, one at a time. All other parameters are hidden from transformers,
in the same way as modules on disk in a load without ZeRO-3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hfq.errors import PlacementError, SetupError
from hfq.integrations.deepspeed.make_parameters import ShardMaker
from hfq.integrations.deepspeed.private_api import gather, gather_state, mark_leaf, watch_forwards
from hfq.integrations.deepspeed.sharded_parameters import ShardedParameter, find_sharded_parameters
from hfq.integrations.deepspeed.start_ranks import start_distributed
from hfq.integrations.deepspeed.zero_config import read_zero_config
from hfq.loading.config import HfqConfig
from hfq.loading.matching.offload_units import stored_place
from hfq.loading.model_loader import ModelLoader
from hfq.loading.ranks import meet, no_copy, raise_together
from hfq.loading.saving import stored_state
from hfq.modules.experts import QuantizedExperts
from hfq.modules.flat_buffer import FlatBuffer, flat_layout
from hfq.modules.quantized_module import QuantizedModule
from hfq.placement.plan import PlanEntry
from hfq.placement.zero.shards import ZeroPlan, check_same_plan

__all__ = ["Zero3Loader"]

logger = logging.get_logger("hfq")


class Zero3Loader(ModelLoader):
    """Loader of a model under ZeRO-3.

    Attributes:
        zero: The active ZeRO-3 config.
        sharded: The unquantized parameters that hfq shards, by name. The value is True if the parameter may
            be trained.
        zero_plan: The shards of all parameters.
        maker: The maker of the shards, which also counts the bytes that this rank has read.
    """

    zero_plan: ZeroPlan
    maker: ShardMaker

    def __init__(
        self, model: PreTrainedModel, config: HfqConfig, files: list[str] | None, dtype: torch.dtype | None
    ) -> None:
        self.zero = read_zero_config(dtype or model.dtype)
        self.rank, self.world = start_distributed()
        self.sharded: dict[str, bool] = {}
        self._gathered: dict[str, torch.Tensor] | None = None
        if (
            self.zero.shard_device == "nvme"
            and config.reader_ranks == "rank0"
            and config.nvme_source == "checkpoint"
        ):
            raise SetupError(
                'HfqConfig(reader_ranks="rank0") cannot be used with shards that stay in the checkpoint. '
                "Nothing was loaded.",
                expected="files that every rank can read",
                found='offload_param.device nvme and nvme_source="checkpoint"',
                fix='Pass nvme_source="swap_files", or reader_ranks="all".',
            )
        super().__init__(model, config, files, dtype)

    def __deepcopy__(self, memo: dict) -> Zero3Loader:
        raise no_copy(
            f"{len(self.zero_plan.parameters)} parameters in shards of ZeRO-3"
        )  # copied parameters would have no shards

    def place(
        self, device_map: dict[str, Any] | None, max_memory: dict[int | str, int] | None = None
    ) -> dict[str, Any] | None:
        """Hides from transformers every parameter that hfq shards."""
        for name in self._unquantized_names:
            if self._is_sharded(name):
                self.sharded[name] = self.model.get_parameter(name).requires_grad
                self._prepare(name)
        self._hidden |= self.sharded.keys()
        return None

    def _complete_model(self) -> None:
        """Makes and fills all shards."""
        self._tie()
        sharded_parameters = find_sharded_parameters(self.model, self.match, self.sharded, self.zero.dtype)
        parameters = tuple(sharded.flat for sharded in sharded_parameters)
        self.zero_plan = ZeroPlan(parameters, self.rank, self.world, self.zero.shard_device, self._settings())
        check_same_plan(meet(self.zero_plan.digests()))
        self.maker = ShardMaker(self, self.zero, self.zero_plan)
        self.maker.make(sharded_parameters)
        self._prepare_forwards()
        self._unquantized_entries = tuple(map(self._entry, sharded_parameters))

    def _log_summary(self) -> None:
        shards = self.describe_shards()
        logger.info("hfq: loaded %s in %.2f s: %s", self.checkpoint.root, self.load_seconds, shards)

    def _tie(self) -> None:
        """Ties parameters as transformers does, because `place` made a separate one for each name."""
        for target, source in self.model.all_tied_weights_keys.items():
            if {target, source} <= self.sharded.keys() and target not in self.match.unquantized:
                module, _, local = target.rpartition(".")
                self.model.get_submodule(module)._parameters[local] = self.model.get_parameter(source)

    def state_dict(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Returns the tensors by checkpoint name, and the metadata for safetensors files.

        Unquantized tensors are those that `saved_like_source` gathered.

        Raises:
            PlacementError: The call is outside of `saved_like_source`.
        """
        if self._gathered is None:
            raise PlacementError(
                "The model is sharded by ZeRO-3, so no rank has its whole tensors.",
                found="the shards of one rank",
                expected="save_pretrained, called on all ranks",
                fix="Call save_pretrained on every rank. Rank 0 writes the files.",
            )
        match, conversions = self.match, self._conversions
        state = stored_state(
            model, match, self.quantized, self.checkpoint, self.reader, conversions, self._gathered
        )
        return state, {key: value for key, value in self.checkpoint.metadata().items() if key != "format"}

    @contextlib.contextmanager
    def saved_like_source(self, model: nn.Module, folder: Any, is_main_process: bool) -> Iterator[bool]:
        """A context manager that gathers the unquantized parameters on rank 0 for saving.

        All ranks must save together, and only rank 0 writes. Parameters are gathered one at a time. Quantized
        modules are frozen, so rank 0 copies their tensors from the checkpoint.

        Yields:
            True if hfq has written the model on this rank.
        """
        self._gathered, error = gather_state(model, is_kept=self.rank == 0), None
        try:
            if self.rank == 0:
                with super().saved_like_source(model, folder, is_main_process) as is_written_here:
                    yield is_written_here
            else:
                yield False
        except Exception as failure:
            error = failure
        finally:
            self._gathered = None
        raise_together(error, "The saved model is incomplete")

    def describe_shards(self) -> str:
        """Returns one line about the shards that this rank stores and the bytes that it has read."""
        plan = self.zero_plan
        maker = self.maker
        filler = self.maker.filler
        shard_device = (
            f"{self.zero.shard_device} in place" if maker.swapper is not None else self.zero.shard_device
        )
        return (
            f"{len(self.quantized)} quantized modules ({self.describe_formats()}), "
            f"{plan.quantized_nbytes:,} quantized bytes; rank {self.rank} of {self.world}: "
            f"{plan.quantized_shard_nbytes:,} of them on {shard_device}, "
            f"{filler.packed_read + filler.checked_read:,} quantized and "
            f"{filler.dense_read:,} unquantized bytes read{maker.pool}"
        )

    def _entry(self, sharded: ShardedParameter) -> PlanEntry:
        shard_device = f"{self.zero.shard_device} (shard {self.rank} of {self.world})"
        nbytes = sharded.flat.shard_numel(self.world) * sharded.dtype.itemsize
        return PlanEntry(
            sharded.flat.name, shard_device, str(self.maker.device), nbytes, sharded.module is not None
        )

    def _is_sharded(self, name: str) -> bool:
        """Returns True if a name belongs to a stored unquantized parameter that is not merged."""
        ties = self.model.all_tied_weights_keys
        group = {name, ties.get(name, name)} | {
            target for target, source in ties.items() if source == ties.get(name, name)
        }
        is_unquantized = (
            not self._is_quantized(name)
            and not self._is_buffer(name)
            and not group & self.match.merged.keys()
        )
        return is_unquantized and stored_place(name, self.model, self.match) is not None

    def _settings(self) -> dict[str, str]:
        """Returns the settings that all ranks must share, in addition to the plan."""
        options = {key: value for key, value in self.config._options().items() if key != "_source"}
        sizes = sorted(
            (file.replace("\\", "/").rpartition("/")[2], self.reader.identity(file)[1])
            for file in self.checkpoint.headers
        )
        return {
            "hfq version": version("hfq"),
            "DeepSpeed version": version("deepspeed"),
            "dtype": str(self.zero.dtype),
            "HfqConfig": repr(sorted(options.items(), key=str)),
            "sizes of the checkpoint's files": repr(sizes),
            "class of the model": type(self.model).__name__,
        }

    def _prepare_forwards(self) -> None:
        """Moves buffers, and prepares quantized modules that other code reads without calling them.

        DeepSpeed's hooks do not gather the parameters of those modules.
        """
        for module in self.model.modules():
            for local, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[local] = moved = buffer.to(self.maker.device).contiguous()
                    if self.config.reader_ranks == "rank0" and moved.numel():
                        dist.broadcast(moved.reshape(-1).view(torch.uint8), 0)
            if isinstance(module, QuantizedExperts):
                mark_leaf(module)
        is_under_way = watch_forwards(self.model, self._check_engine)
        for quantized in self.quantized.values():
            quantized.fetch = partial(_fetch, quantized, is_under_way)

    def _check_engine(self) -> None:
        if not hasattr(self.model, "ds_id"):
            raise PlacementError(
                "A model that is sharded by ZeRO-3 was called without DeepSpeed's engine, which gathers its "
                "parameters.",
                expected="a call of the engine",
                found=type(self.model).__name__,
                fix="Call the engine that deepspeed.initialize(model=model, config=…)[0] or "
                "Accelerator.prepare(model) returns.",
            )


def _fetch(module: QuantizedModule, is_under_way: Any) -> Mapping[str, torch.Tensor]:
    """Gathers the tensors of a quantized module whose weight other code reads in a forward."""
    if not is_under_way():
        raise PlacementError(
            f"{module.name} is sharded by ZeRO-3, and was used while its weights were not gathered.",
            found="the shard of one rank",
            expected="a call of the engine that deepspeed.initialize returns",
            fix="Call deepspeed.initialize or Accelerator.prepare first. Outside of a forward, use on all "
            "ranks: "
            "with deepspeed.zero.GatheredParameters(list(module.parameters())): …",
        )
    flat = gather(module.flat_buffer)
    return FlatBuffer(flat.view(torch.uint8), flat_layout(module.infos)[0]).tensors()
