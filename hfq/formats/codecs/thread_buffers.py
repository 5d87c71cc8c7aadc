"""Memory that each thread keeps from call to call, so that nothing makes a weight, or a part of it, afresh."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Lent", "borrow_buffers", "lend_buffers", "release_buffers", "thread_buffer"]

_Kept = dict[tuple[str, torch.dtype, torch.device], torch.Tensor]

Lent = list[_Kept]
"""The buffers that a thread keeps for others, which work for it for a while: those that none of them has now."""


class _Buffers(threading.local):
    """The buffers of one thread, by use, dtype and device, and those that it lends."""

    def __init__(self) -> None:
        self.kept: _Kept = {}
        self.lent: Lent = []


_buffers = _Buffers()


def thread_buffer(use: str, dtype: torch.dtype, device: torch.device, numel: int) -> torch.Tensor:
    """The first `numel` elements of this thread's buffer for a use; made outside inference mode, so that every mode may write it.

    A stand-in for a tensor (FakeTensor) belongs to the mode that made it, and is not kept.
    """
    kept, key = _buffers.kept, (use, dtype, device)
    buffer = kept.get(key)
    if buffer is None or buffer.numel() < numel:
        with torch.inference_mode(False):
            buffer = torch.empty(numel, dtype=dtype, device=device)
        if type(buffer) is torch.Tensor:
            kept[key] = buffer
    return buffer[:numel]


def lend_buffers() -> Lent:
    """What this thread lends: threads that are not Python's own would lose theirs with each call into it."""
    return _buffers.lent


@contextmanager
def borrow_buffers(lent: Lent) -> Iterator[None]:
    """Within it this thread's buffers are ones that another lends; it gives them back."""
    own = _buffers.kept
    try:
        _buffers.kept = lent.pop()
    except IndexError:  # all are with others
        _buffers.kept = {}
    try:
        yield
    finally:
        lent.append(_buffers.kept)
        _buffers.kept = own


def release_buffers() -> None:
    """Gives up what this thread keeps and lends; the next use makes it afresh. Nobody may hold a part of it."""
    _buffers.kept.clear()
    _buffers.lent.clear()
