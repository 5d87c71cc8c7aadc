"""Tensor-parallel load: each rank reads its slices of the quantized layers in `tp_plan`.

transformers cuts the unquantized parameters itself (DTensors), and installs its hooks on quantized layers,
too. The hooks see a layer that computes with plain local tensors (`_hf_quantized_needs_local_tp`).
`in_features` and `out_features` stay those of the whole layer, since the hooks use them. A slice along the
input returns a partial sum, which the hooks add up over the ranks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hfq.checkpoint.read_plan import ReadPlan
from hfq.errors import FormatError, SetupError
from hfq.formats import Format
from hfq.loading.config import HfqConfig
from hfq.loading.dequantize import no_dequantization
from hfq.loading.model_loader import ModelLoader
from hfq.loading.ranks import attempt, exchange, meet, no_copy, raise_together
from hfq.loading.read_weights import ReadReport
from hfq.loading.saving import stored_state
from hfq.loading.tensor_parallel.slices import find_slices, generic, model_rules, passed_rules
from hfq.loading.validation import check_bias
from hfq.modules.flat_buffer import FlatBuffer, read_tensor
from hfq.modules.linear import QuantizedLinear
from hfq.modules.quantized_module import QuantizedModule
from hfq.placement.plan import PlanEntry
from hfq.placement.tensor_parallel import TensorPart
from hfq.placement.zero.shards import check_same_plan
from hfq.tensor_spec import Cut, LayerSlice, segment_layout

__all__ = ["SlicedLoader"]

logger = logging.get_logger("hfq")


class SlicedLoader(ModelLoader):
    """Load whose quantized layers are shared by tensor-parallel ranks; see `ModelLoader`.

    Attributes:
        rank: This rank.
        world: Number of ranks.
        slices: Slice of this rank, for each quantized layer that is cut, keyed by module name.
        parts: Part of each stored tensor that this rank holds, {layer: {local name: part}}.
    """

    def __init__(
        self, model: PreTrainedModel, config: HfqConfig, files: list[str] | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__(model, config, files, dtype)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.slices: dict[str, LayerSlice] = find_slices(self, self.rank, self.world)
        self.parts: dict[str, dict[str, TensorPart]] = {}
        self._index: dict[str, dict[str, torch.Tensor]] = {}
        self._settled: dict[str, dict[str, Any]] = {}
        self._rules = dict(model.tp_plan)

    def hide_experts(self) -> None:
        """Hides nothing, since transformers installs hooks on the layers of experts, too."""

    def __deepcopy__(self, memo: dict) -> SlicedLoader:
        # transformers' hooks call the original layers
        raise no_copy(f"{len(self.slices)} layers cut for {self.world} ranks")

    def dequantize(self, model: nn.Module, dtype: torch.dtype) -> NoReturn:
        """Raises an error, since each rank holds slices of the layers.

        Raises:
            SetupError: Always.
        """
        raise no_dequantization(next(iter(self.slices), "a model of several ranks"))

    @property
    def held_nbytes(self) -> int:
        """Quantized bytes that this rank holds."""
        return sum(part.nbytes for parts in self.parts.values() for part in parts.values())

    def place(
        self, device_map: dict[str, Any] | None, max_memory: dict[int | str, int] | None = None
    ) -> dict[str, Any] | None:
        """Reads this rank's part of every quantized layer, and excludes those parts from `tp_plan`.

        All ranks agree on every cut before any of them reads weights.
        """
        started, before = time.perf_counter(), self.reader.counters.bytes_read
        self.main = str((device_map or {}).get("", "cpu"))
        check_same_plan(meet(self._digests()))
        for work in (self._cut, self._read):
            _, error = attempt(
                lambda work=work: [work(name, module) for name, module in self.quantized.items()]
            )
            raise_together(error)
        self._index.clear()
        self._check_settled()
        self.devices = dict.fromkeys([*self.quantized, *self._unquantized_names], self.main)
        read = self.reader.counters.bytes_read - before
        self.read_report = ReadReport(time.perf_counter() - started, 0, 0, read, 0, 1)
        self._edit_rules()
        return None

    @property
    def read_plan(self) -> ReadPlan:
        """A plan without reads: each rank reads its parts itself, and maps no tensor."""
        return ReadPlan(())

    def finish(self) -> None:
        """Completes the load once transformers has loaded the remaining tensors."""
        if getattr(self.model, "_mesh_manager", None) is None:
            raise SetupError(
                "distributed_config belongs to another load. Nothing was loaded.",
                found="a used distributed_config",
                expected="from_pretrained(tp_plan=…)",
                fix="Pass a new config without distributed_config to each load.",
            )
        self.model._tp_plan = self._rules
        self._unquantized_entries = tuple(self._plan_unquantized())
        super().finish()
        whole = sum(info.nbytes for module in self.quantized.values() for info in module.infos.values())
        logger.info(
            "hfq: rank %d of %d holds %s of %s quantized bytes",
            self.rank,
            self.world,
            f"{self.held_nbytes:,}",
            f"{whole:,}",
        )

    def state_dict(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Returns every tensor by its name in the checkpoint, and the file metadata.

        Quantized tensors come from the checkpoint, and unquantized ones are gathered from all ranks.
        """
        state = {
            name: _gathered(tensor)
            for name, tensor in model.state_dict().items()
            if not self._is_quantized(name)
        }
        for name, module in self.quantized.items():
            # written from the checkpoint
            state |= {f"{name}.{local}": torch.empty(0, device="meta") for local in module.infos}
        stored = stored_state(
            model, self.match, self.quantized, self.checkpoint, self.reader, self._conversions, state
        )
        return stored, {key: value for key, value in self.checkpoint.metadata().items() if key != "format"}

    def saved_like_source(
        self, model: nn.Module, folder: Any, is_main_process: bool
    ) -> AbstractContextManager[bool]:
        """Returns the context manager of a save that all ranks must join; only rank 0 writes.

        Unquantized parameters are gathered from all ranks.
        """
        return super().saved_like_source(model, folder, is_main_process and self.rank == 0)

    def _cut(self, name: str, module: QuantizedModule) -> None:
        """Chooses this rank's part of one layer.

        Reads the index tensor that a slice along the input depends on, and no other tensor.
        """
        target = self.match.quantized[name].target
        part = self.slices.get(name)
        infos = module.infos
        cuts: Mapping[str, Cut | None] = dict.fromkeys(infos)
        if part is not None:
            specs = (
                module.weight_format.tensor_specs(target.in_features, target.out_features)
                if part.axis == "in"
                else ()
            )
            wanted = [spec.name for spec in specs if spec.role == "index" and spec.name in infos]
            self._index[name] = {local: read_tensor(self.reader, infos[local]) for local in wanted}
            try:
                module.weight_format, cuts = module.weight_format.shard(part, infos, self._index[name])
            except FormatError as error:  # formats do not know the names of layers
                raise FormatError(
                    error.message,
                    tensor=error.tensor or name,
                    expected=error.expected,
                    found=error.found,
                    fix=error.fix,
                ) from error
        self.parts[name] = {local: TensorPart(infos[local], cut) for local, cut in cuts.items()}

    def _read(self, name: str, module: QuantizedModule) -> None:
        """Reads this rank's part of one layer, checks its values, and passes it to the module."""
        found = module.weight_format
        part = self.slices.get(name)
        target = self.match.quantized[name].target
        row = self._fill(self.parts[name], self._index.get(name, {}))
        small = {local: tensor for local, tensor in row.tensors().items() if local != found.codes_name}
        module.weight_format = found.resolve(name, small)
        check_bias(name, small.get("bias"), target.has_bias)
        module.hold_buffer(FlatBuffer(row.buffer.to(self.main), row.segments))
        self._settled[name] = _changes(found, module.weight_format)
        if part is not None and isinstance(module, QuantizedLinear):
            module.is_sliced = True
            module.local_in_features = part.stop - part.start if part.axis == "in" else target.in_features
            # transformers' hooks read this attribute
            module._hf_quantized_needs_local_tp = True

    def _fill(self, parts: Mapping[str, TensorPart], index: Mapping[str, torch.Tensor]) -> FlatBuffer:
        segments, nbytes = segment_layout(
            (local, part.info.dtype, part.shape) for local, part in parts.items()
        )
        with torch.inference_mode(False):
            row = FlatBuffer(torch.empty(nbytes, dtype=torch.uint8), segments)
        # numpy arrays have the buffer protocol
        memory = memoryview(row.buffer.numpy())  # type: ignore[arg-type]
        for local, part in parts.items():
            if local in index:
                cut = part.cut
                row.tensors()[local].copy_(index[local][cut.start : cut.stop] if cut else index[local])
                continue
            segment = segments[local]
            self.reader.read_runs(part.runs(), memory[segment.offset : segment.offset + segment.nbytes])
        return row

    def _check_settled(self) -> None:
        """Checks that the tensor values of all slices of a layer determine the same format variant."""
        first, *others = exchange(
            {name: found for name, found in self._settled.items() if found and name in self.slices}
        )
        for rank, found in enumerate(others, start=1):
            for name in sorted({*first, *found}):
                if first.get(name) != found.get(name):
                    raise FormatError(
                        "The slices of a quantized layer have different formats. Nothing was loaded.",
                        tensor=name,
                        rank=rank,
                        expected=f"{first.get(name, {})}, as on rank 0",
                        found=f"{found.get(name, {})}",
                        fix="Restore the checkpoint's own quantization_config. A load without tp_plan names "
                        "missing entries.",
                    )

    def _edit_rules(self) -> None:
        """Removes rules that transformers must not apply, before it applies its plan.

        No rule may change a quantized layer, or name a parameter that quantized experts replaced.
        """
        kept, rules = passed_rules(self.model), model_rules(self)
        names = {generic(name) for name, _ in self.model.named_parameters()}
        for experts in {generic(name) for name in self.match.experts}:
            for local in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
                if f"{experts}.{local}" not in names and f"{experts}.{local}" not in kept:
                    rules.pop(f"{experts}.{local}", None)
        rules |= {
            f"{generic(name)}.flat_buffer": "replicate"
            for name in self.quantized
            if generic(name) in {**rules, **kept}
        }
        self.model._tp_plan = rules

    def _digests(self) -> dict[str, str]:
        """Returns the data that all ranks must agree on before they read."""
        files = sorted(
            (file.rpartition("/")[2], self.reader.identity(file)[1]) for file in self.checkpoint.headers
        )
        options = {key: value for key, value in self.config._options().items() if key != "_source"}
        cuts = [(name, part.axis, part.size) for name, part in self.slices.items()]
        formats = [(name, repr(module.weight_format)) for name, module in self.quantized.items()]
        found = {
            "files": files,
            "HfqConfig": sorted(options.items(), key=str),
            "tp_plan": cuts,
            "quantization_config": formats,
        }
        return {what: repr(value) for what, value in found.items()}

    def _quantized_entries(self) -> Iterator[PlanEntry]:
        for name, parts in self.parts.items():
            for local, part in parts.items():
                yield PlanEntry(f"{name}.{local}", self.main, self.main, part.nbytes, True)

    def _plan_unquantized(self) -> tuple[PlanEntry, ...]:
        entries = []
        for name, tensor in self.model.state_dict().items():
            if name not in self.model.all_tied_weights_keys:
                held = _local(tensor)
                nbytes = held.numel() * held.element_size()
                entries.append(PlanEntry(name, self.main, self.main, nbytes, False))
        return tuple(entries)


def _changes(before: Format, after: Format) -> dict[str, Any]:
    """Returns the fields that differ between two formats, with the new values."""
    # every format is a dataclass
    fields = [field.name for field in dataclasses.fields(after)]  # type: ignore[arg-type]
    return {name: getattr(after, name) for name in fields if getattr(before, name) != getattr(after, name)}


def _gathered(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
