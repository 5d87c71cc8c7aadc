"""Copies of single layers from the memory of the host to an accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hfq.modules.flat_buffer import FlatBuffer, flat_layout
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.copy_stream import CopyStream
from hfq.offload.pinned_weights import PinnedWeights
from hfq.offload.unit_layout import lay_out_on_device
from hfq.tensor_spec import Segment

__all__ = ["BroughtLayer", "bring_stored", "use_stored"]


@dataclass(frozen=True)
class BroughtLayer:
    """A layer's tensors on its execution device, whose copy may still run.

    Attributes:
        row: The tensors.
        copy_stream: The stream of the copy.
        mark: The point after the copy.
    """

    row: FlatBuffer
    copy_stream: CopyStream
    mark: Any

    @classmethod
    def bring(cls, row: FlatBuffer, copy_stream: CopyStream) -> BroughtLayer:
        """Starts to copy a flat buffer in a `host_buffer`."""
        memory = copy_stream.bring(row.buffer.numel(), [(0, row.buffer)])
        return cls(FlatBuffer(memory, row.segments), copy_stream, copy_stream.mark())

    def use(self) -> Mapping[str, torch.Tensor]:
        """Returns the tensors for the computation of this thread.

        The device waits for the copy. The tensors may be freed while it computes with them.
        """
        self.copy_stream.compute_after(self.mark)
        self.copy_stream.record_compute(self.row.buffer)
        return self.row.tensors()

    def has_failed(self) -> bool:
        """Returns True if the copy is known to have failed."""
        return self.copy_stream.has_failed(self.mark)


def bring_stored(
    module: QuantizedModule, copy_stream: CopyStream, pinned: PinnedWeights | None
) -> BroughtLayer:
    """Starts to copy a module's stored tensors to a device from pinned memory.

    Args:
        module: A module whose tensors are in CPU memory.
        copy_stream: Copies to the device.
        pinned: The weights in pinned memory. Tensors that are not there are packed into pinned memory first.
    """
    if pinned is None or not all(info in pinned for info in module.infos.values()):
        memory = copy_stream.host_buffer(flat_layout(module.infos)[1])
        return BroughtLayer.bring(FlatBuffer.pack(module.stored_tensors(), module.infos, memory), copy_stream)
    layout = lay_out_on_device(module.infos.values(), pinned.in_order(module.infos.values()))
    segments = {
        local: Segment(layout.places[info], info.nbytes, info.dtype, info.shape)
        for local, info in module.infos.items()
    }
    nbytes = max(segment.offset + segment.nbytes for segment in segments.values())
    memory = copy_stream.bring(nbytes, pinned.copies(layout))
    return BroughtLayer(FlatBuffer(memory, segments), copy_stream, copy_stream.mark())


def use_stored(
    module: QuantizedModule, copy_stream: CopyStream, pinned: PinnedWeights | None
) -> Mapping[str, torch.Tensor]:
    """Returns the tensors of `bring_stored` for the computation of this thread."""
    return bring_stored(module, copy_stream, pinned).use()
