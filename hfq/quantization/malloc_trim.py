"""Freed memory goes back to the system: the C library keeps what lies between live tensors, and the peak
would grow by it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["trim_heap"]


def trim_heap() -> None:
    """Gives all that is free back, where the C library can; some milliseconds."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # not glibc
        return None
