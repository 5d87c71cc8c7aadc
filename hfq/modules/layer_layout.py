"""The layout of a quantized layer as a text, which graphs of torch hold next to its tensors."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hfq.errors import SetupError
from hfq.formats import FORMATS, ActivationScheme, Format
from hfq.kernels.registry import KERNELS, Kernel
from hfq.modules.flat_buffer import FlatBuffer
from hfq.tensor_spec import Blocks, Segment, StoredOrder

__all__ = ["LayerLayout", "layer_text", "layout_of"]

_CLASS = "class"


@dataclass(frozen=True)
class LayerLayout:
    """The meaning of a layer's tensors, without the tensors.

    Layers of one kind have equal layouts, so that one graph serves them all.

    Attributes:
        weight_format: The format of the tensors.
        out_features: Number of output rows.
        in_features: Number of input channels.
        kernel: The name of the kernel on a CPU; empty for an embedding.
        accelerated: The name of the kernel on another device; empty for an embedding.
        scheme: Scheme that quantizes activations; None leaves them unquantized.
        names: The checkpoint's names of the tensors, in their order.
        segments: Segments of the tensors in the flat buffer; None if each tensor is an input of the graph.
    """

    weight_format: Format
    out_features: int
    in_features: int
    kernel: str
    accelerated: str
    scheme: ActivationScheme | None
    names: tuple[str, ...]
    segments: tuple[Segment, ...] | None = None

    def kernel_for(self, values: torch.Tensor) -> Kernel:
        """Returns the kernel that computes on the device of the values."""
        return KERNELS[self.kernel if values.is_cpu else self.accelerated]

    def tensors(self, stored: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Returns the layer's tensors by checkpoint name."""
        if self.segments is None:
            return {name: tensor.detach() for name, tensor in zip(self.names, stored, strict=True)}
        buffer = stored[0].detach()
        return FlatBuffer(buffer, dict(zip(self.names, self.segments, strict=True))).tensors()


@functools.lru_cache(maxsize=4096)
def layer_text(*fields: Any) -> str:
    """Returns the text of a layout with these fields, which is the same in every process."""
    return json.dumps(_plain(LayerLayout(*fields)), separators=(",", ":"))


@functools.lru_cache(maxsize=4096)
def layout_of(text: str) -> LayerLayout:
    """Returns the layout that a text describes.

    Raises:
        SetupError: Another version of hfq wrote the text.
    """
    try:
        return _restored(json.loads(text))
    except (KeyError, TypeError, ValueError) as error:
        raise SetupError(
            "This graph holds a quantized layer that hfq cannot read.",
            expected="a graph that this version of hfq made",
            found=f"{error!r} in {text[:200]}",
            fix="Export the model again.",
        ) from error


@functools.cache
def _classes() -> Mapping[str, type]:
    classes = (LayerLayout, ActivationScheme, Blocks, Segment, StoredOrder, *FORMATS.values())
    return {each.__name__: each for each in classes}


def _plain(value: Any) -> Any:
    """Returns a value as JSON holds it."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_CLASS: type(value).__name__, **fields}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _restored(value: Any) -> Any:
    """Returns the value that `_plain` received."""
    if isinstance(value, dict):
        fields = {name: _restored(each) for name, each in value.items() if name != _CLASS}
        return _classes()[value[_CLASS]](**fields)
    return tuple(map(_restored, value)) if isinstance(value, list) else value
