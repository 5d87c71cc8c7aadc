"""Where FMS keeps which rows of which stored layer, found by asking FMS's own adapter.

In place of the weight of each packed layer the adapter is handed row numbers, int64 [out, 1]. Whatever it
does to the rows of a weight (renaming, the order that RoPE by pairs wants, fusion) shows in where the numbers
come out, so that no architecture's layout is written down a second time here.
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
    """Rows of an FMS layer that one stored layer gives.

    Attributes:
        name: The stored layer's name in `CheckpointMatch.quantized`.
        order: int64 [out]: which stored row comes where; None where they are in their order.
    """

    name: str
    order: torch.Tensor | None


@dataclass(frozen=True)
class Layout:
    """Quantized layers and unquantized tensors of a checkpoint, keyed by their names in FMS."""

    layers: dict[str, tuple[Part, ...]]
    unquantized: dict[str, torch.Tensor]


def stored_name(found: QuantizedModuleMatch) -> str:
    """The name of a packed layer on disk."""
    local, info = next(iter(found.infos.items()))
    return info.name.removesuffix(f".{local}")


def find_layout(
    architecture: str,
    model_config: Any,
    match: CheckpointMatch,
    unquantized: Mapping[str, torch.Tensor],
    head_dim: int | None,
) -> Layout:
    """Runs FMS's adapter for checkpoints of transformers over a model.

    Args:
        architecture: FMS's name of the architecture.
        model_config: FMS's config of the model, whose linear layers are plain.
        match: The packed layers.
        unquantized: The other stored tensors by their names on disk.
        head_dim: The size of an attention head.

    Raises:
        FormatError: The adapter does to a packed layer what cannot be done to packed bytes.
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
            names[0] if names else None, f"{type(error).__name__}: {error}", "rows that are moved as wholes"
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
            raise _unfit(name, f"it comes out {placed.count(name)} times", "one place in the FMS model")
    return Layout(layers, plain)


def _parts(
    key: str, numbers: torch.Tensor, names: list[str], match: CheckpointMatch, head_dim: int | None
) -> tuple[Part, ...]:
    owners = numbers // _LAYER - 1
    if not key.endswith(".weight") or bool((owners < 0).any()):
        raise _unfit(
            key, "packed and dense rows in one tensor", "packed layers alone (try fused_weights=False)"
        )
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
                name, "rows that leave their head", f"rows that are moved within heads of {head_dim}"
            )
        found.append(Part(name, None if is_same else rows))
    return tuple(found)


def _unfit(name: str | None, found: str, expected: str) -> FormatError:
    return FormatError(
        "FMS's adapter does not lay this packed layer out as hfq can. Nothing was loaded.",
        tensor=name,
        expected=expected,
        found=found,
        fix="load the checkpoint with transformers: from_pretrained(path, quantization_config=HfqConfig())",
    )
