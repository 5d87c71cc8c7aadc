"""The tensors of a layer as a module holds them from call to call."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LayerTensors"]


class LayerTensors(dict[str, torch.Tensor]):
    """A layer's tensors, by local on-disk name, that stay what and where they are for as long as this mapping
    is used.

    To ask torch where a tensor lies and how takes longer than to multiply by a small layer, so kernels keep
    the answers here.

    Attributes:
        answers: By kernel, what it keeps of these tensors: where they lie, never what is in them. Not copied,
            nor pickled.
    """

    __slots__ = ("answers",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.answers: dict[str, object] = {}

    def __reduce__(self) -> tuple:
        return LayerTensors, (dict(self),)
