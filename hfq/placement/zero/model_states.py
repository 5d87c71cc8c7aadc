"""Weights that ZeRO has to place, counted from file headers.

They are flat buffers of quantized modules, float tensors, and LoRA adapters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from hfq.checkpoint import Checkpoint
from hfq.errors import PlacementError, nearest
from hfq.formats import Format, UnquantizedError, detect_formats, tensors_by_module
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.formats.configs.source_config import detection_hints, source_config
from hfq.placement.zero.memory import ModelStates
from hfq.tensor_spec import DTYPE_BITS, TensorInfo, segment_layout

__all__ = ["count_states"]

_NO_ADAPTER = re.compile(r"^(lm_head|wte|wpe|.*embed.*)$")
"""PEFT's "all-linear" covers every linear layer except the output embedding."""

_FLOATS = ("F16", "BF16", "F32", "F64")


def count_states(
    checkpoint: Checkpoint,
    lora_rank: int | None = None,
    targets: Sequence[str] = (),
    trains_unquantized: bool = False,
    itemsize: int = 2,
) -> ModelStates:
    """Counts the weights that ZeRO places, from headers only.

    Args:
        checkpoint: The checkpoint, quantized or not.
        lora_rank: Rank of LoRA adapters, which then are the only trained weights; None for no adapters.
        targets: Modules with an adapter, by full name or its last parts, like PEFT's `target_modules`; empty
            for every linear layer.
        trains_unquantized: True if float tensors are trained.
        itemsize: Bytes per element of ZeRO's dtype, to which float tensors are cast.

    Raises:
        FormatError: The config contradicts the tensors, or the format is unsupported.
        PlacementError: A target matches nothing, or headers do not tell the size of a target layer.
    """
    modules = tensors_by_module(checkpoint.tensors)
    try:
        formats = detect_formats(modules, detection_hints(checkpoint, source_config(checkpoint) or {}))
    except UnquantizedError:
        formats = {}
    rows = [
        segment_layout((name, t.dtype, t.shape) for name, t in modules[module].items())[1]
        for module in formats
    ]
    stored = [t for module, tensors in modules.items() if module not in formats for t in tensors.values()]
    unquantized = tuple(_numel(info, itemsize) for info in stored)
    adapters = _adapters(modules, formats, lora_rank, targets) if lora_rank else ()
    frozen, trained = ((), unquantized + adapters) if trains_unquantized else (unquantized, adapters)
    return ModelStates(tuple(rows), frozen, trained, itemsize)


def _numel(info: TensorInfo, itemsize: int) -> int:
    """Returns the elements of a tensor in ZeRO's dtype; other dtypes keep their bytes."""
    return info.numel if info.dtype in _FLOATS else -(-info.nbytes // itemsize)


def _adapters(
    modules: Mapping[str, Mapping[str, TensorInfo]],
    formats: Mapping[str, Format],
    rank: int,
    targets: Sequence[str],
) -> tuple[int, ...]:
    linear = {name: tensors for name, tensors in modules.items() if name in formats or _is_matrix(tensors)}
    for target in targets:
        if not any(_matches(name, [target]) for name in linear):
            ends = {name.rpartition(".")[2] for name in linear}
            raise PlacementError(
                f"--lora-target {target} matches no linear layer of the checkpoint.{nearest(target, ends)}",
                expected=", ".join(sorted(ends)),
                found=target,
                fix="Pass one of these names as --lora-target.",
            )
    chosen = [name for name in linear if _matches(name, targets)]
    sizes = [_size(name, formats.get(name), linear[name]) for name in chosen]
    return tuple(numel for out, into in sizes for numel in (rank * into, out * rank))


def _matches(name: str, targets: Sequence[str]) -> bool:
    if not targets:
        return not _NO_ADAPTER.match(name.rpartition(".")[2])
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _is_matrix(tensors: Mapping[str, TensorInfo]) -> bool:
    return "weight" in tensors and len(tensors["weight"].shape) == 2


def _size(name: str, found: Format | None, tensors: Mapping[str, TensorInfo]) -> tuple[int, int]:
    """Returns (out, in) of a layer."""
    if found is None:
        out, into = tensors["weight"].shape
        return out, into
    known = {local: t for local, t in tensors.items() if DTYPE_BITS[t.dtype] >= 8}
    described = {
        local: torch.empty(t.shape, dtype=torch_dtype(t.dtype), device="meta") for local, t in known.items()
    }
    out, into = found.shape(described)
    codes = tensors[found.codes_name]
    bits = found.bits_per_code
    # compressed-tensors: words along the input
    if out * into == 0 and bits and codes.dtype == "I32" and len(codes.shape) == 2:
        out, into = codes.shape[0], int(codes.shape[1] * 32 // bits)
    if out * into == 0:
        raise PlacementError(
            "The headers do not tell the size of a layer, so its adapter cannot be counted.",
            tensor=name,
            expected="codes in the shape of their layer",
            found=found.describe(),
            fix="Pass the number of trained parameters with --trainable instead of --lora-rank.",
        )
    return out, into
