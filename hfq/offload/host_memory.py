"""Large host buffers: private, zeroed, aligned to 2 MiB, in huge pages if possible.

Direct reads into 4 KiB pages are much slower than into huge pages, since one request then carries few
pages. The first write to small pages is slow, too. So a buffer is made once and reused.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

__all__ = ["HUGE_PAGE", "huge_buffer", "huge_page_nbytes"]

HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)


def huge_buffer(nbytes: int, is_touched: bool = False, is_exact: bool = False) -> torch.Tensor:
    """Returns a zeroed uint8 tensor [nbytes] at a multiple of 2 MiB.

    Memory is allocated when it is first written, or here if `is_touched`. A read into memory that is not yet
    allocated is slower than a later one.

    Args:
        nbytes: The size.
        is_touched: True to allocate all memory here.
        is_exact: True to have small pages at the end, so that no memory beyond `nbytes` is allocated.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    size = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
    advised = nbytes // HUGE_PAGE * HUGE_PAGE if is_exact else size
    if advised and hasattr(memory, "madvise"):
        with contextlib.suppress(OSError):  # a kernel without huge pages rejects the advice
            memory.madvise(_MADV_HUGEPAGE, start, advised)
    with torch.inference_mode(False):  # so that it is writable in every mode
        buffer = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)
        return buffer.zero_() if is_touched else buffer


def huge_page_nbytes(buffer: torch.Tensor) -> int | None:
    """Returns the bytes of a buffer's mapping in huge pages, or None if unknown."""
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
