"""The stand-in for a parameter that rests elsewhere: computing with it is an error, where torch would make up values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hfq.errors import PlacementError

__all__ = ["AwayParameter", "check_stays"]

_COMPUTES = {
    F.linear, F.embedding, F.conv1d, F.conv2d, F.layer_norm, F.rms_norm, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.mul,
    torch.add, torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm, torch.Tensor.mul, torch.Tensor.add,
    torch.Tensor.__getitem__, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.Tensor.__add__, torch.Tensor.__radd__,
    torch.Tensor.t, torch.t, torch.Tensor.transpose, torch.transpose, torch.Tensor.permute, torch.Tensor.T.__get__,  # type: ignore[attr-defined]
    torch.Tensor.mT.__get__,  # type: ignore[attr-defined]
}  # fmt: skip
_MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}


class AwayParameter(nn.Parameter):
    """A parameter on meta whose values are on disk, or in another memory, and are lent to its module while it computes.

    torch 2.13 gives uninitialised values for `F.linear(cpu, meta)`, and meta tensors for a lookup; here both raise. Moving it to
    where it computes leaves it as it is: Trainer and Accelerate move every model.

    Attributes:
        name: Its name, for messages.
        brought_to: Where its values are lent; None until a streamer has it.
    """

    name: str = "A parameter"
    brought_to: torch.device | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where its values are lent: code that takes an input to its weight takes it there. `is_meta` says where they rest."""
        return self.brought_to or torch.device("meta")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COMPUTES:
            raise PlacementError(
                f"{getattr(func, '__name__', func)} was given a weight that is not in memory: it is lent to its own module alone, "
                "while that computes.",
                expected="a call of the module that owns the weight", found="its weight, read by other code",
                fix="give this module a home in memory in device_map, or call the module",
            )  # fmt: skip
        if func in _MOVES and args[0].brought_to is not None:
            return _moved(args[0], func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def check_stays(name: str, device: torch.device, asked: torch.device) -> None:
    """Refuses to move a weight that rests elsewhere: its values are brought to the device it was loaded for.

    Raises:
        PlacementError: Another device is asked for.
    """
    if asked.type != device.type or (asked.index is not None and device.index is not None and asked.index != device.index):
        raise PlacementError(
            f"{name} rests elsewhere than where it computes, and cannot be moved.", expected=str(device), found=str(asked),
            fix="load the model with a device_map that names the device that computes",
        )  # fmt: skip


def _moved(parameter: AwayParameter, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """The parameter as `func` casts it; it stays away.

    Raises:
        PlacementError: It is to be moved to another device than that it is lent on.
    """
    device, dtype = torch.device(func.__name__) if func is not torch.Tensor.to else None, None
    if func is torch.Tensor.to:
        device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
    if device is not None and device.type != "meta":
        check_stays(parameter.name, parameter.brought_to, device)  # type: ignore[arg-type]
    with torch._C.DisableTorchFunctionSubclass():
        return parameter if dtype is None else parameter.to(dtype)
