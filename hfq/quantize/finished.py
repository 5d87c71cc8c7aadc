"""Blocks that an earlier run finished: what it wrote of them is put where the float block has its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import nn

from hfq.checkpoint import Checkpoint, Reader
from hfq.formats import Format
from hfq.formats.recipe import Recipe
from hfq.modules.row import read_tensor
from hfq.quantize.block import as_weight, put_weight
from hfq.quantize.folding import put
from hfq.quantize.source import Source

__all__ = ["put_finished"]


def put_finished(
    file: Path, source: Source, name: str, linears: Mapping[str, nn.Module], changed: Iterable[str], weight_format: Format,
    recipe: Recipe,
) -> None:  # fmt: skip
    """Gives a block in memory the weights that its finished shard means.

    Args:
        file: The shard.
        source: The float checkpoint.
        name: The block.
        linears: Its quantized layers, by their names in the model.
        changed: Other parameters that were changed with them, by their names within the block.
        weight_format: What the layers are packed as.
        recipe: How they were quantized.
    """
    finished = Checkpoint.from_files([file])
    reader = Reader(finished)
    for full, layer in linears.items():
        prefix = f"{source.stored_module(full)}."
        own = {
            stored.removeprefix(prefix): read_tensor(reader, info)
            for stored, info in finished.tensors.items()
            if stored.startswith(prefix) and stored != f"{prefix}bias"
        }
        put_weight(layer, as_weight(weight_format, recipe, own))
    for parameter in changed:
        owner, _, local = parameter.rpartition(".")
        stored = finished.tensors[source.stored(f"{name}.{parameter}").name]
        put(source.blocks[name].get_submodule(owner), local, read_tensor(reader, stored).float())
