"""Checks of a load outside of matching, and the dtypes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.utils import logging

from hfq.checkpoint import Checkpoint
from hfq.checkpoint.memory_limit import available_memory
from hfq.errors import FormatError, PlacementError, SetupError, nearest
from hfq.loading.context import opened_checkpoint
from hfq.loading.matching.match import CheckpointMatch
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.experts.expert_cache import cache_nbytes
from hfq.offload.experts.expert_reader import Expert

__all__ = [
    "check_bias",
    "check_expert_cache",
    "check_host_memory",
    "check_experts_implementation",
    "check_initialized",
    "check_merged",
    "check_not_converted",
    "check_one_device",
    "check_tied",
    "open_files",
    "planned_dtypes",
]

logger = logging.get_logger("hfq")


def planned_dtypes(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Returns the dtype of each tensor after the load.

    It is the dtype in the meta model, except for tensors whose names transformers keeps in float32.
    """
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    plan = model._get_dtype_plan(dtype or model.dtype)
    if plan:
        alternation, by_group, _ = build_glob_alternation(list(plan))
        for name in dtypes:
            found = alternation.search(name)
            if found and dtypes[name].is_floating_point:
                dtypes[name] = plan[by_group[found.lastgroup]]
    return dtypes


def check_bias(name: str, bias: torch.Tensor | None, is_expected: bool) -> None:
    """Checks that a layer without a bias has no stored bias, or only zeros.

    AutoGPTQ writes zeros for such layers. Other values belong to another model.
    """
    if bias is not None and not is_expected and bool(bias.any()):
        raise FormatError(
            "The checkpoint stores a bias for a layer that has none. Nothing was loaded.",
            tensor=f"{name}.bias",
            expected="no bias, or zeros",
            found=f"amplitudes up to {float(bias.abs().max()):g}",
            fix="Load with the config that was saved with the checkpoint.",
        )


def open_files(files: list[str] | None) -> Checkpoint:
    foreign = [file for file in files or () if not file.endswith((".safetensors", ".gguf"))]
    if not files or foreign:
        raise FormatError(
            "The checkpoint is neither safetensors nor GGUF. Nothing was loaded.",
            file=foreign[0] if foreign else None,
            expected="*.safetensors or *.gguf",
            found=", ".join(foreign) or "no files",
            fix="Convert the checkpoint to safetensors. hfq never opens a pickle.",
        )
    return opened_checkpoint(files)


def check_not_converted(names: list[str] | None, match: CheckpointMatch, model: nn.Module) -> None:
    known = [name for name, _ in model.named_modules()]
    for name in names or ():
        inside = [
            module
            for module in known
            if module == name or module.endswith(f".{name}") or module.startswith(f"{name}.")
        ]
        quantized = [
            module
            for module in match.quantized
            if any(module == i or module.startswith(f"{i}.") for i in inside)
        ]
        if not inside or quantized:
            what = "is stored quantized" if quantized else "matches nothing in the model"
            hint = "" if quantized else nearest(name, known)
            raise SetupError(
                f"modules_to_not_convert names {name!r}, which {what}.{hint} Nothing was loaded.",
                found=", ".join(quantized[:5]) or name,
                expected="modules that the checkpoint stores unquantized",
                fix="Remove it from modules_to_not_convert.",
            )


def check_merged(match: CheckpointMatch, offloaded: Iterable[str]) -> None:
    """Checks that no parameter that transformers merges from stored tensors is offloaded.

    No file contains the merged tensor.
    """
    for name in sorted(offloaded):
        if name in match.merged:
            raise PlacementError(
                "device_map offloads a parameter that the checkpoint stores in parts or in another layout. "
                "Nothing was loaded.",
                tensor=name,
                expected="the execution device",
                found=", ".join(match.merged[name][:4]),
                fix="Map the module of this parameter to the execution device.",
            )


def check_initialized(match: CheckpointMatch, devices: Mapping[str, str]) -> None:
    """Checks that no parameter is on disk whose stored tensor has another shape."""
    for name, info in sorted(match.resized.items()):
        if devices[name] == "disk":
            raise PlacementError(
                "ignore_mismatched_sizes initializes a parameter that device_map puts on disk. Nothing was "
                "loaded.",
                tensor=name,
                expected="a device with memory",
                found=f"disk, and a stored tensor {info}",
                fix=f'Add {{"{name.rpartition(".")[0]}": "cpu"}} to device_map.',
            )


