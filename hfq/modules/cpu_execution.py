"""Where a layer computes that rests in host memory beside an accelerator: where its bytes are, or where its activations are.

At home, a forward reads the packed bytes once from memory and sends activations over the link in both directions; on the
accelerator it sends the packed bytes over the link. So few rows, as in decoding, are cheaper at home, and many, as in a prefill, are
not: there the host's arithmetic is what takes the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.modules.quantized_module import PackedModule

__all__ = ["HOME_ROWS", "Home"]

HOME_ROWS = 8
"""`"auto"` computes at most so many activation rows at home: those that the compiled kernel multiplies at about the speed of memory.
Unmeasured beside an accelerator."""


@dataclass
class Home:
    """Decides for one layer, call by call.

    Attributes:
        device: The accelerator.
        rule: `"home"` for always at home, `"auto"` for few rows alone.
        visits: How often it computed at home.
        fetches: How often its bytes were brought to the accelerator.
    """

    device: torch.device
    rule: str
    visits: int = 0
    fetches: int = 0

    def is_chosen(self, layer: PackedModule, activations: torch.Tensor) -> bool:
        """Whether a layer computes at home: at most `HOME_ROWS` rows, and fewer bytes of activations than of the layer."""
        if self.rule == "home":
            return True
        rows = activations.numel() // max(activations.shape[-1], 1)
        moved = rows * (layer.in_features + layer.out_features) * activations.element_size()
        return rows <= HOME_ROWS and moved < sum(info.nbytes for info in layer.infos.values())

    def fetch(self, layer: PackedModule) -> Mapping[str, torch.Tensor]:
        """The layer's tensors on the accelerator, for one call."""
        self.fetches += 1
        return {local: tensor.to(self.device) for local, tensor in layer.resting_tensors().items()}

    def serve(self, layer: PackedModule) -> None:
        """Has a layer ask here for every forward; a layer whose bytes others bring to the accelerator goes on fetching them there."""
        layer.at_home = self
        if layer.fetch is None:
            layer.fetch, layer.is_away, layer.brought_to = (lambda: self.fetch(layer)), True, self.device
