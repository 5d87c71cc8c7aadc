"""Calls to private functions of DeepSpeed, and the fallback if they are missing.

Tested with DeepSpeed 0.19.8.

`deepspeed.zero.Init` partitions a parameter that every rank holds whole. hfq calls only its method that turns
a parameter into a partitioned one (`_convert_to_deepspeed_param`, partition_parameters.py), and allocates the
shard itself. The whole parameter never exists: it is partitioned at creation. DeepSpeed itself runs the
hooks, gathers, prefetching, and offloading.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hfq.errors import SetupError
from hfq.import_hook import run_pending
from hfq.integrations.deepspeed.zero_config import ZeroConfig
from hfq.modules.quantized_module import QuantizedModule
from hfq.placement.zero.memory import SMALLEST_SWAPPED

__all__ = [
    "Sharder",
    "gather",
    "gather_state",
    "is_gathered",
    "least_swapped",
    "mark_leaf",
    "missing_internals",
    "partition_whole_model",
    "patch_deepspeed",
    "shard_status",
    "watch_forwards",
]

_INTERNALS = {
    "deepspeed.runtime.zero.partition_parameters": ("Init", "ZeroParamStatus", "free_param"),
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper": (
        "PartitionedParamStatus",
        "AsyncPartitionedParameterSwapper",
    ),
    "deepspeed.runtime.zero.offload_config": ("OffloadDeviceEnum",),
    "deepspeed.utils": ("set_z3_leaf_module",),
}
_METHODS = (
    "_convert_to_deepspeed_param",
    "_aligned_size",
    "_partition_world_size",
    "_convert_to_zero_parameters",
)


def missing_internals() -> list[str]:
    """Returns the private names that this version of DeepSpeed lacks.

    If the list is empty, parameters can be partitioned at creation.
    """
    import importlib

    missing = []
    for name, attributes in _INTERNALS.items():
        try:
            module = importlib.import_module(name)
        except ImportError:
            missing.append(name)
            continue
        missing += [f"{name}.{attribute}" for attribute in attributes if not hasattr(module, attribute)]
    if not missing:
        from deepspeed.runtime.zero.partition_parameters import Init

        missing += [f"Init.{method}" for method in _METHODS if not callable(getattr(Init, method, None))]
    return missing


class Sharder:
    """Maker of parameters that are partitioned at creation.

    Args:
        config: The active ZeRO-3 config.
        options: The options for `deepspeed.zero.Init`.
        swapper: Swapper for shards on NVMe, or None for DeepSpeed's swapper.

    Attributes:
        device: Device on which parameters are gathered.
        shard_device: Device on which shards are stored: `device`, `cpu`, or `nvme`.
        swapper: The swapper in use, or None.
    """

    def __init__(self, config: ZeroConfig, options: dict[str, Any], swapper: Any = None) -> None:
        from deepspeed.runtime.zero.partition_parameters import Init

        self._init = Init(config_dict_or_path=options, enabled=False, param_swapper=swapper)
        self.device = self._init.local_device
        self.shard_device = config.shard_device
        self.swapper = self._init.param_swapper

    def new_parameter(
        self, shape: torch.Size, dtype: torch.dtype, requires_grad: bool = False
    ) -> nn.Parameter:
        """Returns a parameter of this shape and dtype with one value and almost no memory."""
        blank = torch.zeros((), dtype=dtype, device=self.device).expand(shape)
        return nn.Parameter(blank, requires_grad=requires_grad)

    def adopt(self, parameter: nn.Parameter, is_swapped: bool) -> torch.Tensor:
        """Partitions a parameter, and returns this rank's shard without initializing it.

        Args:
            parameter: A parameter from `new_parameter`.
            is_swapped: True if the swapper stores the shard. The shard then occupies one of the swapper's
                buffers until `settle`.

        Returns:
            The shard, [shard numel], padding included, in the dtype of the parameter.
        """
        from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
        from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
        from deepspeed.runtime.zero.partition_parameters import free_param

        self._init._convert_to_deepspeed_param(parameter)
        size = self._init._aligned_size(parameter)
        numel = size // self._init._partition_world_size(parameter)
        if is_swapped:
            shard = torch.empty(0, dtype=parameter.dtype)
            shard.data = self.swapper.get_buffer(parameter, numel)
        else:
            shard = self._allocate(numel, parameter.dtype)
        parameter.ds_tensor = shard  # type: ignore[attr-defined]
        shard.ds_numel, shard.status = numel, PartitionedParamStatus.AVAILABLE  # type: ignore[attr-defined]
        shard.final_location = OffloadDeviceEnum.nvme if is_swapped else None  # type: ignore[attr-defined]
        parameter.ds_numel_aligned = size  # type: ignore[attr-defined]
        free_param(parameter)
        return shard

    def settle(self, parameter: nn.Parameter) -> None:
        """Passes a filled shard to the swapper, if the swapper stores it."""
        from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

        if parameter.ds_tensor.final_location == OffloadDeviceEnum.nvme:  # type: ignore[attr-defined]
            self.swapper.swap_out_and_release([parameter])

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        from deepspeed.accelerator import get_accelerator

        shard = torch.empty(
            numel, dtype=dtype, device=self.device if self.shard_device == "device" else "cpu"
        )
        return (
            get_accelerator().pin_memory(shard)
            if self._init.pin_memory and self.shard_device != "device"
            else shard
        )


def partition_whole_model(model: nn.Module, options: dict[str, Any]) -> torch.device:
    """Partitions a model that every rank holds whole, with DeepSpeed's public API.

    Returns:
        The device on which parameters are gathered.
    """
    import deepspeed

    # With enabled=True, DeepSpeed replaces torch's `linear` with a version that rounds before it adds the
    # bias.
    init = deepspeed.zero.Init(module=model, config_dict_or_path=options, enabled=False)
    return torch.device(init.local_device)


def is_gathered(parameter: nn.Parameter) -> bool:
    """Returns True if a partitioned parameter is currently whole on this rank."""
    status = getattr(parameter, "ds_status", None)
    return status is None or status.name == "AVAILABLE"


def gather(parameter: nn.Parameter) -> torch.Tensor:
    """Returns a gathered copy of a parameter, independent of DeepSpeed's own gathers.

    All ranks must call it, in the same order.

    Returns:
        A tensor of the parameter's shape and dtype, on the device where parameters are gathered.
    """
    from deepspeed.accelerator import get_accelerator

    shard: Any = parameter.ds_tensor  # type: ignore[attr-defined]
    swapper, is_out = parameter.nvme_swapper, shard.status.name == "NOT_AVAILABLE"  # type: ignore[attr-defined]
    if is_out:
        swapper.swap_in([parameter], async_op=False)
    elif shard.status.name == "INFLIGHT":
        swapper.synchronize_reads()
    device = torch.device(get_accelerator().current_device_name())
    group: Any = parameter.ds_process_group  # type: ignore[attr-defined]
    flat = torch.empty(shard.ds_numel * dist.get_world_size(group), dtype=shard.dtype, device=device)
    dist.all_gather_into_tensor(flat, shard.data.to(device), group=group)
    if is_out:
        swapper.remove_partition_and_release_buffers([parameter])
    return flat[: parameter.ds_numel].view(parameter.ds_shape)  # type: ignore[attr-defined]


def gather_state(model: nn.Module, is_kept: bool) -> dict[str, torch.Tensor] | None:
    """Returns the model's state_dict with whole unquantized parameters in CPU memory.

    All ranks must call it. Parameters are gathered one at a time. Quantized parameters are on the meta
    device.

    Args:
        model: The model.
        is_kept: True if this rank keeps the gathered parameters.

    Returns:
        The state_dict, or None if `is_kept` is False.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state, done = dict(model.state_dict()), dict[int, torch.Tensor]()
    for name in state:
        parameter = parameters.get(name)
        if parameter is None or not hasattr(parameter, "ds_id"):
            continue
        if id(parameter) not in done:
            whole = gather(parameter)
            done[id(parameter)] = whole.cpu() if is_kept else torch.empty(0)
        state[name] = done[id(parameter)]
    return state if is_kept else None