def check_experts_implementation(asked: object, match: CheckpointMatch) -> None:
    """Checks that no implementation is chosen for experts that are quantized."""
    if asked not in (None, "eager") and match.experts:
        raise SetupError(
            "from_pretrained(experts_implementation=…) has no effect on quantized experts. Nothing was "
            "loaded.",
            tensor=next(iter(match.experts)),
            expected='"eager", or no experts_implementation',
            found=repr(asked)[:80],
            fix="Leave experts_implementation out.",
        )


def check_one_device(quantized: Mapping[str, QuantizedModule], devices: Mapping[str, str]) -> None:
    """Checks that all tensors of a quantized module have the same device.

    Args:
        quantized: The quantized modules by name.
        devices: Devices of their tensors by tensor name, where a device map names tensors.
    """
    for name, module in quantized.items():
        found = {devices[key] for local in module.infos if (key := f"{name}.{local}") in devices}
        if len(found) > 1:
            raise PlacementError(
                "device_map splits a quantized module. Nothing was loaded.",
                tensor=name,
                expected="one device for all its tensors",
                found=", ".join(sorted(found)),
                fix="Name modules in device_map, not tensors.",
            )


def check_tied(model: PreTrainedModel, is_apart: Callable[[str], bool]) -> None:
    """Checks that transformers has tied the weights.

    Two simultaneous loads can leave transformers' tying switched off (see the patches of `from_pretrained`).
    A head would then have random weights.

    Args:
        model: The loaded model.
        is_apart: Returns True for the name of a tensor that is stored itself, or that transformers does not
            see.

    Raises:
        SetupError: A tied weight is a parameter of its own.
    """
    tensor = model.get_parameter_or_buffer
    for target, source in model.all_tied_weights_keys.items():
        if not is_apart(target) and tensor(target) is not tensor(source):
            raise SetupError(
                f"transformers did not tie {target} to {source}. Nothing was loaded.",
                expected="one parameter",
                found="two",
                fix="Restart the process, and do not load models in two threads at the same time.",
            )


def check_host_memory(what: str, nbytes: int, mapped: int, fix: str) -> None:
    """Checks that this process can use the memory that a load needs on the host.

    A warning says if mapped weights do not fit, which the system then reads from disk again.

    Args:
        what: The contents of `nbytes`, for the messages.
        nbytes: Bytes that the system cannot take back.
        mapped: Bytes of mapped weights, which it can.
        fix: What to change.

    Raises:
        PlacementError: The machine, or a control group of this process, has less memory than `nbytes`.
    """
    available = available_memory()
    if available is None or nbytes + mapped <= available:
        return
    if nbytes > available:
        raise PlacementError(
            f"This process cannot use enough memory for {what}. Nothing was loaded.",
            expected=f"{nbytes:,} free bytes",
            found=f"{available:,} bytes that the machine and the control groups of this process leave",
            fix=fix,
        )
    logger.warning(
        "hfq: %s B of mapped weights%s exceed the %s B of memory that this process can use: "
        "forward passes read weights from disk again and again. %s",
        f"{mapped:,}",
        f" and {nbytes:,} B for {what}" if nbytes else "",
        f"{available:,}",
        fix,
    )


def check_expert_cache(asked: int, experts: Sequence[Expert], routed: int, mapped: int) -> None:
    """Checks that this process can use the memory of an expert cache on the host.

    Args:
        asked: Requested size in bytes; 0 for the default size, which is checked at its minimum.
        experts: The offloaded experts.
        routed: Number of experts that a token is routed to.
        mapped: Bytes of mapped weights.

    Raises:
        PlacementError: There is less memory than the cache takes.
    """
    least, nbytes = (cache_nbytes(size, experts, routed) for size in (0, asked))
    fix = "Pass a smaller HfqConfig(expert_cache_size=...)."
    if nbytes == least:
        fix = (
            "Free memory, or raise the limit of the control group. The cache holds at least the experts "
            "that a token is routed to in two layers."
        )
    check_host_memory("the expert cache", nbytes, mapped, fix)
