"""Checks around units: inputs without values, outputs in the buffer, moves, unnamed errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from hfq.checkpoint import Reader
from hfq.errors import HfqError, PlacementError
from hfq.modules.graph_capture import check_not_captured, check_not_recorded, is_captured
from hfq.modules.offloaded_parameter import check_stays
from hfq.placement.device_map import ancestors

__all__ = [
    "InputMover",
    "WriteGuard",
    "check_inputs",
    "check_moves",
    "check_parts",
    "in_unit",
    "own_outputs",
    "send_to",
]


def check_inputs(name: str, inputs: Sequence[object]) -> None:
    """Checks that a unit computes with values, and that torch records no graph of it.

    Model code makes an input on meta when it moves a tensor to the device of an offloaded weight. torch
    computes garbage from it.

    Raises:
        PlacementError: An input is on meta.
        SetupError: torch or CUDA records a graph, which would keep tensors of the offload buffer.
    """
    if is_captured():
        check_not_captured(name)
    check_not_recorded(name, "its weights are offloaded, and a replay would read no bytes")
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in inputs):
        raise PlacementError(
            f"{name} received an input on meta: model code moved it to the device of an offloaded weight.",
            expected="an input with values",
            found="a tensor on meta",
            fix=f'Add {{"{name}": "cpu"}} to device_map.',
        )


def check_moves(module: nn.Module, places: Mapping[torch.device, str], reason: str = "is offloaded") -> None:
    """Makes a move of a module fail before any part of it has moved.

    Args:
        module: The model, or a part of it.
        places: The name of a part on each device that it must stay on.
        reason: Why it must stay, for the message.
    """
    # a partial object, since a copied model must move itself
    module._apply = functools.partial(  # type: ignore[method-assign]
        _apply_in_place, module._apply, places, reason
    )


def check_parts(model: nn.Module, devices: Mapping[str, str]) -> None:
    """Makes moves of a model on several devices fail, and those of its parts.

    Args:
        model: The model.
        devices: Execution device of each unit, by its name.
    """
    parts: dict[str, dict[torch.device, str]] = {}
    for name, device in devices.items():
        for path in ("", *ancestors(name), name):
            parts.setdefault(path, {}).setdefault(torch.device(device), name)
    for path, places in parts.items():
        check_moves(model.get_submodule(path), places, "is a part of a model on several devices")


def _apply_in_place(
    apply: Callable[..., nn.Module],
    places: Mapping[torch.device, str],
    reason: str,
    fn: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,
) -> nn.Module:
    for device, name in places.items():
        check_stays(name, device, fn(torch.empty(0, device=device)).device, reason)
    return apply(fn, recurse)


class WriteGuard:
    """Refuses to load values into offloaded weights before anything is written.

    A write would not reach the file, nor the bytes that an accelerator already holds.

    Args:
        names: Names of the offloaded tensors.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)

    def check(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Raises an error if a state dict holds an offloaded tensor; a torch pre-hook.

        Raises:
            PlacementError: Names the tensor.
        """
        found = next((key for key in state_dict if key.removeprefix(prefix) in self._names), None)
        if found is not None and found.startswith(prefix):
            raise PlacementError(
                "load_state_dict cannot write to offloaded weights. Nothing was written.",
                tensor=found,
                expected="weights that are in the memory of the device that computes with them",
                found="an offloaded weight",
                fix="Load the changed checkpoint with from_pretrained, or pass the other weights only.",
            )


class InputMover:
    """Moves the inputs of a model without an offloader to its device, where outputs stay.

    torch pickles hooks before modules. So a pickle ends with the error of the reader, and not at a hook of
    accelerate, which cannot be pickled.

    Args:
        reader: Reads the checkpoint of the model.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def move(self, model: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the inputs on the device of the model, wherever it was moved; a forward pre-hook."""
        return send_to(args, model.device), send_to(kwargs, model.device)


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
