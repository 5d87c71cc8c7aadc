"""One load, from the meta model to the placed model: matching, plan, and weights.

transformers loads the unquantized tensors that are on their execution device. The other tensors, quantized or
on disk, are hidden from transformers. Hidden tensors stay in the meta model, so that sizes and devices
include them. Until `finish`, `state_dict` leaves them out, because transformers reads there which tensors to
load. transformers receives a device map of execution devices only, so that neither it nor accelerate offloads
anything.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.read_plan import ReadPlan
from hfq.formats.configs.source_config import source_config
from hfq.kernels.cpu.thread_limit import warn_of_threads
from hfq.loading.automatic_map import gather_units, plan_map, routed_experts
from hfq.loading.config import HfqConfig
from hfq.loading.config_checks import check_buffers
from hfq.loading.context import load_context, remember_plan
from hfq.loading.dequantize import dequantize_model
from hfq.loading.devices.settled_devices import SettledDevices
from hfq.loading.gguf.metadata_config import check_metadata
from hfq.loading.gguf.saved_files import gguf_saved
from hfq.loading.kv_layers import context_nbytes
from hfq.loading.mapped_tensors import MappedTensors, settle_mapped
from hfq.loading.matching.match import CheckpointMatch, match_model
from hfq.loading.matching.offload_units import find_offload_units
from hfq.loading.matching.renaming import Names
from hfq.loading.matching.replace_modules import replace_modules
from hfq.loading.read_weights import load_quantized_weights, log_summary, plan_weight_reads
from hfq.loading.reported_device import report_device, report_dtype
from hfq.loading.saving import like_source, stored_state
from hfq.loading.state import LoadState
from hfq.loading.validation import (
    check_expert_cache,
    check_experts_implementation,
    check_initialized,
    check_merged,
    check_not_converted,
    check_one_device,
    check_tied,
    open_files,
    planned_dtypes,
)
from hfq.modules.cpu_execution import CpuExecution
from hfq.modules.experts import QuantizedExperts
from hfq.modules.late_tensor import await_outputs
from hfq.modules.linear import QuantizedLinear
from hfq.modules.offloaded_parameter import OffloadedParameter
from hfq.modules.output_head import replace_head
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.copy_stream import copy_stream_to
from hfq.offload.experts.expert_cache import default_limits
from hfq.offload.experts.expert_reader import gather_experts
from hfq.offload.guards import InputMover, WriteGuard, check_parts
from hfq.offload.offloader import Offloader, OffloadOptions
from hfq.offload.stored_layers import use_stored
from hfq.placement.accelerators import check_room
from hfq.placement.budget import Budget, Unit
from hfq.placement.device_map import (
    ancestors,
    check_present,
)
from hfq.placement.plan import Plan, PlanEntry

__all__ = ["ModelLoader"]

logger = logging.get_logger("hfq")


class ModelLoader(LoadState):
    """State of one load, which a loaded model keeps to run and to save.

    `mtp_model` holds the layers that predict further tokens, once `generate(use_mtp=True)` has loaded them.

    Args:
        model: The meta model.
        config: The config of the user.
        files: Checkpoint files, as transformers resolved them.
        dtype: Dtype of unquantized tensors; None for the dtype of the model.
    """

    def __init__(
        self, model: PreTrainedModel, config: HfqConfig, files: list[str] | None, dtype: torch.dtype | None
    ) -> None:
        self._started = time.perf_counter()
        self.load_seconds: float | None = None
        self.mtp_model: PreTrainedModel | None = None
        self.model = model
        self.checkpoint, source = self._open(config, files)
        self.reader = Reader(self.checkpoint)
        self.config = config._with_source(source)
        self._user_map: dict[str, Any] | None = None
        self._dtypes = planned_dtypes(model, dtype)
        context = load_context()
        self.match = self._match(source)
        check_metadata(model.config, self.checkpoint)
        check_experts_implementation(context.experts_implementation, self.match)
        check_buffers(model, self.checkpoint)
        if config.recipe is None:
            check_not_converted(config.modules_to_not_convert, self.match, model)
        self.quantized = replace_modules(model, self.match, self.config, self._dtypes)
        if self.quantized and self.config.kernel in ("auto", "cpp"):
            replace_head(model)
        self.budget: Budget | None = None
        self.devices = {}
        self.executes = {}
        self.main = "cpu"
        self.offloader: Offloader | None = None
        self.mapped: MappedTensors | None = None
        self._mapped_files: set[str] = set()
        self._hidden: set[str] = set()
        self._hook = model.register_state_dict_post_hook(lambda *arguments: self._hide(*arguments))
        self._experts: list[Any] = [model.get_submodule(name) for name in self.match.experts]
        # hfq has matched every stored tensor, so transformers must not report hidden ones as unexpected
        model._keys_to_ignore_on_load_unexpected = {".*"}
        self.hide_experts()
        report_dtype(model)
        self._unquantized_names = list(model.state_dict())
        self._show_experts()

    def place(
        self, device_map: dict[str, Any] | None, max_memory: dict[int | str, int] | None = None
    ) -> dict[str, Any] | None:
        """Chooses the device of every tensor and loads the quantized tensors.

        Args:
            device_map: The map of the user, or the map that transformers inferred; None for no map.
            max_memory: Bytes that each device may hold. If given, hfq plans the map instead of using
                `device_map`.

        Returns:
            The map of execution devices, for transformers; None if there is no device map.
        """
        if device_map is not None and max_memory is not None:
            cache = self.config.expert_cache_nbytes
            device_map, self.budget = plan_map(
                self.model, self.match, self._dtypes, max_memory, cache, load_context().strategy
            )
        self._user_map = dict(device_map) if device_map is not None else None
        settled = self._settle_devices(device_map)
        check_present({*self.devices.values(), self.main})
        check_one_device(self.quantized, settled.by_tensor)
        offloaded = {name for name in self._unquantized_names if self._is_offloaded(name)}
        check_merged(self.match, offloaded)
        check_initialized(self.match, self.devices)
        for name in offloaded:
            self._prepare(name)
        self._hidden |= offloaded
        self._unquantized_entries = self._plan_unquantized()
        if self.main != "cpu":
            self._check_room()
        self._load_rows()
        return None if device_map is None else settled.execution_map(device_map)

    def _check_room(self) -> None:
        """Checks that accelerators have the memory for their weights and offload buffers."""
        plan = self.plan
        moved, planned = plan.entries, plan.nbytes_by_device()
        remember_plan(planned)
        if self.config.execute_cpu_layers_on != "accelerator":
            moved = tuple(entry for entry in moved if entry.device != "cpu" or not entry.quantized)
        buffers = Plan(moved).buffers(self.gather_units(), self._read_ahead_nbytes())
        check_room(planned, buffers, load_context().max_memory is not None)

    def hide_experts(self) -> None:
        """Hides the layers of experts from transformers until `finish`."""
        for experts in self._experts:
            experts.hide_layers()

    @contextmanager
    def with_experts(self) -> Iterator[None]:
        """A context manager in which the layers of experts are not hidden."""
        self._show_experts()
        yield
        self.hide_experts()

    def _show_experts(self) -> None:
        for experts in self._experts:
            experts.show_layers()

    def names_to_load(self) -> set[str]:
        """Returns the names of the stored tensors that transformers loads."""
        found = {
            info.part_of or info.name
            for name, info in (self.match.unquantized | self.match.resized).items()
            if name not in self._hidden
        }
        return found.union(*self.match.merged.values())

    @contextmanager
    def without_offloaded(self) -> Iterator[None]:
        """Hides offloaded and quantized tensors from accelerate's dispatch, which would move them."""
        hidden = {(module, local) for module in self.quantized.values() for local in module._parameters}
        for name in self._hidden:
            path, _, local = name.rpartition(".")
            owner = self.model.get_submodule(path)
            if local in owner._parameters:
                hidden.add((owner, local))
        kept = {owner: dict(owner._parameters) for owner, _ in hidden}
        for owner, local in hidden:
            owner._parameters.pop(local, None)
        self.model.state_dict = dict  # accelerate compares its names with the map, as hfq has done
        try:
            yield
        finally:
            del self.model.state_dict
            for owner, parameters in kept.items():
                parameters |= owner._parameters
                owner._parameters.clear()
                owner._parameters.update(parameters)

    def plan_for(self, device_map: dict[str, Any]) -> Plan:
        """Returns the plan for a map whose devices may be absent; loads nothing."""
        self._settle_devices(device_map, check=lambda value, _: str(value))
        self._unquantized_entries = self._plan_unquantized()
        return self.plan

    def _settle_devices(
        self, device_map: dict[str, Any] | None, check: Callable[[Any, str], str] | None = None
    ) -> SettledDevices:
        """Sets the device and the execution device of every tensor."""
        found = SettledDevices(self.model, self.quantized, self._unquantized_names, device_map, check)
        self.devices, self.executes, self.main = found.stored, found.executes, found.main
        self._settled_devices = found
        return found

    def execution_device_of(self, module: str) -> torch.device:
        """Returns the execution device of a unit, or of a module in or above a unit."""
        return self._settled_devices.execution_device_of(module)

    def _open(self, config: HfqConfig, files: list[str] | None) -> tuple[Checkpoint, dict[str, Any] | None]:
        """Returns the checkpoint and its `quantization_config`."""
        checkpoint = open_files(files)
        return checkpoint, config._source if config._source is not None else source_config(checkpoint)

    def _match(self, source: dict[str, Any] | None) -> CheckpointMatch:
        """Returns the stored tensor of every parameter."""
        context, names = load_context(), Names(self.model, load_context().key_mapping)
        return match_model(self.model, self.checkpoint, source or {}, names, context.ignores_sizes)

    def _load_rows(self) -> None:
        plan, self.read_report, self.pinned = load_quantized_weights(self, self._hidden)
        self._mapped_files = plan.mapped_files

    @property
    def read_plan(self) -> ReadPlan:
        """Source and destination of every quantized tensor, planned again."""
        return plan_weight_reads(self, self._hidden)

    def gather_units(self) -> list[Unit]:
        """Returns the units that a device map can place separately, with their bytes."""
        return gather_units(self.model, self.match, self._dtypes)

    def finish(self) -> None:
        """Completes the load once transformers has loaded the remaining tensors."""
        self._hook.remove()
        self._show_experts()
        self.model.__dict__.pop("_keys_to_ignore_on_load_unexpected", None)
        self._cast_dense()
        known = self.match.unquantized.keys() | self._hidden
        check_tied(self.model, lambda name: name in known or self._is_quantized(name))
        self._complete_model()
        self._conversions = getattr(self.model, "_weight_conversions", None)
        self.model._weight_conversions = []  # keeps the checkpoint's own names in `state_dict`
        if self._user_map is not None:
            self.model.hfq_device_map = self._user_map
        if self.match.unused:
            logger.warning(
                "hfq: %s has no parameter for %s",
                type(self.model).__name__,
                ", ".join(self.match.unused[:20]),
            )
        if self.main == "cpu" or "cpu" in self.devices.values():
            warn_of_threads()
        self.load_seconds = time.perf_counter() - self._started
        self._log_summary()

    def _complete_model(self) -> None:
        """Attaches the offloader to modules whose weights are offloaded."""
        if len({*self.devices.values()}) > 1 and self.main != "cpu":
            check_parts(self.model, self._settled_devices.units)
        moving = self._moving()
        staying = self._staying(moving)
        experts = {name for name in moving if self.match.quantized[name].target.kind == "expert"}
        brought = {name: module for name, module in moving.items() if name not in staying or name in experts}
        units = find_offload_units(
            self.model,
            self.match,
            brought,
            self._hidden,
            self.devices,
            self.execution_device_of,
        )
        on_demand = [module for name, module in brought.items() if name in experts]
        for module in on_demand:
            module.onload_to(self.execution_device_of(module.name))
        if units or on_demand:
            self.offloader = Offloader(
                units,
                self.reader,
                self.main,
                on_demand,
                self._offload_options(on_demand),
                self.model,
                self.pinned,
            )
            stored = {f"{name}.{local}" for name, module in brought.items() for local in module.infos}
            self.model.register_load_state_dict_pre_hook(WriteGuard(stored | self._hidden).check)
            for module in self.model.modules():
                if isinstance(module, QuantizedExperts) and on_demand:
                    module.onload = self.offloader.experts.within
        self._execute_on_cpu(staying)
        if self.offloader is not None or staying:
            report_device(self.model, torch.device(self.main))
        if self.main != "cpu" and self.offloader is None:
            self.model.register_forward_pre_hook(InputMover(self.reader).move, with_kwargs=True)
        self.mapped = settle_mapped(self, self._hidden, self._mapped_files)

    def _execute_on_cpu(self, layers: Mapping[str, QuantizedLinear]) -> None:
        """Lets layers in CPU memory compute there, routed experts next to the accelerator."""
        copy_streams = functools.cache(copy_stream_to)
        for name, module in layers.items():
            device = self.execution_device_of(name)
            bring = functools.partial(use_stored, copy_stream=copy_streams(device), pinned=self.pinned)
            CpuExecution(device, self.config.execute_cpu_layers_on, bring).serve(module)
        for name, experts in self.model.named_modules() if layers else ():
            if isinstance(experts, QuantizedExperts) and "." in name:
                experts.is_late = True
                self.model.get_submodule(name.rpartition(".")[0]).register_forward_hook(await_outputs)

    def _log_summary(self) -> None:
        log_summary(self, self.load_seconds or 0.0)

    def _offload_options(self, experts: Sequence[QuantizedModule]) -> OffloadOptions:
        read_ahead, caches = self._read_ahead_nbytes(), self._cache_limits(experts)
        threads = max(OffloadOptions.threads, self.read_report.threads)  # a network file system uses more
        mode, verify, routed = self.config.disk_io, self.config.disk_checksum, routed_experts(self.model)
        mapped = self.read_report.mapped
        return OffloadOptions(mode, verify, threads, caches, routed, read_ahead, mapped)

    def _cache_limits(self, experts: Sequence[QuantizedModule]) -> dict[torch.device | None, int]:
        """Returns the bytes of the expert cache on each device."""
        asked, devices = self.config.expert_cache_nbytes, [module.compute_device for module in experts]
        if self.main == "cpu" and experts:
            routed = routed_experts(self.model)
            check_expert_cache(asked or 0, gather_experts(experts), routed, self.read_report.mapped)
        if asked is not None:
            return dict.fromkeys(devices, asked)
        if self.budget is not None:
            return {device: self.budget.expert_caches.get(str(device), 0) for device in devices}
        is_accelerated = any(device.type != "cpu" for device in devices)
        return default_limits(devices, context_nbytes(self.model) if is_accelerated else 0)

    def _read_ahead_nbytes(self) -> int:
        """Returns the bytes that the offload buffer may hold beyond the next unit."""
        return OffloadOptions.read_ahead_nbytes if self.budget is None else self.budget.read_ahead_nbytes()

    def state_dict(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Returns the tensors by checkpoint name, quantized ones as stored, and the file metadata."""
        state = stored_state(
            model, self.match, self.quantized, self.checkpoint, self.reader, self._conversions
        )
        return state, {key: value for key, value in self.checkpoint.metadata().items() if key != "format"}

    def dequantize(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Replaces quantized modules by unquantized ones, for `model.dequantize()`.

        Raises:
            SetupError: The model has offloaded weights or quantized modules that cannot be replaced.
        """
        dequantize_model(model, dtype)
        self.model._weight_conversions = self._conversions

    def saved_like_source(
        self, model: nn.Module, folder: Any, is_main_process: bool
    ) -> AbstractContextManager[bool]:
        """Returns a context manager in which `save_pretrained` writes the same files as the source.

        See `saving.like_source` and, for GGUF files, `gguf.saved_files.gguf_saved`.
        """
        if self.checkpoint.gguf is not None and not os.path.isfile(folder):
            state = self.state_dict(model)[0]  # by all ranks of a tensor-parallel model
            if is_main_process:
                return gguf_saved(self, model, state, Path(folder))
        return like_source(model, self.checkpoint, folder, is_main_process, self.match.unused)

    def _moving(self) -> dict[str, QuantizedModule]:
        """Returns the quantized modules that are offloaded."""
        return {
            name: module
            for name, module in self.quantized.items()
            if self.devices[name] == "disk" or (self.devices[name] == "cpu" != self.main)
        }

    def _staying(self, moving: dict[str, QuantizedModule]) -> dict[str, QuantizedLinear]:
        """Returns the offloaded layers in CPU memory that may also compute on the CPU."""
        if self.main == "cpu" or self.config.execute_cpu_layers_on == "accelerator":
            return {}
        layers = {name: module for name, module in moving.items() if isinstance(module, QuantizedLinear)}
        return {name: layer for name, layer in layers.items() if self.devices[name] == "cpu"}

    def _cast_dense(self) -> None:
        """Casts unquantized tensors that transformers leaves in their stored dtype.

        transformers 5.17 does so for tensors that it renames (core_model_loading.py:1697).
        """
        for name, dtype in self._dtypes.items():
            if name in self.match.unquantized and name not in self._hidden:
                tensor = self.model.get_parameter_or_buffer(name)
                if tensor.dtype != dtype:
                    tensor.data = tensor.data.to(dtype)

    def _hide(self, module: nn.Module, state_dict: dict, prefix: str, _: Any) -> None:
        if module is self.model and not prefix:
            for name in list(state_dict):
                if name in self._hidden or self._is_quantized(name):
                    del state_dict[name]

    def _is_quantized(self, name: str) -> bool:
        """Returns True if a tensor belongs to a quantized module."""
        return any(path in self.quantized for path in ancestors(name))

    def _is_offloaded(self, name: str) -> bool:
        """Returns True if an unquantized parameter is offloaded."""
        device = self.devices[name]
        ties = self.model.all_tied_weights_keys
        is_parameter = name in self.match.unquantized or name in ties or name in ties.values()
        return (
            (device == "disk" or device == "cpu" != self.main) and is_parameter and not self._is_buffer(name)
        )

    def _is_buffer(self, name: str) -> bool:
        module, _, local = name.rpartition(".")
        return local in self.model.get_submodule(module)._buffers

    def _prepare(self, name: str) -> None:
        """Replaces a hidden unquantized parameter by a frozen one in the dtype of the load.

        transformers does not initialize it.
        """
        module, _, local = name.rpartition(".")
        owner = self.model.get_submodule(module)
        parameter = owner._parameters.get(local)
        if parameter is not None:
            # XLNet's legacy constructors create parameters on the CPU, but the offloader reads only those
            # on meta
            blank = torch.empty(parameter.shape, dtype=self._dtypes.get(name, parameter.dtype), device="meta")
            parameter = OffloadedParameter(blank, requires_grad=False)
            parameter.placed_by = self.model.all_tied_weights_keys.get(name, name)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            owner._parameters[local] = parameter

    def _plan_unquantized(self) -> tuple[PlanEntry, ...]:
        """Returns the entries of the plan for all tensors that are not stored quantized."""
        entries = []
        for name in self._unquantized_names:
            if name not in self.model.all_tied_weights_keys:
                device, execution_device = self.places_of(name)
                tensor = self.model.get_parameter_or_buffer(name)
                info = self.match.unquantized.get(name)
                nbytes = tensor.numel() * tensor.element_size()
                if (device == "disk" or device != execution_device) and info is not None:
                    nbytes = info.nbytes
                entries.append(PlanEntry(name, device, execution_device, nbytes, False))
        return tuple(entries)
