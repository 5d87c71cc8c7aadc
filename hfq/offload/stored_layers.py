"""Copies of single layers from the memory of the host to an accelerator."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hfq.modules.flat_buffer import FlatBuffer, flat_layout
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.copy_stream import CopyStream

__all__ = ["bring_stored"]


def bring_stored(module: QuantizedModule, copy_stream: CopyStream) -> Mapping[str, torch.Tensor]:
    """Returns a module's stored tensors on a device, copied from pinned memory."""
    memory = copy_stream.host_buffer(flat_layout(module.infos)[1])
    row = FlatBuffer.pack(module.stored_tensors(), module.infos, memory)
    return FlatBuffer(copy_stream.bring(row.buffer), row.segments).tensors()
