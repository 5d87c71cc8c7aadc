"""Registry of the formats whose layers the C++ library reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hfq.formats import Format
from hfq.kernels.cpp.layer_struct import CppLayer

__all__ = ["LayerReader", "reader_of", "reads"]

Describe = Callable[[Any, Mapping[str, torch.Tensor], int, int], CppLayer]
F = TypeVar("F", bound=Describe)


def _nothing(weight_format: Any, in_features: int) -> str | None:
    return None


def _always(weight_format: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class LayerReader:
    """Reader of the layers of one format for the C++ library.

    Attributes:
        describe: (format, tensors, out_features, in_features) → the struct of the layer.
        refuses: (format, in_features) → why a layer cannot be read, or None.
        accepts: format → True if the reader supports the format, an instance of the registered class.
        takes_subclasses: True if subclasses are read as well. A subclass may read its codes differently, so
            the default is False.
        reads_values: True if `describe` reads values of tensors, and not only their addresses.
    """

    describe: Describe
    refuses: Callable[[Any, int], str | None]
    accepts: Callable[[Any], bool]
    takes_subclasses: bool
    reads_values: bool


_READERS: dict[type, LayerReader] = {}


def reads(
    *formats: type,
    refuses: Callable[[Any, int], str | None] = _nothing,
    accepts: Callable[[Any], bool] = _always,
    takes_subclasses: bool = False,
    reads_values: bool = False,
) -> Callable[[F], F]:
    """Registers the decorated function to describe layers of these formats; see `LayerReader`."""

    def register(describe: F) -> F:
        for format_class in formats:
            reader = LayerReader(describe, refuses, accepts, takes_subclasses, reads_values)
            _READERS[format_class] = reader
        return describe

    return register


def reader_of(weight_format: Format) -> LayerReader | None:
    """Returns the reader of a format, or None if the C++ library does not support it."""
    for format_class in type(weight_format).__mro__:
        reader = _READERS.get(format_class)
        if reader is not None and (reader.takes_subclasses or format_class is type(weight_format)):
            return reader if reader.accepts(weight_format) else None
    return None
