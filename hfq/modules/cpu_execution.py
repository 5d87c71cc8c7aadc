"""Choice of the execution device of a layer whose weights are in CPU memory.

On the CPU, a forward pass reads the quantized bytes once from memory and sends activations to the
accelerator and back. On the accelerator, it copies the quantized bytes. The CPU is faster for few rows, as
in decoding. The accelerator is faster for many rows, as in a prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hfq.modules.quantized_module import QuantizedModule

__all__ = ["CPU_ROWS", "CpuExecution"]

CPU_ROWS = 8
"""Largest number of activation rows that `"auto"` computes on the CPU. The compiled kernel multiplies that
many rows at about the speed of memory. Not measured with an accelerator.
"""


@dataclass
class CpuExecution:
    """Chooses the execution device of one layer for each call.

    Attributes:
        device: The accelerator.
        rule: `"cpu"` always computes on the CPU, `"auto"` for few rows only.
        bring: Returns a layer's stored tensors on the accelerator.
        cpu_forwards: Number of forward passes on the CPU.
        fetches: Number of copies of the weights to the accelerator.
    """

    device: torch.device
    rule: str
    bring: Callable[[QuantizedModule], Mapping[str, torch.Tensor]]
    cpu_forwards: int = 0
    fetches: int = 0

    def is_chosen(self, layer: QuantizedModule, activations: torch.Tensor) -> bool:
        """Returns True if a layer computes on the CPU.

        Under `"auto"`, that takes at most `CPU_ROWS` rows, and fewer bytes of activations than of weights.
        """
        return self.is_chosen_for(
            layer, activations.numel() // max(activations.shape[-1], 1), activations.dtype
        )

    def is_chosen_for(self, layer: QuantizedModule, rows: int, dtype: torch.dtype) -> bool:
        """Returns True if a layer computes so many rows of activations of a dtype on the CPU."""
        if self.rule == "cpu":
            return True
        moved = rows * (layer.in_features + layer.out_features) * dtype.itemsize
        return rows <= CPU_ROWS and moved < sum(info.nbytes for info in layer.infos.values())

    def fetch(self, layer: QuantizedModule) -> Mapping[str, torch.Tensor]:
        """Returns the layer's tensors on the accelerator, for one call."""
        self.fetches += 1
        return self.bring(layer)

    def serve(self, layer: QuantizedModule) -> None:
        """Makes a layer ask this object before every forward pass.

        A layer that another object onloads to the accelerator keeps fetching its tensors there.
        """
        layer.on_cpu = self
        if layer.fetch is None:
            layer.fetch = lambda: self.fetch(layer)
            layer.is_offloaded = True
            layer.onload_device = self.device
