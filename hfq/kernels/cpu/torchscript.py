"""Plain torch without Python between its operations: TorchScript, where torch has it.

A call of a script gives the interpreter's lock away once, not once for each operation, so threads that multiply side by side
(`hfq.kernels.cpu.thread_team`) do not wait for each other to begin the next.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.utils import _python_dispatch

__all__ = ["scripted"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def scripted(function: Callable[P, R]) -> Callable[P, R]:
    """The function in TorchScript, which it must be within the limits of, from its first call on.

    Where torch compiles none (it calls TorchScript deprecated; without source files there is nothing to compile), the function is
    called as it is, which does the same in more time; so it is while operations are watched (`TorchDispatchMode`), whose errors
    TorchScript would make others of.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        compiled = function if _python_dispatch._len_torch_dispatch_stack() else _compile(function)
        return compiled(*args, **kwargs)

    return call


_compiling = threading.Lock()
"""Warnings are caught for all threads at once, so one at a time may catch them."""


@functools.cache
def _compile(function: Callable[P, R]) -> Callable[P, R]:
    try:
        with _compiling, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its deprecation
            return torch.jit.script(function)
    except (AttributeError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError) as error:
        logger.info(
            "TorchScript does not take %s, which runs in Python, to the same results: %s", function.__qualname__, error
        )
        return function
