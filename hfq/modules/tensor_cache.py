"""What a packed module remembers of its tensors from call to call."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping

import torch
from torch import nn

from hfq.kernels.layer_tensors import LayerTensors

__all__ = ["TensorCache"]


class TensorCache:
    """A module's tensors where they rest, remembered while the parameters that they are live, and are what
    and where they were.

    Args:
        parameters: The module's, before its tensors are looked for: one that another thread replaces
            meanwhile is then noticed.
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
        """Remembers the tensors, and whether any is on `meta`; returns what `find` will."""
        self._found = found = LayerTensors(tensors), is_meta
        if any(source[1]() is None for source in self._sources):
            self._found = None
        return found

    def find(self, parameters: Mapping[str, nn.Parameter | None]) -> tuple[LayerTensors, bool] | None:
        """What was remembered, where the parameters are still those; else None."""
        found = self._found  # before the others are looked at: another thread may replace one meanwhile
        if len(parameters) != len(self._sources):
            return None
        for (
            name,
            source,
            place,
            dtype,
            shape,
            strides,
        ) in self._sources:  # a generator takes several times as long
            parameter = parameters.get(name)
            if parameter is None or source() is not parameter or parameter.data_ptr() != place:
                return None
            if parameter.dtype is not dtype or parameter.shape != shape or parameter.stride() != strides:
                return None
        return found

    def __reduce__(self) -> tuple:
        return type(None), ()  # a copy of the module finds its own


def _forget(cache: weakref.ref[TensorCache], _: object) -> None:
    """Lets go of the tensors with a parameter that is gone: they would keep its memory, until a next call or
    for ever.
    """
    alive = cache()
    if alive is not None:
        alive._found = None
