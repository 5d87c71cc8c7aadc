"""Release of the tensors of a collective by torch's gloo threads.

A thread holds them for a moment after the collective is done, and needs Python's lock to release them. If
Python shuts down in that moment, as after an error that is raised right behind the collective, Python before
3.14 ends the thread, and torch's C++ code then aborts the process ("terminate called without an active
exception").
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["releasing_tensors"]

_SECONDS = 5.0
"""Longest wait for the threads, for tensors that something else keeps."""


class _Seen(TorchFunctionMode):
    """A mode that records the tensors that torch's functions return, by weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[weakref.ref[torch.Tensor]] = []

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.tensors.append(weakref.ref(made))
        return made


@contextlib.contextmanager
def releasing_tensors() -> Iterator[None]:
    """A context manager for a collective of Python objects.

    It ends when torch has released the tensors of the collective.
    """
    seen = _Seen()
    with seen:
        yield
    deadline = time.monotonic() + _SECONDS
    while any(tensor() is not None for tensor in seen.tensors) and time.monotonic() < deadline:
        time.sleep(0.001)
