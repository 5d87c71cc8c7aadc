"""Tensors of a layer that a module holds from call to call, and a check of their device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hfq.errors import SetupError

__all__ = ["LayerTensors", "check_on_cpu"]


def check_on_cpu(tensors: Mapping[str, torch.Tensor], values: torch.Tensor | None = None) -> None:
    """Checks that a kernel of the CPU may take the addresses of a layer's tensors.

    Args:
        tensors: Tensors of the layer.
        values: Activations, or their gradient; None if they are checked elsewhere.

    Raises:
        SetupError: A tensor is on another device.
    """
    if values is not None and not values.is_cpu:
        raise _elsewhere("activations", values)
    for name, tensor in tensors.items():
        if not tensor.is_cpu:
            raise _elsewhere(name, tensor)


def _elsewhere(name: str, found: torch.Tensor) -> SetupError:
    return SetupError(
        "A kernel of the CPU received a tensor on another device.",
        tensor=name,
        expected=f"{found.nbytes:,} B in CPU memory",
        found=str(found.device),
        fix="Move the layer and its activations to one device.",
    )


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
