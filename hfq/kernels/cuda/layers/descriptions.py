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
Refuse = Callable[[Any], str | None]
F = TypeVar("F", bound=Describe)

_DESCRIBE: dict[type, tuple[Describe, Refuse]] = {}


def _nothing(weight_format: Any) -> str | None:
    return None


def describes(*formats: type, refuses: Refuse = _nothing) -> Callable[[F], F]:
    """Registers the decorated function to describe layers of these formats and their subclasses.

    The function has the arguments (format, tensors, out_features, in_features). It must read no values of
    tensors, since they may be on a device. `refuses` returns why a layer of a format cannot be read, or None.
    """

    def register(function: F) -> F:
        _DESCRIBE.update(dict.fromkeys(formats, (function, refuses)))
        return function

    return register


def _describe_of(weight_format: Format) -> tuple[Describe, Refuse] | None:
    kinds = type(weight_format).__mro__
    found = next((kind for kind in kinds if kind in _DESCRIBE), None)
    if found is None or type(weight_format).dequantize_into is not found.dequantize_into:  # type: ignore[attr-defined]
        return None  # a subclass that interprets its codes differently
    return _DESCRIBE[found]


def reason_against(weight_format: Format) -> str | None:
    """Returns why the Triton kernels cannot multiply by a layer, or None."""
    found = _describe_of(weight_format)
    return f"it does not read {weight_format.name}" if found is None else found[1](weight_format)


def describe(weight_format: Format, tensors: Mapping[str, torch.Tensor]) -> Layer:
    """Describes a layer by elements; kept with the tensors that a module holds."""
    held = tensors if isinstance(tensors, LayerTensors) else None
    kept = held.answers.get("triton") if held is not None else None
    if isinstance(kept, tuple) and kept[0] is weight_format:
        return kept[1]
    found = _describe_of(weight_format)
    if found is None:
        raise TypeError(f"no description of {weight_format.name}")
    dense = {name: tensor.contiguous() for name, tensor in tensors.items()}
    layer = found[0](weight_format, dense, *weight_format.shape(tensors))
    if held is not None:
        held.answers["triton"] = weight_format, layer
    return layer
