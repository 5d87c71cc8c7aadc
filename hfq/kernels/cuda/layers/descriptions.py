"""Registry of the functions that describe layers for the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from hfq.formats import Format
from hfq.kernels.cuda.layers.layout import Layer
from hfq.kernels.layer_tensors import LayerTensors

__all__ = ["describe", "describes", "reason_against"]

Describe = Callable[[Any, Mapping[str, torch.Tensor], int, int], Layer]
F = TypeVar("F", bound=Describe)

_DESCRIBE: dict[type, Describe] = {}


def describes(*formats: type) -> Callable[[F], F]:
    """Registers the decorated function to describe layers of these formats and their subclasses.

    The function has the arguments (format, tensors, out_features, in_features). It must read no values of
    tensors, since they may be on a device.
    """

    def register(function: F) -> F:
        _DESCRIBE.update(dict.fromkeys(formats, function))
        return function

    return register


def _describe_of(weight_format: Format) -> Describe | None:
    kinds = type(weight_format).__mro__
    found = next((kind for kind in kinds if kind in _DESCRIBE), None)
    if found is None or type(weight_format).dequantize_into is not found.dequantize_into:  # type: ignore[attr-defined]
        return None  # a subclass that interprets its codes differently
    return _DESCRIBE[found]


def reason_against(weight_format: Format) -> str | None:
    """Returns why the Triton kernels cannot multiply by a layer, or None."""
    return None if _describe_of(weight_format) is not None else f"it does not read {weight_format.name}"


def describe(weight_format: Format, tensors: Mapping[str, torch.Tensor]) -> Layer:
    """Describes a layer by elements; kept with the tensors that a module holds."""
    held = tensors if isinstance(tensors, LayerTensors) else None
    kept = held.answers.get("triton") if held is not None else None
    if isinstance(kept, tuple) and kept[0] is weight_format:
        return kept[1]
    function = _describe_of(weight_format)
    if function is None:
        raise TypeError(f"no description of {weight_format.name}")
    dense = {name: tensor.contiguous() for name, tensor in tensors.items()}
    layer = function(weight_format, dense, *weight_format.shape(tensors))
    if held is not None:
        held.answers["triton"] = weight_format, layer
    return layer
