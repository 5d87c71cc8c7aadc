"""Stand-ins for offloaded parameters, with which no computation is possible.

torch would compute made-up values from tensors on the meta device. Here such a computation is an error.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree

from hfq.errors import PlacementError, SetupError

__all__ = ["OffloadedParameter", "check_stays", "no_copy"]

_REDUCTIONS = (
    *("all", "allclose", "amax", "amin", "any", "count_nonzero", "equal", "logsumexp", "mean", "median"),
    *("norm", "prod", "std", "sum", "var"),
)
_COMPUTES = {
    F.linear,
    F.embedding,
    F.conv1d,
    F.conv2d,
    F.layer_norm,
    F.rms_norm,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.mul,
    torch.add,
    torch.einsum,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.mm,
    torch.Tensor.mul,
    torch.Tensor.add,
    torch.Tensor.__getitem__,
    torch.Tensor.__mul__,
    torch.Tensor.__rmul__,
    torch.Tensor.__add__,
    torch.Tensor.__radd__,
    torch.Tensor.t,
    torch.t,
    torch.Tensor.transpose,
    torch.transpose,
    torch.Tensor.permute,
    torch.Tensor.T.__get__,  # type: ignore[attr-defined]
    torch.Tensor.mT.__get__,  # type: ignore[attr-defined]
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.linalg.norm,
    torch.linalg.vector_norm,
    torch.linalg.matrix_norm,
    *(getattr(owner, name) for owner in (torch, torch.Tensor) for name in _REDUCTIONS),
}
_MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}
_WITHOUT_VALUES = {
    torch.Tensor.grad.__get__,  # type: ignore[union-attr]
    torch.Tensor.requires_grad_,
    torch.Tensor.copy_,
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.rand_like,
    torch.randn_like,
    torch.full_like,
    torch.Tensor.new_empty,
    torch.Tensor.new_zeros,
    torch.Tensor.new_ones,
    torch.Tensor.new_full,
    torch.Tensor.new_tensor,
}
"""Functions that read no values of a weight, and those that initialization applies to it."""
_READS_STORAGE = {
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.item,
}


class OffloadedParameter(nn.Parameter):
    """A parameter on meta whose values are offloaded, and onloaded while its module computes.

    torch 2.13 returns uninitialized values for `F.linear(cpu, meta)`, and meta tensors for a lookup. Here
    both
    raise an error, as does every function that combines the parameter, or a result of it, with values. A move
    to its execution device leaves it unchanged: Trainer and Accelerator move every model.

    Attributes:
        name: Its name, for messages.
        placed_by: Name of the parameter whose entry in a device map decides where it is stored, if it is tied
            to another one; empty for its own name.
        onload_device: Device to which its values are onloaded; None before the offloader sets it.
    """

    name: str = "A parameter"
    placed_by: str = ""
    onload_device: torch.device | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device to which the values are onloaded, for code that moves an input to its weight.

        `is_meta` tells whether the parameter is offloaded.
        """
        return self.onload_device or torch.device("meta")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise no_copy(self.name)

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        if self.onload_device is not None:
            raise no_copy(self.name)
        return super().__deepcopy__(memo)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MOVES and isinstance(args[0], cls) and args[0].onload_device is not None:
            return _moved(args[0], func, args, kwargs or {})
        return _guarded(func, args, kwargs or {})


class OffloadedValues(torch.Tensor):
    """A result of an `OffloadedParameter` on meta, such as a view, or its entry in `state_dict`.

    Computing with it is an error, too, and so is pickling it.
    """

    name: str = "A parameter"
    placed_by: str = ""
    onload_device: torch.device | None = None

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise no_copy(self.name)

    def __deepcopy__(self, memo: dict) -> OffloadedValues:
        return self  # it has no values that could change

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _guarded(func, args, kwargs or {})


