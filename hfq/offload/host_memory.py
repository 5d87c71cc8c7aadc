"""Large host buffers: private, aligned to 2 MiB, in huge pages where the system gives them, zeroed by the
system.

Direct reads into memory of 4 KiB pages reach half the speed of those into huge pages (one request then
carries few pages), and the first touch of small pages costs about as much as a disk. A buffer is therefore
made once and reused.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from contextvars import ContextVar

import torch

__all__ = ["HUGE_PAGE", "huge_buffer", "huge_page_nbytes", "touches_buffers", "untouched_buffers"]

HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
_TOUCHES = ContextVar("touches", default=True)


def huge_buffer(nbytes: int, is_touched: bool = False) -> torch.Tensor:
    """A zeroed uint8 tensor [nbytes] that starts on a multiple of 2 MiB, and is unmapped when the last view
    of it is gone.

    Memory is taken when it is first written, or here if `is_touched`: a first read into memory that is not
    there yet takes several times as long as a later one.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    size = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(memory, "madvise"):
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses the advice
            memory.madvise(_MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
    with torch.inference_mode(False):  # every mode may write it
        buffer = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)
        return buffer.zero_() if is_touched else buffer


def huge_page_nbytes(buffer: torch.Tensor) -> int | None:
    """How many bytes of the mapping that a buffer lies in rest in huge pages; None where the system does not
    tell.
    """
    address, is_inside = buffer.data_ptr(), False
    try:
        with open("/proc/self/smaps", encoding="utf-8") as lines:
            for line in lines:
                words = line.split()
                if "-" in words[0] and not words[0].endswith(":"):
                    first, last = (int(word, 16) for word in words[0].split("-"))
                    is_inside = first <= address < last
                elif is_inside and words[0] == "AnonHugePages:":
                    return int(words[1]) << 10
    except (OSError, ValueError):
        return None
    return None


@contextlib.contextmanager
def untouched_buffers() -> Iterator[None]:
    """Rings on the host that are made within take memory as they are used: for models whose blocks are
    brought by other means.
    """
    token = _TOUCHES.set(False)
    try:
        yield
    finally:
        _TOUCHES.reset(token)


def touches_buffers() -> bool:
    """Whether a ring takes all of its memory when it is made."""
    return _TOUCHES.get()
