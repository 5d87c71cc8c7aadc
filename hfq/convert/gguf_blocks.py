"""Blocks of GGUF files as codes and scales in the order of the model."""

from __future__ import annotations

import torch

from hfq.convert.layer_plan import SourceLayer, refusal
from hfq.formats.codecs.ggml.signed_codes import SIGNED_TYPES, SignedType, unpack_codes, unpack_scales
from hfq.formats.gguf.block_rows import Gguf, positions

__all__ = ["block_codes", "block_groups", "check_plain"]


def block_groups(layer: SourceLayer, found: Gguf) -> tuple[SignedType, torch.Tensor]:
    """Returns the type of a layer's blocks, and the scales of groups [out, groups].

    Raises:
        FormatError: The values of the blocks are no products of a signed code and a scale.
    """
    kind = SIGNED_TYPES.get(found.type.name)
    if kind is None:
        raise refusal(
            f"{layer.module}.weight",
            f"blocks whose values are a code times a scale: {', '.join(SIGNED_TYPES)}",
            found.type.name,
            "Keep the GGUF file, or quantize the original model again.",
        )
    check_plain(layer, found)
    scales = unpack_scales(_rows(layer.hold("weight"), found, 0, layer.size[0]), found.type.name)
    if not bool(scales.isfinite().all()):
        raise refusal(
            f"{layer.module}.weight", "finite scales", "an infinite scale", "Download the file again."
        )
    if found.blocks.columns is None:
        return kind, scales
    order = positions(found.blocks.columns, scales.device).view(-1, kind.group_size)
    if not bool((order == order[:, :1] + torch.arange(kind.group_size)).all()):
        raise refusal(
            f"{layer.module}.weight",
            "columns whose order keeps groups together",
            f"columns that are permuted within groups of {kind.group_size}",
            "Keep the GGUF file.",
        )
    return kind, scales.index_select(1, order[:, 0] // kind.group_size)


def block_codes(weight: torch.Tensor, found: Gguf, start: int, stop: int) -> torch.Tensor:
    """Returns the signed codes of output rows [start, stop) of a layer, int8 [rows, in].

    Args:
        weight: uint8 [out, bytes of a row], as stored.
        found: The format of the layer.
        start: The first row of the model.
        stop: The row after the last one; may be beyond the end.
    """
    codes = unpack_codes(_rows(weight, found, start, stop), found.type.name)
    columns = found.blocks.columns
    return codes if columns is None else codes.index_select(1, positions(columns, codes.device))


def check_plain(layer: SourceLayer, found: Gguf) -> None:
    """Checks that a layer consists of its blocks alone.

    Raises:
        FormatError: A further scale multiplies all weights, or activations are scaled.
    """
    if found.scale_shape is not None or found.others:
        name = "scale" if found.scale_shape is not None else found.others[0][0]
        raise refusal(
            f"{layer.module}.{name}",
            "scales of blocks alone",
            f"a {name} of the whole layer",
            "Keep the GGUF file.",
        )


def _rows(weight: torch.Tensor, found: Gguf, start: int, stop: int) -> torch.Tensor:
    """Returns stored rows in the order of the model."""
    rows = found.blocks.rows
    if rows is None:
        return weight[start:stop]
    return weight.index_select(0, positions(rows, weight.device)[start:stop])
