"""Limits of torch's graph capture: parts that stay out, and graphs that are not made.

Quantized layers in memory are operators in a graph (`graph_ops`). Offloaded weights are in memory for one
call only, and a recorded graph would keep their addresses.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch._C._dynamo import eval_frame

from hfq.errors import SetupError
from hfq.formats.codecs.thread_buffers import is_graph_recorded

__all__ = ["check_not_captured", "check_not_recorded", "is_captured", "uncompiled"]

_F = TypeVar("_F", bound=Callable)
_REASON = "A graph holds quantized layers only if their tensors stay in memory."
_FIX = "Leave fullgraph=True out, or load the model into the memory of one device."
_PROXY = torch._C._TorchDispatchModeKey.PROXY

_tracing_state = torch._C._get_tracing_state
_transform_level = torch._C._functorch.maybe_current_level
_count_modes = torch._C._len_torch_dispatch_stack


def uncompiled(function: _F, is_recursive: bool = True, reason: str = _REASON, fix: str = _FIX) -> _F:
    """Keeps a function out of the graphs of `torch.compile`; returns the function itself.

    This is `torch.compiler.disable` without its wrapper, which costs time in each call, and without the
    import of torch's compiler.

    Args:
        function: A Python function.
        is_recursive: True if the functions that it calls are not compiled either.
        reason: Why no graph holds it, for the message under `fullgraph=True`.
        fix: What to change, for the same message.
    """
    actions = eval_frame._FrameAction
    called = actions.SKIP if is_recursive else actions.DEFAULT
    strategy = eval_frame._FrameExecStrategy(actions.SKIP, called)
    eval_frame.set_code_exec_strategy(cast(types.FunctionType, function).__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = f"{reason} Fix: {fix}"  # type: ignore[attr-defined]
    return function


def is_captured() -> bool:
    """Returns True if torch may be recording operations or transforming a function."""
    return (
        _tracing_state() is not None
        or _transform_level() is not None
        or _count_modes() > 0
        or torch.compiler.is_exporting()
    )


def check_not_captured(name: str) -> None:
    """Checks that torch computes and does not record a graph. Call it if `is_captured()`.

    Args:
        name: The module that computes.

    Raises:
        SetupError: Operations are recorded or transformed.
    """
    found = _captured_by()
    if found is not None:
        raise SetupError(
            f"{name} cannot be captured by {found}. Only torch.compile and torch.export make graphs of "
            "quantized layers, and only of those in memory.",
            expected="torch.compile, or torch.export of a model in the memory of one device",
            found=found,
            fix="Call the model itself, or compile it by torch.compile without fullgraph=True.",
        )


def check_not_recorded(name: str, reason: str) -> None:
    """Checks that no CUDA graph records the current stream.

    Args:
        name: The module that computes.
        reason: Why a graph cannot hold it, for the message.

    Raises:
        SetupError: A CUDA graph is recorded.
    """
    device = torch.accelerator.current_accelerator()
    if device is not None and is_graph_recorded(device):
        raise SetupError(
            f"{name} cannot be recorded in a CUDA graph: {reason}.",
            expected="quantized layers in the memory of the device, without hooks or adapters",
            found=reason,
            fix='Load the model with device_map={"": 0}, or call it outside of the graph.',
        )


def _captured_by() -> str | None:
    """Returns the part of torch that records or transforms the current computation, or None."""
    if _tracing_state() is not None:
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    if torch._C._get_dispatch_mode(_PROXY) is not None:
        return "make_fx"
    return "torch.func" if _transform_level() is not None else None
