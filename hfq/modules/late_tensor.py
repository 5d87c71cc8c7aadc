"""A tensor whose values are still being computed elsewhere, until something reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

__all__ = ["LateTensor", "await_outputs", "awaited"]

_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._reshape_alias.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.detach.default,
}


class LateTensor(torch.Tensor):
    """Waits at the first operation, except for changes of its shape.

    Args:
        like: A tensor of the same shape, strides, dtype, and device.
        join: Waits, and returns the values.
    """

    _join: Callable[[], torch.Tensor]
    _value: torch.Tensor | None

    @staticmethod
    def __new__(cls, like: torch.Tensor, join: Callable[[], torch.Tensor]) -> LateTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, like.stride(), dtype=like.dtype, device=like.device
        )

    def __init__(self, like: torch.Tensor, join: Callable[[], torch.Tensor]) -> None:
        self._join, self._value = join, None

    def value(self) -> torch.Tensor:
        """Returns the values as a plain tensor."""
        if self._value is None:
            self._value = self._join()
            del self._join
        return self._value

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.value())

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if func in _VIEWS and isinstance(first, LateTensor) and first._value is None:
            shape = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device="meta")
            view = _Described(func(shape, *args[1:]), first.device)
            return LateTensor(view, lambda: func(first.value(), *args[1:]))  # type: ignore[arg-type]
        return func(*awaited(args), **awaited(kwargs or {}))


class _Described:
    """Shape and dtype of a tensor on meta, with another device."""

    def __init__(self, meta: torch.Tensor, device: torch.device) -> None:
        self.shape, self.stride, self.dtype, self.device = meta.shape, meta.stride, meta.dtype, device


def awaited(values: Any) -> Any:
    """Returns the same values with plain tensors in the place of late ones."""
    return _pytree.tree_map(lambda value: value.value() if isinstance(value, LateTensor) else value, values)


def await_outputs(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    """Forward hook: no late tensor leaves the module."""
    return awaited(outputs)
