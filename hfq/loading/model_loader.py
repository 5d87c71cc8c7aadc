"""One load, from the skeleton on meta to the placed model: matching, plan, packed rows, and what transformers
must not see.

transformers loads the dense tensors that rest where they compute. Everything else (packed rows, and whatever
rests on disk) is hidden from it: hidden tensors stand in the skeleton, so that sizes and homes are computed
from them, and are left out of `state_dict` until `finish`, which is where transformers looks for what to
load. It is handed a device map of the devices that compute, so that neither it nor accelerate offloads
anything itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from hfq.checkpoint import Checkpoint, Reader
from hfq.errors import PlacementError, SetupError
from hfq.formats.configs.source_config import source_config
from hfq.loading.automatic_map import gather_units, plan_map
from hfq.loading.config import HfqConfig
from hfq.loading.context import load_context
from hfq.loading.matching.match import match_model
from hfq.loading.matching.offload_units import find_offload_units
from hfq.loading.matching.replace_modules import replace_modules
from hfq.loading.read_weights import load_quantized_weights, log_summary
from hfq.loading.reported_device import report_device
from hfq.loading.saving import like_source, stored_state
from hfq.loading.state import LoadState
from hfq.loading.validation import (
    check_merged,
    check_not_converted,
    check_one_device,
    open_files,
    planned_dtypes,
)
from hfq.modules.cpu_execution import CpuExecution
from hfq.modules.experts import QuantizedExperts
from hfq.modules.linear import QuantizedLinear
from hfq.modules.offloaded_parameter import OffloadedParameter
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.offloader import Offloader, OffloadOptions
from hfq.placement.budget import Budget, Unit
from hfq.placement.device_map import check_present, execution_device, execution_map, resolve_devices
from hfq.placement.plan import Plan, PlanEntry

__all__ = ["ModelLoader"]

logger = logging.get_logger("hfq")


class ModelLoader(LoadState):
    """The state of one load; afterwards what a loaded model keeps of it (reader, plan, streamer) to run and
    to save.

    Args:
        model: The skeleton on meta.
        config: The user's config.
        files: The checkpoint's files, as transformers resolved them.
        dtype: The dtype of dense tensors.
    """

    def __init__(
        self, model: PreTrainedModel, config: HfqConfig, files: list[str] | None, dtype: torch.dtype | None
    ) -> None:
        self._started = time.perf_counter()
        self.load_seconds: float | None = None
        self.model = model
        self.checkpoint, source = self._open(config, files)
        self.reader = Reader(self.checkpoint)
        self.config = config._with_source(source)
        self._user_map: dict[str, Any] | None = None
        self._dtypes = planned_dtypes(model, dtype)
        self.match = match_model(model, self.checkpoint, source or {}, load_context().key_mapping)
        if config.recipe is None:
            check_not_converted(config.modules_to_not_convert, self.match, model)
        self.quantized = replace_modules(model, self.match, self.config, self._dtypes)
        self._quantized_names = {
            f"{name}.{local}" for name, module in self.quantized.items() for local in module.infos
        }
        self.plan = Plan(())
        self.budget: Budget | None = None
        self.devices = {}
        self.main = "cpu"
        self.offloader: Offloader | None = None
        self._hidden: set[str] = set()
        self._hook = model.register_state_dict_post_hook(lambda *arguments: self._hide(*arguments))
        self._hide_packed()

    def place(
        self, device_map: dict[str, Any] | None, max_memory: dict[int | str, int] | None = None
    ) -> dict[str, Any] | None:
        """Settles the device of every tensor and loads the quantized ones.

        Args:
            device_map: The user's map, or the one that transformers inferred.
            max_memory: The bytes that each device may hold. If given, hfq plans the map in place of
                `device_map`.

        Returns:
            The map of the devices that compute, for transformers; None if there is no device map.
        """
        if device_map is not None and max_memory is not None:
            cache = self.config.expert_cache_nbytes or 0
            device_map, self.budget = plan_map(self.model, self.match, self._dtypes, max_memory, cache)
        self._user_map = dict(device_map) if device_map is not None else None
        names = self._settle_devices(device_map)
        check_present(set(self.devices.values()))
        self._check_supported()
        offloaded = {name for name in names if self._is_offloaded(name)}
        check_merged(self.match, offloaded)
        for name in offloaded:
            self._prepare(name)
        self._hidden |= offloaded
        self.plan = self._make_plan(names)
        with torch.device("cpu"):  # transformers builds, and calls this, under torch.device("meta")
            self._load_rows()
        return None if device_map is None else execution_map(device_map, self.devices, self.main)

    def plan_for(self, device_map: dict[str, Any]) -> Plan:
        """Returns the plan of a map whose devices this machine need not have; loads nothing."""
        return self._make_plan(self._settle_devices(device_map, check=lambda value, _: str(value)))

    def _settle_devices(
        self, device_map: dict[str, Any] | None, check: Callable[[Any, str], str] | None = None
    ) -> list[str]:
        """Sets the device of every tensor and the execution device; returns the names of the tensors."""
        names = self._tensor_names()
        devices = resolve_devices(
            device_map, names, (name for name, _ in self.model.named_modules()), check=check
        )
        for target, source in self.model.all_tied_weights_keys.items():
            devices[target] = devices.get(source, devices[target])
        self.devices, self.main = devices, execution_device(devices.values())
        return names

    def _open(self, config: HfqConfig, files: list[str] | None) -> tuple[Checkpoint, dict[str, Any] | None]:
        """The checkpoint, and its `quantization_config`."""
        checkpoint = open_files(files)
        return checkpoint, config._source if config._source is not None else source_config(checkpoint)

    def _load_rows(self) -> None:
        self.read_plan, self.read_report = load_quantized_weights(self, self._hidden)

    def gather_units(self) -> list[Unit]:
        """The parts of the model that may have a home of their own, with their bytes."""
        return gather_units(self.model, self.match, self._dtypes)

    def finish(self) -> None:
        """Completes the load once transformers has loaded the remaining tensors."""
        self._hook.remove()
        self.model.__dict__.pop("_keys_to_ignore_on_load_unexpected", None)
        self._cast_dense()
        self._check_ties()
        self._complete_model()
        self._conversions = getattr(self.model, "_weight_conversions", None)
        self.model._weight_conversions = []  # `state_dict` gives the names of the checkpoint itself
        if self._user_map is not None:
            self.model.hf_device_map = self._user_map
        if self.match.unused:
            logger.warning(
                "hfq: no place in %s for %s", type(self.model).__name__, ", ".join(self.match.unused[:20])
            )
        self.load_seconds = time.perf_counter() - self._started
        self._log_summary()

    def _complete_model(self) -> None:
        """Attaches the offloader to the modules whose weights are on another device than the one that
        computes.
        """
        moving = self._moving()
        staying = self._staying(moving)
        experts = {name for name in moving if self.match.quantized[name].target.kind == "expert"}
        brought = {name: module for name, module in moving.items() if name not in staying or name in experts}
        units = find_offload_units(
            self.model, self.match, brought, self._hidden - self._quantized_names, self.devices
        )
        on_demand = [module for name, module in brought.items() if name in experts]
        if units or on_demand:
            self.offloader = Offloader(
                units, self.reader, self.main, on_demand, self._offload_options(), self.model
            )
            for module in self.model.modules():
                if isinstance(module, QuantizedExperts) and on_demand:
                    module.prefetch = self.offloader.experts.prefetch
        for module in staying.values():
            CpuExecution(torch.device(self.main), self.config.execute_cpu_layers_on).serve(module)
        if self.offloader is not None or staying:
            report_device(self.model, torch.device(self.main))

    def _log_summary(self) -> None:
        log_summary(self, self.load_seconds or 0.0)

    def _offload_options(self) -> OffloadOptions:
        cache, read_ahead = self.config.expert_cache_nbytes, OffloadOptions.read_ahead_nbytes
        if self.budget is not None:
            read_ahead = self.budget.read_ahead_nbytes()
            cache = max(0, self.budget.headroom().get(self.main, 0) - read_ahead) if cache is None else cache
        threads = max(OffloadOptions.threads, self.read_report.threads)  # more on a network file system
        return OffloadOptions(self.config.disk_io, self.config.disk_checksum, threads, cache, read_ahead)

    def state_dict(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Every tensor by its name in the checkpoint, packed ones as their on-disk bytes; and the files'
        metadata.
        """
        state = stored_state(
            model, self.match, self.quantized, self.checkpoint, self.reader, self._conversions
        )
        return state, {key: value for key, value in self.checkpoint.metadata().items() if key != "format"}

    def saved_like_source(
        self, model: nn.Module, folder: Any, is_main_process: bool
    ) -> AbstractContextManager[bool]:
        """During this, `save_pretrained` writes what the source had, and nothing that it had not: see
        `saving.like_source`.
        """
        return like_source(model, self.checkpoint, folder, is_main_process)

    def _moving(self) -> dict[str, QuantizedModule]:
        """The packed modules that do not rest where they compute."""
        devices = {
            name: self.devices[f"{name}.{next(iter(module.infos))}"]
            for name, module in self.quantized.items()
        }
        return {
            name: self.quantized[name]
            for name, device in devices.items()
            if device == "disk" or (device == "cpu" != self.main)
        }

    def _staying(self, moving: dict[str, QuantizedModule]) -> dict[str, QuantizedLinear]:
        """Of these, the packed layers that may compute where they rest, in memory beside an accelerator."""
        if self.main == "cpu" or self.config.execute_cpu_layers_on == "accelerator":
            return {}
        layers = {name: module for name, module in moving.items() if isinstance(module, QuantizedLinear)}
        return {
            name: layer
            for name, layer in layers.items()
            if self.devices[f"{name}.{next(iter(layer.infos))}"] == "cpu"
        }

    def _check_ties(self) -> None:
        """Two loads at once can leave transformers' tying switched off (see the import hook's patches); a
        head would then be random.
        """
        tensor = self.model.get_parameter_or_buffer
        for target, source in self.model.all_tied_weights_keys.items():
            is_tied = target not in self.match.unquantized and target not in self._hidden
            if is_tied and tensor(target) is not tensor(source):
                raise SetupError(
                    f"transformers did not tie {target} to {source}; no model was returned.",
                    expected="one parameter",
                    found="two",
                    fix="do not load another model in a second thread at the same time; restart the process",
                )

    def _cast_dense(self) -> None:
        """transformers 5.17 leaves a dense tensor whose name it changed in its stored dtype
        (core_model_loading.py:1697).
        """
        for name, dtype in self._dtypes.items():
            if name in self.match.unquantized and name not in self._hidden:
                tensor = self.model.get_parameter_or_buffer(name)
                if tensor.dtype != dtype:
                    tensor.data = tensor.data.to(dtype)

    def _hide_packed(self) -> None:
        self._hidden = self._quantized_names | {f"{name}.flat_buffer" for name in self.quantized}
        # hfq has judged every stored tensor itself: transformers must not report the hidden ones as
        # unexpected
        self.model._keys_to_ignore_on_load_unexpected = {".*"}

    def _hide(self, module: nn.Module, state_dict: dict, prefix: str, _: Any) -> None:
        if module is self.model and not prefix:
            for name in self._hidden & state_dict.keys():
                del state_dict[name]

    def _tensor_names(self) -> list[str]:
        return list(dict.fromkeys([*sorted(self._quantized_names), *self.model.state_dict()]))

    def _is_offloaded(self, name: str) -> bool:
        """Whether a dense parameter rests elsewhere than where it computes."""
        device = self.devices[name]
        ties = self.model.all_tied_weights_keys
        is_parameter = name in self.match.unquantized or name in ties or name in ties.values()
        is_unquantized = is_parameter and name not in self._quantized_names and not self._is_buffer(name)
        return is_unquantized and (device == "disk" or (device == "cpu" and self.main != "cpu"))

    def _is_buffer(self, name: str) -> bool:
        module, _, local = name.rpartition(".")
        return local in self.model.get_submodule(module)._buffers

    def _prepare(self, name: str) -> None:
        """Gives a hidden dense parameter the dtype it will be read in; it is frozen, and initialised by
        nobody.
        """
        module, _, local = name.rpartition(".")
        owner = self.model.get_submodule(module)
        parameter = owner._parameters.get(local)
        if parameter is not None:
            # on meta even where the model made it on the CPU (XLNet's legacy constructors): the streamer
            # reads what is on meta
            blank = torch.empty(parameter.shape, dtype=self._dtypes.get(name, parameter.dtype), device="meta")
            parameter = OffloadedParameter(blank, requires_grad=False)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            owner._parameters[local] = parameter

    def _check_supported(self) -> None:
        check_one_device(self.quantized, self.devices)
        accelerators = {device for device in self.devices.values() if device not in ("cpu", "disk")}
        offloaded = {device for device in self.devices.values() if device in ("cpu", "disk")}
        if len(accelerators) > 1 and offloaded:
            raise PlacementError(
                "hfq cannot offload a model that is spread over several accelerators yet. Nothing was "
                "loaded.",
                expected="one accelerator with cpu and disk, or several accelerators alone",
                found=", ".join(sorted(accelerators | offloaded)),
                fix="use one accelerator, or leave cpu and disk out",
            )

    def _make_plan(self, names: Iterable[str]) -> Plan:
        entries = []
        stored = {
            f"{name}.{local}": info
            for name, module in self.quantized.items()
            for local, info in module.infos.items()
        }
        state = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name in names:
            device = self.devices[name]
            execution_device = self.main if device in ("cpu", "disk") else device
            if name in stored:
                entries.append(PlanEntry(name, device, execution_device, stored[name].nbytes, True))
            elif name not in self.model.all_tied_weights_keys:
                tensor, info = state[name], self.match.unquantized.get(name)
                nbytes = tensor.numel() * tensor.element_size()
                if device == "disk" and info is not None:
                    nbytes = info.nbytes
                entries.append(PlanEntry(name, device, execution_device, nbytes, False))
        return Plan(tuple(entries))
