"""Return of freed memory to the system.

The C library keeps free memory between live tensors, which would increase peak memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["trim_heap"]


def trim_heap() -> None:
    """Returns all free memory to the system if the C library supports it."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # not glibc
        return None
