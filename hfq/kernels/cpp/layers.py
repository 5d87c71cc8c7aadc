"""Descriptions of layers for the C++ library: addresses and layouts of their tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hfq.errors import FormatError
from hfq.formats import Format
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.kernels.cpp import (  # each registers its readers
    block_layers,  # noqa: F401
    byte_layers,  # noqa: F401
    nibble_layers,  # noqa: F401
    word_layers,  # noqa: F401
)
from hfq.kernels.cpp.layer_registry import reader_of
from hfq.kernels.cpp.layer_struct import DTYPES, CppLayer, LayerPattern
from hfq.kernels.cpp.word_layers import MOST_GROUPS
from hfq.kernels.layer_tensors import LayerTensors, PlacedTensors, check_on_cpu

__all__ = ["DTYPES", "MOST_GROUPS", "CppLayer", "describe_layer", "reads_values", "reason_against"]

_Pattern = tuple[Format, LayerPattern | None]


def reason_against(weight_format: Format, in_features: int, out_features: int) -> str | None:
    """Returns why the C++ library cannot multiply by a layer, or None."""
    reader = reader_of(weight_format)
    return (
        f"it does not read {weight_format.name}"
        if reader is None
        else reader.refuses(weight_format, in_features)
    )


def describe_layer(weight_format: Format, tensors: Mapping[str, torch.Tensor]) -> CppLayer | None:
    """Returns the addresses and layout of a layer, or None if the C++ library cannot read it.

    The tensors must outlive the result. Describing a layer takes longer than multiplying by a small one, so
    results are cached: with the tensors that a module holds, or else by addresses, dtypes, shapes, and
    strides. Layers of formats whose descriptions contain values of tensors are described in every call.

    Raises:
        SetupError: A tensor is not in CPU memory.
    """
    if not isinstance(tensors, (LayerTensors, PlacedTensors)):
        return _found_again(weight_format, tensors)
    answer = tensors.answers.get("cpp")
    if isinstance(answer, tuple) and answer[0] is weight_format:
        return answer[1]
    if isinstance(tensors, PlacedTensors):
        known = tensors.places.answers.get("cpp")
        if isinstance(known, tuple) and known[0] is weight_format:
            layer = known[1].layer_at(tensors.address, tensors.places.offsets)
            tensors.answers["cpp"] = weight_format, layer
            return layer
    if reads_values(weight_format):
        return _describe(weight_format, tensors)
    if isinstance(tensors, PlacedTensors):
        layer = _describe_placed(weight_format, tensors)
    else:
        layer = _describe(weight_format, tensors)
    tensors.answers["cpp"] = weight_format, layer
    return layer


def _found_again(weight_format: Format, tensors: Mapping[str, torch.Tensor]) -> CppLayer | None:
    if reads_values(weight_format):
        return _describe(weight_format, tensors)
    key = (
        id(weight_format),
        *tensors,
        *[(part.data_ptr(), part.is_cpu, part.dtype, part.shape, part.stride()) for part in tensors.values()],
    )
    kept = _kept.get(key)
    if kept is None:
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        kept = _kept[key] = (
            weight_format,
            _describe(weight_format, tensors),
        )  # a reference to the format, so that no other object gets its id
    return kept[1]


_kept: dict[tuple, tuple[Format, CppLayer | None]] = {}
_MOST_KEPT = 1 << 12


def _describe_placed(weight_format: Format, tensors: PlacedTensors) -> CppLayer | None:
    """Returns what `_describe` returns, by the pattern of layers of the same dtypes and shapes."""
    key = id(weight_format), tensors.places.kinds
    kept = _patterns.get(key)
    if kept is None:
        layer = _describe(weight_format, tensors)
        pattern = None if layer is None else LayerPattern.of(layer, tensors)
        if len(_patterns) >= _MOST_KEPT:
            _patterns.clear()
        _patterns[key] = weight_format, pattern  # a reference to the format, as in `_kept`
        return layer
    if kept[1] is None:
        return _describe(weight_format, tensors)
    tensors.places.answers["cpp"] = kept
    return kept[1].layer_at(tensors.address, tensors.places.offsets)


_patterns: dict[tuple, _Pattern] = {}


def reads_values(weight_format: Format) -> bool:
    """Returns True if descriptions of a format's layers contain values of tensors."""
    reader = reader_of(weight_format)
    return reader is not None and reader.reads_values


def _describe(weight_format: Format, tensors: Mapping[str, torch.Tensor]) -> CppLayer | None:
    check_on_cpu(tensors)
    out_features, in_features = weight_format.shape(tensors)
    reader = reader_of(weight_format)
    if not out_features or not in_features or reader is None:
        return None
    is_strided = not all(tensor.is_contiguous() for name, tensor in tensors.items() if name != "bias")
    is_in_memory = all(tensor.data_ptr() for tensor in tensors.values() if tensor.numel())
    if is_strided or not is_in_memory or reader.refuses(weight_format, in_features) is not None:
        return None
    _check_kinds(weight_format, tensors, out_features, in_features)
    return reader.describe(weight_format, tensors, out_features, in_features)


def _check_kinds(
    weight_format: Format, tensors: Mapping[str, torch.Tensor], out_features: int, in_features: int
) -> None:
    """Raises an error for a tensor of another dtype or shape than its format allows.

    Raises:
        FormatError: A tensor is of another dtype or shape than its format allows.
    """
    for spec in weight_format.tensor_specs(in_features, out_features):
        tensor = tensors.get(spec.name)
        if tensor is None or spec.role in ("meta", "bias"):  # not read, and of any float dtype
            continue
        if safetensors_dtype(tensor.dtype) not in spec.dtypes or tuple(tensor.shape) != spec.shape:
            raise FormatError(
                f"The compiled kernel cannot read the tensor {spec.name} of a {weight_format.name} layer.",
                tensor=spec.name,
                expected=spec,
                found=f"{tensor.dtype} {list(tensor.shape)}",
                fix="Pass the tensors as the checkpoint stores them, without a cast.",
            )
