"""Quantized checkpoint that a load matches while it quantizes a float checkpoint.

It has the tensors that `hfq.quantize` would write, with the same names, dtypes, and shapes. All later steps
(matching, plan, placement, offloading, and saving) treat it as a quantized checkpoint on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hfq.checkpoint import Checkpoint
from hfq.errors import FormatError, SetupError
from hfq.formats import Format
from hfq.formats.configs.source_config import check_floats
from hfq.formats.layouts.rounding import rounded_tensors
from hfq.loading.config import HfqConfig
from hfq.loading.matching.match import CheckpointMatch, match_model
from hfq.loading.matching.quantizable_layers import (
    check_unfused,
    find_all_linears,
    find_linears,
    find_skipped,
    find_units,
    find_unsuitable,
    size_of,
)
from hfq.loading.matching.renaming import Names
from hfq.recipes.recipe import Recipe
from hfq.tensor_spec import ByteRange, TensorInfo
from hfq.version import __version__

__all__ = ["FloatLayer", "VirtualCheckpoint", "lay_out_layers", "plan_virtual_checkpoint"]

_ALIGNMENT = 64
_UNPLACED = "(quantized on load)"


@dataclass(frozen=True)
class FloatLayer:
    """Layer that is quantized.

    Attributes:
        name: Its name in the model.
        stored: Name of its module in the checkpoint.
        weight: Its stored float weight.
        bias: Its stored bias, which is copied next to the quantized tensors; None without a bias.
        is_transposed: True if the weight is stored [in, out].
        size: (out, in).
    """

    name: str
    stored: str
    weight: TensorInfo
    bias: TensorInfo | None
    is_transposed: bool
    size: tuple[int, int]


@dataclass(frozen=True)
class VirtualCheckpoint:
    """Layers that a load quantizes, and the checkpoint that they form.

    Attributes:
        recipe: Recipe of the quantization.
        format: Format of the quantized layers.
        layers: The layers in model order, by the names of their modules in the checkpoint.
        checkpoint: The resulting checkpoint; its quantized tensors are not in a file yet.
        source: Its `quantization_config`.
    """

    recipe: Recipe
    format: Format
    layers: Mapping[str, FloatLayer]
    checkpoint: Checkpoint
    source: dict[str, Any]


def plan_virtual_checkpoint(
    model: PreTrainedModel,
    floats: Checkpoint,
    config: HfqConfig,
    names: Names | None = None,
    ignores_sizes: bool = False,
) -> VirtualCheckpoint:
    """Chooses the layers to quantize as `hfq.quantize` does, without reading weights.

    Args:
        model: The meta model, before any module is replaced.
        floats: The float checkpoint.
        config: Config of the user, with the recipe.
        names: Same as for `match_model`.
        ignores_sizes: Same as for `match_model`.

    Raises:
        SetupError: No layer is left to quantize.
        FormatError: The checkpoint is quantized or does not match, or a layer cannot be quantized.
    """
    check_floats(floats, "Nothing was loaded")
    recipe, match = config.recipe or Recipe(), match_model(model, floats, {}, names, ignores_sizes)
    layers = {layer.stored: layer for layer in _layers(model, match, floats, config)}
    if not layers:
        raise SetupError(
            "No layer is left to quantize. Nothing was loaded.",
            expected="linear layers other than heads and routers",
            found="none",
            fix="Name fewer modules in modules_to_not_convert.",
        )
    weight_format = recipe.weight_format(layer.size for layer in layers.values())
    recipe.check_sizes({layer.name: layer.size for layer in layers.values()})
    source = recipe.quantization_config(weight_format, _dense(model, match, layers), __version__)
    replaced = {
        info.name for layer in layers.values() for info in (layer.weight, layer.bias) if info is not None
    }
    tensors = {name: info for name, info in floats.tensors.items() if name not in replaced}
    tensors |= lay_out_layers(layers.values(), weight_format, _UNPLACED)[0]
    made = Checkpoint(
        floats.root, {**floats.config, "quantization_config": source}, dict(floats.headers), tensors
    )
    return VirtualCheckpoint(recipe, weight_format, layers, made, source)


def lay_out_layers(
    layers: Iterable[FloatLayer], weight_format: Format, file: str
) -> tuple[dict[str, TensorInfo], int]:
    """Returns the places of quantized tensors in one file, by stored name, and the file size.

    Raises:
        FormatError: The format cannot hold a layer.
    """
    placed: dict[str, TensorInfo] = {}
    end = 0
    for layer in layers:
        tensors = dict(rounded_tensors(weight_format, *layer.size))
        if layer.bias is not None:
            tensors["bias"] = layer.bias.dtype, layer.bias.shape, layer.bias.nbytes
        for local, (dtype, shape, nbytes) in tensors.items():
            name = f"{layer.stored}.{local}"
            placed[name] = TensorInfo(name, dtype, shape, ByteRange(file, end, nbytes))
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return placed, end


def _layers(
    model: PreTrainedModel, match: CheckpointMatch, floats: Checkpoint, config: HfqConfig
) -> Iterator[FloatLayer]:
    """Yields the layers to quantize, with experts that are stored separately.

    A layer that the checkpoint lacks, such as a new head, stays unquantized.
    """
    experts = {name: found for name, found in match.quantized.items() if found.target.kind == "expert"}
    skipped = set(find_skipped(model, config.modules_to_not_convert, _with_parents(experts)))
    skipped |= {*find_unsuitable(model)}
    for unit_name, unit in find_units(model, config.recipe or Recipe()).items():
        check_unfused(unit, unit_name, {*skipped, *match.experts})
        for name, linear in find_linears(unit, unit_name, skipped).items():
            weight = match.unquantized.get(f"{name}.weight")
            if weight is None:
                continue
            if f"{name}.weight" in match.merged or not weight.name.endswith(".weight"):
                raise FormatError(
                    "hfq cannot quantize a layer that is stored in this way. Nothing was loaded.",
                    tensor=f"{name}.weight",
                    expected="one tensor named ….weight",
                    found=", ".join(match.merged.get(f"{name}.weight", [str(weight)])),
                    fix=f"Pass modules_to_not_convert=[{name!r}].",
                )
            size = size_of(linear)
            yield _layer(name, weight, floats, not isinstance(linear, nn.Linear), size)
        for name, found in experts.items():
            if name.startswith(f"{unit_name}.") and name not in skipped:
                target = found.target
                yield _layer(
                    name, found.infos["weight"], floats, False, (target.out_features, target.in_features)
                )


def _layer(
    name: str, weight: TensorInfo, floats: Checkpoint, is_transposed: bool, size: tuple[int, int]
) -> FloatLayer:
    stored = weight.name.removesuffix(".weight")
    return FloatLayer(name, stored, weight, floats.tensors.get(f"{stored}.bias"), is_transposed, size)


def _with_parents(names: Iterable[str]) -> list[str]:
    """Returns names of modules and of the experts that contain them."""
    found: dict[str, None] = {}
    for name in names:
        head, _, tail = name.rpartition("experts.")
        number = tail.partition(".")[0]
        found |= {f"{head}experts.{number}": None, name: None}
    return list(found)


def _dense(model: PreTrainedModel, match: CheckpointMatch, layers: Mapping[str, FloatLayer]) -> list[str]:
    """Returns the stored names of linear layers that stay unquantized."""
    names = {
        *(name for name in find_all_linears(model) if not match.is_quantized(f"{name}.weight")),
        *(name for name, found in match.quantized.items() if found.target.kind == "expert"),
    }
    names -= {layer.name for layer in layers.values()}
    return sorted(_stored_module(name, match) for name in names)


def _stored_module(name: str, match: CheckpointMatch) -> str:
    """Returns the stored name of a layer.

    Returns its own name if it is not stored, for example a tied head.
    """
    info = (
        match.quantized[name].infos["weight"]
        if name in match.quantized
        else match.unquantized.get(f"{name}.weight")
    )
    return info.name.removesuffix(".weight") if info is not None else name
