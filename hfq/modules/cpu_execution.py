"""Where a layer computes that rests in host memory beside an accelerator: where its bytes are, or where its
activations are.

At home, a forward reads the packed bytes once from memory and sends activations over the link in both
directions; on the accelerator it sends the packed bytes over the link. So few rows, as in decoding, are
cheaper at home, and many, as in a prefill, are not: there the host's arithmetic is what takes the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.modules.quantized_module import QuantizedModule

__all__ = ["CPU_ROWS", "CpuExecution"]

CPU_ROWS = 8
"""`"auto"` computes at most so many activation rows at home: those that the compiled kernel multiplies at
about the speed of memory. Unmeasured beside an accelerator.
"""


@dataclass
class CpuExecution:
    """Decides for one layer, call by call.

    Attributes:
        device: The accelerator.
        rule: `"cpu"` for always there, `"auto"` for few rows alone.
        cpu_forwards: How often it computed on the CPU.
        fetches: How often its bytes were brought to the accelerator.
    """

    device: torch.device
    rule: str
    cpu_forwards: int = 0
    fetches: int = 0

    def is_chosen(self, layer: QuantizedModule, activations: torch.Tensor) -> bool:
        """Whether a layer computes at home: at most `CPU_ROWS` rows, and fewer bytes of activations than of
        the layer.
        """
        if self.rule == "cpu":
            return True
        rows = activations.numel() // max(activations.shape[-1], 1)
        moved = rows * (layer.in_features + layer.out_features) * activations.element_size()
        return rows <= CPU_ROWS and moved < sum(info.nbytes for info in layer.infos.values())

    def fetch(self, layer: QuantizedModule) -> Mapping[str, torch.Tensor]:
        """The layer's tensors on the accelerator, for one call."""
        self.fetches += 1
        return {local: tensor.to(self.device) for local, tensor in layer.stored_tensors().items()}

    def serve(self, layer: QuantizedModule) -> None:
        """Has a layer ask here for every forward; a layer whose bytes others bring to the accelerator goes on
        fetching them there.
        """
        layer.on_cpu = self
        if layer.fetch is None:
            layer.fetch = lambda: self.fetch(layer)
            layer.is_offloaded = True
            layer.onload_device = self.device
