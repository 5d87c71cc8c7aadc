"""Settings of Python and torch under which a load creates many objects and tensors quickly."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch
from torch.overrides import _pop_mode_temporarily

__all__ = ["pausing_collection", "without_torch_modes"]


@contextlib.contextmanager
def pausing_collection() -> Iterator[None]:
    """A context manager in which Python searches for no reference cycles.

    A load keeps almost every object that it creates, and each search would visit all of them.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


@contextlib.contextmanager
def without_torch_modes() -> Iterator[None]:
    """A context manager in which torch calls no mode, and the default device is the CPU.

    transformers builds a model under `torch.device("meta")`, a mode that runs Python code in each call of
    torch.
    """
    with contextlib.ExitStack() as stack:
        while torch._C._len_torch_function_stack():
            stack.enter_context(_pop_mode_temporarily())
        yield
