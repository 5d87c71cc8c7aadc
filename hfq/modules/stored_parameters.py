"""Stored tensors of a quantized module as parameters."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import nn

from hfq.errors import SetupError
from hfq.modules.changes import note_change

__all__ = ["StoredParameter", "StoredParameters", "no_parameter"]


class StoredParameter(nn.Parameter):
    """A stored tensor, frozen, which transformers must not initialize."""

    _is_hf_initialized = True

    def __new__(cls, tensor: torch.Tensor, requires_grad: bool = False) -> StoredParameter:
        if type(tensor) is torch.Tensor:
            return torch.Tensor._make_subclass(cls, tensor, requires_grad)
        return super().__new__(cls, tensor, requires_grad)


class StoredParameters(dict[str, nn.Parameter | None]):
    """Parameters of a quantized module, with an error for code that takes a float weight out.

    `torch.nn.utils.weight_norm` and `spectral_norm` do so, to compute the weight from other parameters.
    """

    __slots__ = ("module",)

    def __init__(self, module: str = "") -> None:
        super().__init__()
        self.module = module

    def __missing__(self, key: str) -> NoReturn:
        raise no_parameter(self.module, key)

    def __setitem__(self, key: str, value: nn.Parameter | None) -> None:
        super().__setitem__(key, value)
        note_change()

    def clear(self) -> None:
        super().clear()
        note_change()

    def __delitem__(self, key: str) -> None:
        if key == "weight" or key not in self:
            raise no_parameter(self.module, key)
        super().__delitem__(key)
        note_change()


def no_parameter(module: str, name: str) -> SetupError:
    """Returns the error for code that replaces a float parameter of a quantized module."""
    return SetupError(
        f"{module} is quantized and has no float parameter {name!r} that can be replaced.",
        tensor=f"{module}.{name}",
        expected="an unquantized layer",
        found="a normalization, pruning, or new parameter of a quantized layer",
        fix="Leave this layer out, or call model.dequantize() first.",
    )
