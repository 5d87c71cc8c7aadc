"""Per-thread buffers that are reused between calls, so that no call allocates a weight."""

from __future__ import annotations

import threading

import torch

__all__ = ["release_buffers", "thread_buffer"]


class _Buffers(threading.local):
    """The buffers of one thread, by use, dtype, and device."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}


_buffers = _Buffers()


def thread_buffer(use: str, dtype: torch.dtype, device: torch.device, numel: int) -> torch.Tensor:
    """Returns the first `numel` elements of this thread's buffer for a use.

    The buffer is allocated outside inference mode, so that every mode may write it. A FakeTensor belongs to
    the mode that created it and is not kept.
    """
    kept, key = _buffers.kept, (use, dtype, device)
    buffer = kept.get(key)
    if buffer is None or buffer.numel() < numel:
        with torch.inference_mode(False):
            buffer = torch.empty(numel, dtype=dtype, device=device)
        if type(buffer) is torch.Tensor:
            kept[key] = buffer
    return buffer[:numel]


def release_buffers() -> None:
    """Releases the buffers of this thread. No tensor may still be a view of one of them."""
    _buffers.kept.clear()
