"""Per-thread buffers that are reused between calls, so that no call allocates a weight."""

from __future__ import annotations

import threading

import torch

__all__ = ["is_graph_recorded", "release_buffers", "thread_buffer"]


class _Buffers(threading.local):
    """The buffers of one thread, by use, dtype, device, and stream."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype, torch.device, int], torch.Tensor] = {}


_buffers = _Buffers()


def thread_buffer(
    use: str,
    dtype: torch.dtype,
    device: torch.device,
    numel: int,
    is_zero: bool = False,
    is_whole: bool = False,
) -> torch.Tensor:
    """Returns the first `numel` elements of this thread's buffer for a use.

    With `is_zero` a new buffer is filled with zeros; its users must leave zeros. With `is_whole` the result
    may have more elements, for kernels that need its address alone.

    Each stream of an accelerator has its own, since another stream may not have computed with the contents
    yet. The buffer is allocated outside inference mode, so that every mode may write it. A FakeTensor belongs
    to the mode that created it and is not kept. Nor is a buffer that a CUDA graph records: it belongs to the
    graph, and its zeros are written by each replay.
    """
    is_accelerator = device.type not in ("cpu", "meta")
    stream = torch.accelerator.current_stream(device).stream_id if is_accelerator else 0
    kept, key = _buffers.kept, (use, dtype, device, stream)
    is_recorded = is_accelerator and is_graph_recorded(device)
    buffer = None if is_recorded else kept.get(key)
    if buffer is None or buffer.numel() < numel:
        with torch.inference_mode(False):
            buffer = (torch.zeros if is_zero else torch.empty)(numel, dtype=dtype, device=device)
        if type(buffer) is torch.Tensor and not is_recorded:
            kept[key] = buffer
    return buffer if is_whole else buffer[:numel]


def is_graph_recorded(device: torch.device) -> bool:
    """Returns True if the runtime of a device records a graph, as CUDA can."""
    asks = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asks is not None and asks()


def release_buffers() -> None:
    """Releases the buffers of this thread. No tensor may still be a view of one of them."""
    _buffers.kept.clear()
