"""One quantized decoder layer, computed now or restored from an earlier run."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfq.checkpoint import Checkpoint, Reader
from hfq.formats import Format
from hfq.modules.flat_buffer import read_tensor
from hfq.quantization.awq_scales import AwqQuantizer
from hfq.quantization.decoder_layer import DecoderLayerQuantizer, put_quantized
from hfq.quantization.distillation import Distillation
from hfq.quantization.float_checkpoint import Source
from hfq.quantization.folding import put
from hfq.quantization.layer_inputs import Call
from hfq.recipes.recipe import Recipe

__all__ = ["FinishedLayer", "put_finished", "quantize_decoder_layer"]


@dataclass(frozen=True)
class FinishedLayer:
    """Stored result for one decoder layer.

    Attributes:
        quantized: Tensors of each quantized layer, by its name in the model.
        changed: Other changed parameters in their stored dtypes, by name within the decoder layer.
        notes: Entry for the journal, as JSON types.
    """

    quantized: Mapping[str, Mapping[str, torch.Tensor]]
    changed: Mapping[str, torch.Tensor]
    notes: Mapping[str, Any]


def quantize_decoder_layer(
    source: Source,
    name: str,
    linears: Mapping[str, nn.Module],
    weight_format: Format,
    recipe: Recipe,
    hidden: Sequence[torch.Tensor],
    calls: Sequence[Call],
    targets: Sequence[torch.Tensor] | None,
) -> FinishedLayer:
    """Quantizes a decoder layer. Its linear layers then hold their quantized weights.

    The decoder layer is in memory if the method needs activations.

    Args:
        source: The float checkpoint.
        name: Name of the decoder layer.
        linears: Linear layers to quantize, by name in the model.
        weight_format: Format of the quantized layers.
        recipe: Method and options.
        hidden: Hidden states that enter the decoder layer. Empty for methods that need none.
        calls: Other arguments of the decoder layer, for each batch.
        targets: Outputs of the float model's decoder layer, for distillation. None without distillation.
    """
    decoder_layer, dtype_of = source.decoder_layers[name], functools.partial(source.dtype_of, name)
    kind = AwqQuantizer if recipe.method == "awq" else DecoderLayerQuantizer
    quantizer = kind(decoder_layer, linears, weight_format, recipe, source.weight, dtype_of)
    quantized, reports = quantizer.run(hidden, calls)
    distilled = None
    if targets is not None:
        recovery = Distillation(
            decoder_layer, linears, quantized, quantizer.changed, weight_format, recipe, dtype_of
        )
        distilled = recovery.run(hidden, calls, targets)
    notes = {
        "layers": [asdict(report) for report in reports],
        "changed": sorted(quantizer.changed),
        "distilled": distilled,
    }
    return FinishedLayer(quantized, quantizer.changed, notes)


def put_finished(
    file: Path,
    source: Source,
    name: str,
    linears: Mapping[str, nn.Module],
    changed: Iterable[str],
    weight_format: Format,
    recipe: Recipe,
) -> None:
    """Loads a finished shard into a decoder layer in memory.

    Args:
        file: The shard.
        source: The float checkpoint.
        name: Name of the decoder layer.
        linears: Quantized layers, by name in the model.
        changed: Other changed parameters, by name within the decoder layer.
        weight_format: Format of the quantized layers.
        recipe: Method and options.
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
        put_quantized(layer, weight_format, recipe, own)
    for parameter in changed:
        owner, _, local = parameter.rpartition(".")
        stored = finished.tensors[source.stored(f"{name}.{parameter}").name]
        put(source.decoder_layers[name].get_submodule(owner), local, read_tensor(reader, stored).float())
