"""Tensors of a layer that a module holds from call to call."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LayerTensors"]


class LayerTensors(dict[str, torch.Tensor]):
    """Tensors of a layer, keyed by name in the checkpoint, whose addresses never change.

    Asking torch for a tensor's address and layout takes longer than multiplying by a small layer. Kernels
    therefore cache the answers here.

    Attributes:
        answers: The cached addresses and layouts, by kernel. Values of the tensors are never cached. Neither
            copied nor pickled.
    """

    __slots__ = ("answers",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.answers: dict[str, object] = {}

    def __reduce__(self) -> tuple:
        return LayerTensors, (dict(self),)
