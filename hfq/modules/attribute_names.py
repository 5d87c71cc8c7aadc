"""Attribute names of stored tensors."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["attribute_names"]

_RESERVED = (
    "flat_buffer",
    "kernel",
    "accelerated",
    "scheme",
    "outliers",
    "local_in_features",
    "num_embeddings",
    "embedding_dim",
    "_attributes",
    "_kinds",
)
"""Attributes of subclasses; no stored tensor may take one of these names."""
_ATTRIBUTES: dict[tuple[type, tuple[str, ...]], dict[str, str]] = {}


def attribute_names(module: Any) -> dict[str, str]:
    """Returns the attribute name of each stored tensor, in one object for all equal modules.

    Args:
        module: A quantized module with its `infos`, before it holds anything.
    """
    key = type(module), tuple(module.infos)
    if key not in _ATTRIBUTES:
        attributes: dict[str, str] = {}
        for local in module.infos:
            taken = {*vars(module), *attributes.values()}
            attributes[local] = _attribute(local, taken, _names_of(type(module)))  # type: ignore[arg-type]
        _ATTRIBUTES[key] = attributes
    return _ATTRIBUTES[key]


@functools.cache
def _names_of(cls: type) -> frozenset[str]:
    """Returns the names that a class uses itself."""
    return frozenset({*dir(cls), *_RESERVED})


def _attribute(local: str, taken: set[str], reserved: frozenset[str]) -> str:
    """Returns the attribute name of a stored tensor.

    torch allows no dots in it, and it must differ from the module's other attributes.
    """
    name = local.replace(".", "__")
    while name in taken or name in reserved:
        name = f"stored_{name}"
    return name
