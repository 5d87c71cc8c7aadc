"""The threads that torch multiplies with: the compiled parts work on the same ones, since others would wait
behind them.

Between torch's products its threads stay awake for some milliseconds. A second pool would share the
processors with them, and two threads would be no faster than one.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

__all__ = ["team"]


def team() -> int | None:
    """The address of the OpenMP runtime's `GOMP_parallel` that torch itself calls (libgomp's ABI, which
    LLVM's and Intel's runtimes also have); None where torch was built without, and in the child of a fork,
    where the runtime has no threads and waits for them.
    """
    return None if _is_forked(os.getpid()) else _found()


_process, _FORKED = os.getpid(), 0x40
"""Who imported this; and Linux's flag of a process that was forked and has begun no program since
(PF_FORKNOEXEC, sched.h).
"""


@functools.cache
def _is_forked(process: int) -> bool:
    """Whether this process is the child of a fork; also one that imports this itself, after its parent had
    torch alone.
    """
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        return process != _process or bool(int(fields[6]) & _FORKED)
    except (OSError, IndexError, ValueError):  # no Linux
        return process != _process


@functools.cache
def _found() -> int | None:
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        return ctypes.cast(torch_library.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
