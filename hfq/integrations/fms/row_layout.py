"""Row order of stored layers in FMS, found with FMS's own adapter.

hfq passes row numbers, int64 [out, 1], to the adapter instead of each quantized weight. The positions of the
numbers in the result show all changes to the rows: new names, the order that pairwise RoPE requires, and
fusion. hfq therefore needs no copy of each architecture's layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fms.utils import serialization

from hfq.errors import FormatError
from hfq.loading.matching.match import CheckpointMatch, QuantizedModuleMatch

__all__ = ["Layout", "Part", "find_layout", "stored_name"]

_LAYER = 1 << 32


@dataclass(frozen=True)
class Part:
    """Rows of an FMS layer that come from one stored layer.

    Attributes:
        name: Name of the stored layer in `CheckpointMatch.quantized`.
        order: Index of the stored row for each row in FMS, int64 [out], or None if the order is the same.
    """

    name: str
    order: torch.Tensor | None


@dataclass(frozen=True)
class Layout:
    """Quantized layers and unquantized tensors of a checkpoint, keyed by their names in FMS."""

    layers: dict[str, tuple[Part, ...]]
    unquantized: dict[str, torch.Tensor]


def stored_name(found: QuantizedModuleMatch) -> str:
    """Returns the name of a quantized layer in the checkpoint."""
    local, info = next(iter(found.infos.items()))
    return info.name.removesuffix(f".{local}")


def find_layout(
    architecture: str,
    model_config: Any,
    match: CheckpointMatch,
    unquantized: Mapping[str, torch.Tensor],
    head_dim: int | None,
) -> Layout:
    """Finds the layout of a model with FMS's adapter for transformers checkpoints.

    Args:
        architecture: Name of the architecture in FMS.
        model_config: FMS's config of the model with plain linear layers.
        match: The quantized layers.
        unquantized: The other stored tensors, by checkpoint name.
        head_dim: Size of an attention head, or None if unknown.

    Raises:
        FormatError: The adapter changes a quantized layer in a way that quantized bytes do not support.
    """
    names, state = list(match.quantized), dict(unquantized)
    for index, name in enumerate(names, start=1):
        found = match.quantized[name]
        numbers = torch.arange(found.target.out_features) + index * _LAYER
        state[f"{stored_name(found)}.weight"] = numbers[:, None]
    try:
        adapted = serialization.get_adapted(architecture, "hf", state, {"model_config": model_config})
    except (RuntimeError, ValueError, AssertionError, KeyError) as error:
        raise _unfit(
            names[0] if names else None, f"{type(error).__name__}: {error}", "a new order of whole rows"
        ) from error
    layers: dict[str, tuple[Part, ...]] = {}
    plain: dict[str, torch.Tensor] = {}
    for key, tensor in adapted.items():
        if (
            tensor.dtype == torch.int64
            and tensor.dim() == 2
            and tensor.shape[1] == 1
            and bool((tensor >= _LAYER).any())
        ):
            layers[key.removesuffix(".weight")] = _parts(key, tensor[:, 0], names, match, head_dim)
        else:
            plain[key] = tensor
    placed = [part.name for parts in layers.values() for part in parts]
    for name in names:
        if placed.count(name) != 1:
            raise _unfit(
                name, f"the layer occurs {placed.count(name)} times", "one occurrence in the FMS model"
            )
    return Layout(layers, plain)


def _parts(
    key: str, numbers: torch.Tensor, names: list[str], match: CheckpointMatch, head_dim: int | None
) -> tuple[Part, ...]:
    owners = numbers // _LAYER - 1
    if not key.endswith(".weight") or bool((owners < 0).any()):
        raise _unfit(key, "quantized and unquantized rows in one tensor", "only quantized rows")
    found = []
    for owner in owners.unique_consecutive().tolist():
        name, rows = names[owner], numbers[owners == owner] % _LAYER
        plain = torch.arange(match.quantized[name].target.out_features)
        if not torch.equal(rows.sort().values, plain):
            raise _unfit(
                name, f"{rows.numel()} of {plain.numel()} rows in {key}", "all rows of the stored layer"
            )
        is_same = torch.equal(rows, plain)
        if not is_same and head_dim and not torch.equal(rows // head_dim, plain // head_dim):
            raise _unfit(
                name, "rows moved to another head", f"rows reordered within heads of {head_dim} rows"
            )
        found.append(Part(name, None if is_same else rows))
    return tuple(found)


def _unfit(name: str | None, found: str, expected: str) -> FormatError:
    return FormatError(
        "FMS's adapter changes this quantized layer in a way that hfq does not support. Nothing was loaded.",
        tensor=name,
        expected=expected,
        found=found,
        fix="Use fused_weights=False, or load the checkpoint with transformers: "
        "from_pretrained(path, quantization_config=HfqConfig()).",
    )
