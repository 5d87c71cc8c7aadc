"""Cache of a quantized module's tensors between calls."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping

import torch
from torch import nn

from hfq.kernels.layer_tensors import LayerTensors

__all__ = ["TensorCache"]


class TensorCache:
    """Tensors of a module, valid while its parameters are the same objects and addresses.

    Args:
        parameters: The module's parameters, taken before its tensors are looked up. So a parameter that
            another thread replaces in between is noticed.
    """

    __slots__ = ("__weakref__", "_found", "_sources")

    def __init__(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        self._found: tuple[LayerTensors, bool] | None = None
        forget = functools.partial(_forget, weakref.ref(self))
        self._sources = [
            (
                name,
                weakref.ref(parameter, forget),
                parameter.data_ptr(),
                parameter.dtype,
                parameter.shape,
                parameter.stride(),
            )
            for name, parameter in tuple(parameters.items())
            if parameter is not None
        ]

    def keep(self, tensors: Mapping[str, torch.Tensor], is_meta: bool) -> tuple[LayerTensors, bool]:
        """Caches the tensors, and whether any is on `meta`; returns the result of `find`."""
        self._found = found = LayerTensors(tensors), is_meta
        if any(source[1]() is None for source in self._sources):
            self._found = None
        return found

    def find(self, parameters: Mapping[str, nn.Parameter | None]) -> tuple[LayerTensors, bool] | None:
        """Returns the cached tensors, or None if a parameter changed."""
        found = self._found  # before the comparison, since another thread may replace a parameter meanwhile
        if len(parameters) != len(self._sources):
            return None
        for (
            name,
            source,
            place,
            dtype,
            shape,
            strides,
        ) in self._sources:  # a loop, since a generator is several times slower
            parameter = parameters.get(name)
            if parameter is None or source() is not parameter or parameter.data_ptr() != place:
                return None
            if parameter.dtype is not dtype or parameter.shape != shape or parameter.stride() != strides:
                return None
        return found

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of the module builds its own cache


def _forget(cache: weakref.ref[TensorCache], _: object) -> None:
    """Drops the tensors when a parameter is freed, so that its memory is freed, too."""
    alive = cache()
    if alive is not None:
        alive._found = None
