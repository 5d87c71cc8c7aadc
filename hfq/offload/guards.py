"""Checks around units: inputs without values, outputs in the buffer, moves, unnamed errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from hfq.errors import HfqError, PlacementError
from hfq.modules.graph_capture import check_not_captured, is_captured
from hfq.modules.offloaded_parameter import check_stays

__all__ = ["check_inputs", "check_moves", "in_unit", "own_outputs", "send_to"]


def check_inputs(name: str, inputs: Sequence[object]) -> None:
    """Checks that a unit computes with values, and that torch records no graph of it.

    Model code makes an input on meta when it moves a tensor to the device of an offloaded weight. torch
    computes garbage from it.

    Raises:
        PlacementError: An input is on meta.
        SetupError: torch records a graph, which would keep tensors of the offload buffer.
    """
    if is_captured():
        check_not_captured(name)
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in inputs):
        raise PlacementError(
            f"{name} received an input on meta: model code moved it to the device of an offloaded weight.",
            expected="an input with values",
            found="a tensor on meta",
            fix=f'Add {{"{name}": "cpu"}} to device_map.',
        )


def check_moves(root: nn.Module, offloaded: Mapping[torch.device, str]) -> None:
    """Makes a move of a whole model fail before any part of it has moved.

    Args:
        root: The model.
        offloaded: The name of an offloaded part of each execution device.
    """
    apply = root._apply

    @functools.wraps(apply)
    def moved(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for device, name in offloaded.items():
            check_stays(name, device, fn(torch.empty(0, device=device)).device)
        return apply(fn, recurse)

    root._apply = moved  # type: ignore[method-assign]


def send_to(inputs: Any, device: torch.device) -> Any:
    """Returns the inputs of a model with all tensors on its first accelerator."""
    if device.type == "cpu":
        return inputs

    def sent(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) and value.device != device else value

    return _pytree.tree_map(sent, inputs)


def own_outputs(outputs: Any, buffer: torch.Tensor) -> Any:
    """Returns the outputs of a unit.

    Views of its buffer, which another unit overwrites, are copied.
    """
    own = buffer.untyped_storage().data_ptr()

    def is_view(value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.device == buffer.device
            and value.untyped_storage().data_ptr() == own
        )

    if buffer.numel() and any(is_view(leaf) for leaf in _pytree.tree_leaves(outputs)):
        return _pytree.tree_map(lambda leaf: leaf.clone() if is_view(leaf) else leaf, outputs)
    return outputs


def in_unit(error: HfqError, name: str) -> HfqError:
    """Returns the same error with the name of the unit that needed the bytes."""
    fields = {
        key: getattr(error, key) for key in ("fix", "file", "tensor", "rank", "expected", "found", "problems")
    }
    return type(error)(f"{name}: {error.message}", **fields)
