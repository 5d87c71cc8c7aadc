"""Memory that each thread keeps from call to call, so that nothing makes a weight, or a part of it, afresh."""

from __future__ import annotations

import threading

import torch

__all__ = ["release_buffers", "thread_buffer"]


class _Buffers(threading.local):
    """The buffers of one thread, by use, dtype and device."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}


_buffers = _Buffers()


def thread_buffer(use: str, dtype: torch.dtype, device: torch.device, numel: int) -> torch.Tensor:
    """The first `numel` elements of this thread's buffer for a use; made outside inference mode, so that every mode may write it."""
    kept, key = _buffers.kept, (use, dtype, device)
    if key not in kept or kept[key].numel() < numel:
        with torch.inference_mode(False):
            kept[key] = torch.empty(numel, dtype=dtype, device=device)
    return kept[key][:numel]


def release_buffers() -> None:
    """Gives up what this thread keeps; the next use makes it afresh. Nobody may hold a part of it."""
    _buffers.kept.clear()
