"""QuantizedExperts: a mixture of experts whose every projection is a packed layer of its own; only routed
experts compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from hfq.modules.linear import QuantizedLinear
from hfq.modules.quantized_module import QuantizedModule

__all__ = ["QuantizedExperts", "SortedExperts"]


class QuantizedExperts(nn.ModuleList):
    """Replaces the fused experts of a transformers model,
    `forward(hidden_states, top_k_index, top_k_weights)`.

    Expert e's layers are the modules `<e>.gate_proj`, `<e>.up_proj`, `<e>.down_proj`, or `<e>.gate_up_proj`
    where the checkpoint fuses the first two; `<e>.up_proj`, `<e>.down_proj` where they have no gate. Each has
    its own packed row, so that each expert is placed, read and saved by itself.

    Args:
        experts: The layers of each expert, by local name.
        apply_gate: The model's own gating, [..., 2 * intermediate] → [..., intermediate]; or its activation,
            where it has none.
        is_interleaved: Whether it takes gate and up channels in turns, and not one after the other.

    Attributes:
        prefetch: Told the routed layers that rest elsewhere, in the order of their use, before the first of
            them computes.
    """

    def __init__(
        self,
        experts: Sequence[Mapping[str, QuantizedLinear]],
        apply_gate: Callable[[torch.Tensor], torch.Tensor],
        is_interleaved: bool = False,
    ) -> None:
        super().__init__([nn.ModuleDict(dict(layers)) for layers in experts])
        self._apply_gate, self.is_interleaved = apply_gate, is_interleaved
        self.prefetch: Callable[[Iterable[QuantizedModule]], None] | None = None

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, **_: object
    ) -> torch.Tensor:
        """The weighted sum of the routed experts' outputs.

        Args:
            hidden_states: [tokens, hidden].
            top_k_index: The experts of each token, integers [tokens, k]; what is not in [0, experts) is left
                out.
            top_k_weights: Their weights, [tokens, k].

        Returns:
            [tokens, hidden] in the dtype of the hidden states.
        """
        routed = [expert for expert in top_k_index.unique().tolist() if 0 <= expert < len(self)]
        if self._is_groupable(routed, hidden_states):
            result = self._compute_grouped(routed, hidden_states, top_k_index, top_k_weights)
            if result is not None:
                return result
        result = torch.zeros_like(hidden_states)
        if self.prefetch is not None:
            self.prefetch(
                layer
                for expert in routed
                for layer in self[expert].values()
                if layer.is_offloaded and layer.on_cpu is None
            )
        for expert in routed:
            token, place = torch.where(top_k_index == expert)
            output = self._compute(self[expert], hidden_states[token]) * top_k_weights[token, place, None]
            result.index_add_(0, token, output.to(result.dtype))
        return result

    def _is_groupable(self, routed: Sequence[int], hidden_states: torch.Tensor) -> bool:
        """Whether nothing but the kernel's products happens in the routed layers, and their bytes are all at
        hand.
        """
        if (
            not routed
            or hidden_states.device.type != "cpu"
            or (torch.is_grad_enabled() and hidden_states.requires_grad)
        ):
            return False
        layers = [layer for expert in routed for layer in self[expert].values()]  # type: ignore[operator]
        kernel = getattr(layers[0], "kernel", None)
        return getattr(kernel, "grouped_linear", None) is not None and all(
            type(layer) is QuantizedLinear
            and layer.kernel is kernel
            and layer.scheme is None
            and layer.fetch is None
            and not layer.is_offloaded
            and "forward" not in vars(layer)
            and not layer._forward_hooks
            and not layer._forward_pre_hooks
            for layer in layers
        )

    def _compute_grouped(
        self,
        routed: Sequence[int],
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor | None:
        """As the loop over experts, with tokens sorted by expert and one call for each projection; None where
        the kernel declines.
        """
        chosen, order = top_k_index.flatten().sort(stable=True)
        experts = torch.tensor(routed)
        start, stop = (int(torch.searchsorted(chosen, bound)) for bound in (0, len(self)))
        counts = torch.searchsorted(chosen, experts, right=True) - torch.searchsorted(chosen, experts)
        token = order[start:stop] // top_k_index.shape[1]

        def multiply(local: str, activations: torch.Tensor) -> torch.Tensor | None:
            layers = [self[expert][local] for expert in routed]  # type: ignore[index]
            described = [(layer.onloaded_tensors(), layer.weight_format) for layer in layers]
            return layers[0].kernel.grouped_linear(activations, counts.tolist(), described)

        rows = hidden_states[token]
        parts = []
        for name in _first(self[routed[0]]):
            part = multiply(name, rows)
            if part is None:
                return None
            parts.append(part)
        output = multiply("down_proj", self._apply_gate(self._join(parts)))
        if output is None:
            return None
        weighted = output * top_k_weights.flatten()[order[start:stop], None]
        result = torch.zeros_like(hidden_states)
        for of_expert, part in zip(
            token.split(counts.tolist()), weighted.to(result.dtype).split(counts.tolist()), strict=True
        ):
            result.index_add_(0, of_expert, part)  # all at once would round otherwise
        return result

    def _join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gate and up channels, as the model's gating takes them."""
        if len(parts) == 1:
            return parts[0]
        return torch.stack(list(parts), -1).flatten(-2) if self.is_interleaved else torch.cat(list(parts), -1)

    def _compute(self, layers: nn.Module, activations: torch.Tensor) -> torch.Tensor:
        both = self._join([layers[name](activations) for name in _first(layers)])  # type: ignore[index]
        return layers["down_proj"](self._apply_gate(both))  # type: ignore[index]


class SortedExperts(QuantizedExperts):
    """Replaces the experts of Llama 4, `forward(hidden_states)`, which are given each token once for each of
    them.

    A token is multiplied by the router's weight before, zero where it is not routed, and such an expert's
    output is zero.
    """

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Each expert's outputs for its tokens.

        Args:
            hidden_states: [experts * tokens, hidden]: of the first expert, then of the second, and so on.

        Returns:
            The same shape and dtype; nothing is computed where all of a row are zeros.
        """
        expert = torch.arange(len(self), device=hidden_states.device).repeat_interleave(
            len(hidden_states) // len(self)
        )
        routed = expert.masked_fill((hidden_states == 0).all(-1), len(self))[:, None]
        return super().forward(hidden_states, routed, torch.ones_like(routed, dtype=hidden_states.dtype))


def _first(layers: nn.Module) -> tuple[str, ...]:
    """The projections that an expert's input is multiplied by, in the order of their outputs."""
    return tuple(name for name in ("gate_up_proj", "gate_proj", "up_proj") if name in layers)  # type: ignore[operator]
