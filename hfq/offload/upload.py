"""Copies of a load to accelerators through two buffers of pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hfq.offload.copy_stream import copy_stream_to
from hfq.offload.host_memory import huge_buffer
from hfq.offload.pinned_memory import pinned_memory

__all__ = ["Upload"]


class Upload:
    """Copies batches to accelerators; while a batch is copied, the next one is read.

    Args:
        devices: The accelerator of each batch, in the order of the batches.
        nbytes: Bytes of the largest batch.
    """

    def __init__(self, devices: Sequence[str], nbytes: int) -> None:
        self._streams = {device: copy_stream_to(torch.device(device)) for device in devices}
        accelerators = [torch.device(device) for device in self._streams if not device.startswith("cpu")]
        self._memory = [
            pinned_memory(nbytes, accelerators) if accelerators else huge_buffer(nbytes)
            for _ in range(min(len(devices), 2))
        ]
        self._marks: list[tuple[str, Any]] = []

    def begin_batch(self) -> torch.Tensor:
        """Returns the buffer of the next batch, from which nothing is copied any more."""
        if len(self._marks) >= len(self._memory):
            self._wait(*self._marks[-len(self._memory)])
        return self._memory[len(self._marks) % len(self._memory)]

    def copy(self, buffer: torch.Tensor, device: str) -> torch.Tensor:
        """Starts to copy a part of the batch to new memory of its accelerator, which it returns."""
        target = self._streams[device].empty(buffer.numel())
        self._streams[device].copy(target, buffer)
        return target

    def end_batch(self, device: str) -> None:
        """Ends a batch, all of whose copies have started."""
        self._marks.append((device, self._streams[device].mark()))

    def _wait(self, device: str, mark: Any) -> None:
        self._streams[device].synchronize(mark)

    def finish(self) -> None:
        """Waits for all copies, and raises the error of one that failed."""
        for copy_stream in self._streams.values():
            copy_stream.synchronize(copy_stream.mark())