def mark_leaf(module: nn.Module) -> None:
    """Makes DeepSpeed gather all parameters of a module before its forward.

    Modules whose forward differs from rank to rank, such as routed experts, require this.
    """
    from deepspeed.utils import set_z3_leaf_module

    set_z3_leaf_module(module, True)


def watch_forwards(model: nn.Module, check: Callable[[], None]) -> Callable[[], bool]:
    """Calls `check` before every forward of the model.

    Returns:
        A function that returns True during a forward. It also returns True during a backward, because
        gradient checkpointing computes parts of the model again there.
    """
    depth = [0]

    def enter(*_: Any) -> None:
        check()
        depth[0] += 1

    def leave(*_: Any) -> None:
        depth[0] = max(0, depth[0] - 1)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)
    return lambda: depth[0] > 0 or torch._C._current_graph_task_id() != -1


def shard_status() -> Any:
    """Returns DeepSpeed's enum of the states of a swapped shard."""
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

    return PartitionedParamStatus


def least_swapped(zero: ZeroConfig) -> int:
    """Returns the size in bytes of the smallest shard that DeepSpeed's own swapper accepts.

    See partitioned_param_swapper.py of DeepSpeed 0.19.8.
    """
    from deepspeed.runtime.swap_tensor import partitioned_param_swapper as own

    least = int(getattr(own, "MIN_AIO_BYTES", SMALLEST_SWAPPED))
    return max(least, int(zero.options.get("aio", {}).get("block_size", SMALLEST_SWAPPED)))