def _guarded(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function that cannot return made-up values; guards its results on meta.

    Raises:
        PlacementError: The function computes with the weight, or changes it after the load.
    """
    changed = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes keywords
    if isinstance(changed, (OffloadedParameter, OffloadedValues)) and _changes(func, changed):
        raise _not_here(func, changed, "changed")
    tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    away = next(leaf for leaf in tensors if isinstance(leaf, (OffloadedParameter, OffloadedValues)))
    if func in _READS_STORAGE:
        raise no_copy(away.name)
    is_plain = func in _WITHOUT_VALUES or getattr(func, "__name__", "") in (
        "__set__",
        "__delete__",
        "__deepcopy__",
    )
    with torch._C.DisableTorchFunctionSubclass():
        is_moved = func in _MOVES and isinstance(args[0], OffloadedValues)
        if func in _COMPUTES or is_moved or (not is_plain and any(not leaf.is_meta for leaf in tensors)):
            raise _not_here(func, away)
        result = func(*args, **kwargs)
        made_up = any(
            isinstance(leaf, torch.Tensor) and not leaf.is_meta for leaf in _pytree.tree_leaves(result)
        )
        if made_up and not is_plain:
            raise _not_here(func, away)
        is_kept = (
            is_plain or func in _MOVES or isinstance(result, torch.Size)
        )  # a tree map would make a tuple of it
        return result if is_kept else _pytree.tree_map(lambda leaf: _guard(leaf, away), result)


def _guard(leaf: Any, away: OffloadedParameter | OffloadedValues) -> Any:
    if type(leaf) is not torch.Tensor or not leaf.is_meta:
        return leaf
    values = leaf.as_subclass(OffloadedValues)
    values.name, values.placed_by, values.onload_device = away.name, away.placed_by, away.onload_device
    return values


def _changes(func: Any, away: OffloadedParameter | OffloadedValues) -> bool:
    """Returns True for a function that changes values in place, once the load is over."""
    name = getattr(func, "__name__", "")
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return is_in_place and away.onload_device is not None and name not in ("requires_grad_", "detach_")


def _not_here(
    func: Any, away: OffloadedParameter | OffloadedValues, done: str = "read directly"
) -> PlacementError:
    name, module = away.name, away.name.rpartition(".")[0]
    entry = f'{{"{away.placed_by.rpartition(".")[0] or module}": "cpu"}}'
    call = "Add" if done == "changed" else f"Call model.{module}(x), or add"
    return PlacementError(
        f"{name or 'A parameter'} is offloaded and cannot be {done} by {_name_of(func)}.",
        tensor=name if module else None,
        expected="a call of the module that owns the weight",
        found=f"its weight, {done.split()[0]} by other code",
        fix=f"{call} {entry} to device_map."
        if module
        else "Call the module that owns the weight, or place it in memory by device_map.",
    )


def _name_of(func: Any) -> str:
    """Returns the name of a function, or `.T` for the getter of the attribute `T`."""
    name = getattr(func, "__name__", str(func))
    return f".{func.__self__.__name__}" if name == "__get__" else name


def no_copy(name: str) -> SetupError:
    """Returns the error of code that copies, pickles, or writes an offloaded part of a model."""
    return SetupError(
        "A model with offloaded parts cannot be copied, pickled, or written by other code.",
        expected="a model without offloaded parts",
        found=f"{name}, which is offloaded",
        fix="Save the model by model.save_pretrained(folder). To have a second model, load it again.",
    )


def check_stays(name: str, device: torch.device, asked: torch.device, reason: str = "is offloaded") -> None:
    """Raises an error if a weight that must stay is moved to another device.

    Raises:
        PlacementError: Another device is asked for.
    """
    if asked.type != device.type or (
        asked.index is not None and device.index is not None and asked.index != device.index
    ):
        raise PlacementError(
            f"{name} {reason} and cannot be moved.",
            expected=str(device),
            found=str(asked),
            fix="Load the model with a device_map that names the new device.",
        )


def _moved(parameter: OffloadedParameter, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Returns the parameter with the dtype that `func` casts it to; it stays offloaded.

    Raises:
        PlacementError: `func` moves it to another device than its execution device.
    """
    device, dtype = torch.device(func.__name__) if func is not torch.Tensor.to else None, None
    if func is torch.Tensor.to:
        device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
    if device is not None and device.type != "meta":
        check_stays(parameter.name, parameter.onload_device, device)  # type: ignore[arg-type]
    with torch._C.DisableTorchFunctionSubclass():
        return parameter if dtype is None else parameter.to(dtype)
