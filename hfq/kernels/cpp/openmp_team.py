"""The OpenMP threads of torch, which the C++ libraries share.

After a product, torch's threads stay awake for some milliseconds. A second pool would compete with them for
the processors, and two threads would be no faster than one.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

__all__ = ["team"]


def team() -> int | None:
    """Returns the address of `GOMP_parallel` in torch's OpenMP runtime.

    This is libgomp's ABI, which LLVM's and Intel's runtimes also have.

    Returns:
        None if torch was built without OpenMP. Also None in the child of a fork, where the runtime would wait
        for threads that do not exist.
    """
    return None if _is_forked(os.getpid()) else _found()


_process, _FORKED = os.getpid(), 0x40
"""The process that imported this module, and Linux's flag PF_FORKNOEXEC (sched.h).

The flag marks a forked process that has not called exec.
"""


@functools.cache
def _is_forked(process: int) -> bool:
    """Returns True if this process is the child of a fork.

    Also detects a child that imports this module itself, after its parent imported torch only.
    """
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        return process != _process or bool(int(fields[6]) & _FORKED)
    except (OSError, IndexError, ValueError):  # not Linux
        return process != _process


@functools.cache
def _found() -> int | None:
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        return ctypes.cast(torch_library.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
