"""FP8 codes with multiplying scales: fine-grained FP8 and float-quantized.

transformers' fine-grained FP8 and compressed-tensors' float-quantized store the weight in the same way. They
differ in the name, shape, and dtype of the scale, and in the weights that share a scale: a tensor or a block,
and for compressed-tensors also a row or a group. Their configs also request activation quantization in
different ways.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hfq.convert.layer_plan import LayerPlan, NewTensor, SourceLayer, refusal
from hfq.formats.base import FLOATS, ActivationScheme
from hfq.formats.fp8 import Fp8

__all__ = ["FineGrainedOptions", "FloatOptions", "plan_fine_grained", "plan_float"]


@dataclass(frozen=True)
class FineGrainedOptions:
    """Options of a config of fine-grained FP8, which apply to all layers."""

    block: tuple[int, int] | None
    is_static: bool


@dataclass(frozen=True)
class FloatOptions:
    """Options of a config group of float-quantized, which apply to one layer."""

    strategy: str
    block: tuple[int, int] | None
    group_size: int | None
    activations: ActivationScheme | None


def plan_fine_grained(layer: SourceLayer) -> LayerPlan:
    """Plans a layer as transformers' fine-grained FP8.

    Raises:
        FormatError: Fine-grained FP8 cannot hold the layer.
    """
    found = _checked(layer)
    if found.strategy not in ("tensor", "block"):
        raise refusal(
            f"{layer.module}.{found.scale_name}",
            "one scale for the tensor, or for each block",
            f"one for each {found.strategy}",
            "Keep the checkpoint in compressed-tensors format.",
        )
    block = found.block_structure if found.strategy == "block" else None
    scheme = found.scheme
    is_static = scheme is not None and scheme.scale_name is not None
    expected = ActivationScheme("group", group_size=block[1]) if block else ActivationScheme("token")
    if not is_static and scheme != expected:
        raise refusal(
            layer.module,
            f"activations that fine-grained FP8 rounds {_describe(expected)}, or with a static scale",
            _describe(scheme),
            "Keep the checkpoint unchanged. The target format rounds activations differently.",
        )
    scale = _scale(layer, found, () if block is None else _grid(layer, found), "F32")
    tensors = {"weight": NewTensor.copied(layer.infos["weight"]), "weight_scale_inv": scale}
    if is_static:
        tensors["activation_scale"] = _input_scale(layer, found, (), "F32")
    return LayerPlan(_with_bias(layer, tensors), FineGrainedOptions(block, is_static))


def plan_float(layer: SourceLayer) -> LayerPlan:
    """Plans a layer as compressed-tensors' float-quantized.

    Raises:
        FormatError: float-quantized cannot hold the layer.
    """
    found, out_features = _checked(layer), layer.size[0]
    scheme = found.scheme
    if found.strategy == "group" and found.scale_dtype != "F32":
        raise refusal(
            f"{layer.module}.{found.scale_name}",
            "float scales",
            f"powers of two of groups of {found.group_size} (MXFP8)",
            "Keep the checkpoint as mxfp8-quantized, which compressed-tensors reads.",
        )
    if scheme is not None and (scheme.upper_bound is not None or scheme.dtype != "e4m3"):
        raise refusal(
            layer.module,
            "activations that are rounded to FP8 without a bound",
            _describe(scheme),
            "Keep the checkpoint unchanged.",
        )
    shapes = {"tensor": (1,), "channel": (out_features, 1), "block": _grid(layer, found)}
    shape = shapes.get(found.strategy, layer.infos[found.scale_name].shape)
    tensors = {
        "weight": NewTensor.copied(layer.infos["weight"]),
        "weight_scale": _scale(layer, found, shape, None),
    }
    if scheme is not None and scheme.scale_name is not None:
        tensors["input_scale"] = _input_scale(layer, found, (1,), None)
        scheme = ActivationScheme("tensor", scale_name="input_scale")
    block = found.block_structure if found.strategy == "block" else None
    group_size = found.group_size if found.strategy == "group" else None
    return LayerPlan(_with_bias(layer, tensors), FloatOptions(found.strategy, block, group_size, scheme))


def _checked(layer: SourceLayer) -> Fp8:
    """Returns the format of a layer whose numbers both formats can hold."""
    found = layer.weight_format
    if not isinstance(found, Fp8) or found.codes_dtype != "F8_E4M3":
        raise refusal(layer.module, "FP8 codes, e4m3", found.describe(), "Keep the checkpoint unchanged.")
    if found.reciprocal:
        raise refusal(
            f"{layer.module}.{found.scale_name}",
            "scales that multiply",
            "scales that divide, whose reciprocals would be rounded",
            "Keep the checkpoint unchanged.",
        )
    if found.others:
        raise refusal(
            f"{layer.module}.{found.others[0][0]}",
            "a weight, its scale, and the scale of its input",
            "a further tensor",
            "Keep the checkpoint unchanged.",
        )
    return found


def _grid(layer: SourceLayer, found: Fp8) -> tuple[int, ...]:
    """Returns the shape of the scales of blocks: two sizes, even if the file has four."""
    shape = layer.infos[found.scale_name].shape
    return (shape[0], shape[2]) if len(shape) == 4 else shape


def _scale(layer: SourceLayer, found: Fp8, shape: tuple[int, ...], dtype: str | None) -> NewTensor:
    """Returns the scale in a dtype that holds all of its values.

    A `dtype` of None means the scale's own dtype if that is a float, and otherwise F32, which holds the
    values of every other dtype.
    """
    info = layer.infos[found.scale_name]
    wanted = dtype or (info.dtype if info.dtype in FLOATS else "F32")
    if info.dtype == wanted:
        return NewTensor.copied(info, shape)
    return NewTensor(wanted, shape, lambda: _widened(layer.read(found.scale_name)).reshape(shape))


def _input_scale(layer: SourceLayer, found: Fp8, shape: tuple[int, ...], dtype: str | None) -> NewTensor:
    local = found.input_scale_name or "input_scale"
    info = layer.infos[local]
    if dtype in (None, info.dtype):
        return NewTensor.copied(info, shape)
    return NewTensor("F32", shape, lambda: layer.read(local).to(torch.float32).reshape(shape))


def _widened(scale: torch.Tensor) -> torch.Tensor:
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).to(torch.float32)


def _describe(scheme: ActivationScheme | None) -> str:
    if scheme is None:
        return "activations that stay floats"
    if scheme.scale_name is not None:
        return "with a static scale"
    size = f" of {scheme.group_size} channels" if scheme.strategy == "group" else ""
    bound = f", bounded by {scheme.upper_bound:g}" if scheme.upper_bound is not None else ""
    return f"to {scheme.dtype} by {scheme.strategy}{size}{bound}"


def _with_bias(layer: SourceLayer, tensors: dict[str, NewTensor]) -> dict[str, NewTensor]:
    return tensors | ({"bias": NewTensor.copied(layer.infos["bias"])} if "bias" in layer.infos else {})
