"""PackedExperts: a mixture of experts whose every projection is a packed layer of its own; only routed experts compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from hfq.modules.linear import PackedLinear
from hfq.modules.packed import PackedModule

__all__ = ["PackedExperts"]


class PackedExperts(nn.ModuleList):
    """Replaces the fused experts of a transformers model, `forward(hidden_states, top_k_index, top_k_weights)`.

    Expert e's layers are the modules `<e>.gate_proj`, `<e>.up_proj`, `<e>.down_proj`, or `<e>.gate_up_proj` where the checkpoint
    fuses the first two. Each has its own packed row, so that each expert is placed, read and saved by itself.

    Args:
        experts: The layers of each expert, by local name.
        apply_gate: The model's own gating: [..., 2 * intermediate] → [..., intermediate].
        is_interleaved: Whether it takes gate and up channels in turns, and not one after the other.

    Attributes:
        prefetch: Told the routed layers that rest elsewhere, in the order of their use, before the first of them computes.
    """

    def __init__(
        self,
        experts: Sequence[Mapping[str, PackedLinear]],
        apply_gate: Callable[[torch.Tensor], torch.Tensor],
        is_interleaved: bool = False,
    ) -> None:
        super().__init__([nn.ModuleDict(dict(layers)) for layers in experts])
        self._apply_gate, self.is_interleaved = apply_gate, is_interleaved
        self.prefetch: Callable[[Iterable[PackedModule]], None] | None = None

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, **_: object
    ) -> torch.Tensor:
        """The weighted sum of the routed experts' outputs.

        Args:
            hidden_states: [tokens, hidden].
            top_k_index: The experts of each token, integers [tokens, k]; what is not in [0, experts) is left out.
            top_k_weights: Their weights, [tokens, k].

        Returns:
            [tokens, hidden] in the dtype of the hidden states.
        """
        result = torch.zeros_like(hidden_states)
        routed = [expert for expert in top_k_index.unique().tolist() if 0 <= expert < len(self)]
        if self.prefetch is not None:
            self.prefetch(
                layer for expert in routed for layer in self[expert].values() if layer.is_away and layer.at_home is None
            )
        for expert in routed:
            token, place = torch.where(top_k_index == expert)
            output = self._compute(self[expert], hidden_states[token]) * top_k_weights[token, place, None]
            result.index_add_(0, token, output.to(result.dtype))
        return result

    def _compute(self, layers: nn.Module, activations: torch.Tensor) -> torch.Tensor:
        if "gate_up_proj" in layers:  # type: ignore[operator]
            both = layers["gate_up_proj"](activations)  # type: ignore[index]
        else:
            parts = layers["gate_proj"](activations), layers["up_proj"](activations)  # type: ignore[index]
            both = torch.stack(parts, -1).flatten(-2) if self.is_interleaved else torch.cat(parts, -1)
        return layers["down_proj"](self._apply_gate(both))  # type: ignore[index]