def patch_deepspeed(_: Any) -> None:
    """Makes DeepSpeed's engine check a model's quantized tensors before it changes the model.

    hfq calls it after DeepSpeed is imported. It patches `DeepSpeedEngine._configure_distributed_model`
    (runtime/engine.py).

    For a model that is not sharded, DeepSpeed casts every float parameter to the dtype of the engine
    (`_cast_module_mixed_precision`), including the scales of quantized modules. It then sends rank 0's
    parameters to all ranks, or partitions them by value.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = getattr(DeepSpeedEngine, "_configure_distributed_model", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def configure(self: Any, model: nn.Module) -> Any:
        _check_storage(model, self.zero_optimization_partition_weights())
        return original(self, model)

    DeepSpeedEngine._configure_distributed_model = configure


def _check_storage(model: nn.Module, is_stage_3: bool) -> None:
    """Raises an error if an engine would change the model's quantized tensors.

    Raises:
        SetupError: A quantized module is not stored in a form that DeepSpeed leaves unchanged. The error
            names the first such module.
    """
    for module in model.modules():
        if not isinstance(module, QuantizedModule) or module.storage_kind == "shard":
            continue
        if is_stage_3:
            raise SetupError(
                "Every rank has loaded the whole model, and ZeRO-3 would cast its quantized tensors. No "
                "engine was created.",
                tensor=module.name,
                expected="a model loaded while a DeepSpeed config is active",
                found="a model loaded without it",
                fix="Before from_pretrained, create the HfDeepSpeedConfig and keep it, or create the "
                "TrainingArguments or the Accelerator(). "
                "An accelerate config file requires zero3_init_flag: true.",
            )
        if getattr(module, "_hf_quantized_needs_local_tp", False):
            raise SetupError(
                "DeepSpeed would send rank 0's slices of quantized layers to all ranks. No engine was "
                "created.",
                tensor=module.name,
                expected="a model that each rank holds whole",
                found="a model sliced by tp_plan",
                fix="Load the model without tp_plan.",
            )
        if module.storage_kind != "flat_buffer":
            raise SetupError(
                "DeepSpeed would cast quantized tensors that are not in a flat buffer. No engine was "
                "created.",
                tensor=module.name,
                expected="flat buffers in memory",
                found=", ".join(
                    f"{p.dtype} on {'disk' if p.is_meta else p.device}" for p in module.parameters()
                ),
                fix='Load the model without modules on disk, and with HfqConfig(cpu_memory="private"), or '
                '"shared" for one copy per node.',
            )


run_pending()
