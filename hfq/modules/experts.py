"""A mixture of experts whose projections are quantized layers; only routed experts compute."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn import functional

from hfq.kernels.registry import Kernel
from hfq.modules.cpu_experts import CpuExperts
from hfq.modules.expert_table import ExpertTable, first_projections
from hfq.modules.graph_capture import check_not_captured, check_not_recorded, is_captured, uncompiled
from hfq.modules.graph_ops import OPS, experts_number
from hfq.modules.late_tensor import LateTensor
from hfq.modules.lazy_module import LazyModule
from hfq.modules.linear import QuantizedLinear
from hfq.modules.quantized_module import QuantizedModule
from hfq.modules.stacked_experts import StackedExperts, is_plain, multiply_as_stacked, needs_gradient

if TYPE_CHECKING:
    from typing import Self

__all__ = ["DroppedActivation", "MaskedExperts", "QuantizedExperts", "SortedExperts"]

Routed = Sequence[Sequence[QuantizedModule]]
Tensors = Mapping[QuantizedModule, Mapping[str, torch.Tensor]]
Onload = Callable[[Routed, Callable[[int, int, Tensors], object], Callable[[], Routed] | None], None]

_SERIAL, _VECTOR = 1 << 15, 64
"""Numbers that torch leaves to one thread, and a multiple of all its vectors.

torch divides more numbers among threads, and computes those behind the last whole vector of a thread by
another exponential function.
"""


class ExpertLayers(LazyModule, nn.ModuleDict):
    """The layers of one expert, by local name."""

    def __init__(self, layers: Mapping[str, QuantizedLinear]) -> None:
        super().__init__()
        self._modules.update(layers)


class QuantizedExperts(nn.ModuleList):
    """Replaces the fused experts of a transformers model.

    Its call is `forward(hidden_states, top_k_index, top_k_weights)`. Expert e's layers are the modules
    `<e>.gate_proj`, `<e>.up_proj`, and `<e>.down_proj`. They are `<e>.gate_up_proj` and `<e>.down_proj` if
    the checkpoint fuses the first two, and `<e>.up_proj` and `<e>.down_proj` without a gate. Each has a flat
    buffer of its own, so that each expert is placed, read, and saved separately.

    Args:
        experts: The layers of each expert, by local name.
        apply_gate: The model's own gating, [..., 2 * intermediate] → [..., intermediate]; or its activation,
            if it has no gate.
        is_interleaved: True if gate and up channels alternate, False if all gate channels come first.

    Attributes:
        onload: Called with the offloaded layers of each routed expert, with a function that computes with the
            experts [first, last) of them, and with `guess_next` for these hidden states. It calls the first
            function for one part after the other, with the tensors of its layers, while their weights are on
            the execution device. None if no layer is onloaded so.
        guess_next: Returns the offloaded layers of the experts that the next module of experts may route
            these hidden states to. None if nothing tells.
        on_route: Called with the routed experts of each call, integers [tokens, k]; None if nothing records.
        is_late: True if the enclosing block waits for results that are computed on the CPU (`await_outputs`),
            so that its other layers compute meanwhile.
    """

    def __init__(
        self,
        experts: Sequence[Mapping[str, QuantizedLinear]],
        apply_gate: Callable[[torch.Tensor], torch.Tensor],
        is_interleaved: bool = False,
    ) -> None:
        super().__init__([ExpertLayers(layers) for layers in experts])
        if isinstance(apply_gate, nn.Module):
            apply_gate = functools.partial(apply_gate)  # a registered module would count as an expert
        self._apply_gate, self.is_interleaved = apply_gate, is_interleaved
        self.onload: Onload | None = None
        self.guess_next: Callable[[torch.Tensor], Routed] | None = None
        self.on_route: Callable[[torch.Tensor], object] | None = None
        self.is_late = False
        self._stacked = StackedExperts(
            self, first_projections(self[0]), self._gate, is_joined=not is_interleaved
        )
        self._table: ExpertTable | None = None
        self._hidden_layers: dict[str, Any] = {}
        self._number = experts_number(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_table": None}  # a copy makes its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = experts_number(self)  # of a copy

    def hide_layers(self) -> None:
        """Hides the layers from walks over the model, which are slow for many experts."""
        if not self._hidden_layers:
            self._hidden_layers, self._modules = self._modules, {}

    def show_layers(self) -> None:
        """Shows hidden layers again, in the training mode that the module has now."""
        if self._hidden_layers:
            self._hidden_layers, self._modules = {}, self._hidden_layers
            if self[0].training != self.training:
                self.train(self.training)

    def offloaded_layers(self, numbers: Iterable[int]) -> list[Sequence[QuantizedModule]]:
        """Returns the offloaded layers of each of these experts that has any; others are ignored."""
        count = len(self._modules)
        known = [number for number in numbers if 0 <= number < count]
        offloaded = self._table_of(known).offloaded
        return [layers for number in known if (layers := offloaded[number])]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, **_: object
    ) -> torch.Tensor:
        """Returns the weighted sum of the routed experts' outputs.

        Args:
            hidden_states: [tokens, hidden].
            top_k_index: The experts of each token, integers [tokens, k]. Values outside [0, experts) are
                ignored.
            top_k_weights: The weights of these experts, [tokens, k].

        Returns:
            [tokens, hidden] in the dtype of the hidden states.
        """
        if is_compiling() and self._fits_graph():
            return OPS.experts(hidden_states, top_k_index, top_k_weights, self._number)
        return self._compute_routed(hidden_states, top_k_index, top_k_weights)

    def _fits_graph(self) -> bool:
        return self.onload is None and self.on_route is None and not self.is_late

    @uncompiled
    def _compute_routed(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Computes `forward` outside of graphs."""
        if is_captured():
            check_not_captured("A module of quantized experts")
        if self.on_route is not None:
            self.on_route(top_k_index)
        stacked = self._stacked.rows_of_block(hidden_states, top_k_weights)
        if stacked is not None:
            result = self._stacked.compute(hidden_states, top_k_index, top_k_weights, *stacked)
            if result is not None:
                return result
        check_not_recorded("A module of experts", "its experts compute one by one, as the host routes them")
        chosen, count = top_k_index.cpu(), len(self._modules)
        routed = [expert for expert in distinct(chosen) if 0 <= expert < count]
        cpu_experts = self._start_on_cpu(routed, hidden_states, chosen, top_k_weights)
        if cpu_experts is not None:
            return self._combine_late(routed, cpu_experts, hidden_states, chosen, top_k_weights, stacked)
        result = torch.zeros_like(hidden_states, memory_format=torch.contiguous_format)

        def add(experts: Sequence[int], tensors: Tensors) -> None:
            if not self._add_together(result, experts, tensors, hidden_states, top_k_index, top_k_weights):
                self._add(result, experts, hidden_states, top_k_index, top_k_weights, stacked)

        self._with_weights(routed, chosen, hidden_states, add)
        return result

    def _with_weights(
        self,
        routed: Sequence[int],
        chosen: torch.Tensor,
        hidden_states: torch.Tensor,
        use: Callable[[Sequence[int], Tensors], object],
    ) -> None:
        """Calls `use` for all experts, in parts that are on the execution device together.

        It also gets the tensors of the layers that were onloaded for the part.
        """
        if self.onload is None:
            use(routed, {})
            return
        offloaded = self._table_of(routed).offloaded
        layers = [
            self._chosen_layers(expert, chosen, hidden_states) if (own := offloaded[expert]) is None else own
            for expert in routed
        ]
        if not any(layers):
            use(routed, {})
            return
        guess = self.guess_next and functools.partial(self.guess_next, hidden_states)
        self.onload(layers, lambda first, last, tensors: use(routed[first:last], tensors), guess)

    def _chosen_layers(
        self, expert: int, chosen: torch.Tensor, hidden_states: torch.Tensor
    ) -> list[QuantizedModule]:
        """Returns the layers of an expert that are onloaded, if one of them may compute on the CPU."""

        def is_onloaded(layer: nn.Module) -> bool:
            if not isinstance(layer, QuantizedModule):
                return False
            if not layer.is_offloaded or layer.on_cpu is None:
                return layer.is_offloaded
            rows = int((chosen == expert).sum())
            return not layer.on_cpu.is_chosen_for(layer, rows, hidden_states.dtype)

        return [layer for layer in self[expert].values() if is_onloaded(layer)]  # type: ignore[operator]

    def _table_of(self, routed: Iterable[int]) -> ExpertTable:
        """Returns facts about the layers, which are true for these experts."""
        table = self._table
        if table is None or not table.is_current(self, routed):
            table = self._table = ExpertTable(self)
        return table

    def _add(
        self,
        result: torch.Tensor,
        experts: Sequence[int],
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        stacked: tuple[Kernel, int] | None,
    ) -> None:
        """Adds the weighted outputs of experts, one after the other."""
        for expert in experts:
            token, place = torch.where(top_k_index == expert)
            output = (
                self._compute(self[expert], hidden_states[token], stacked) * top_k_weights[token, place, None]
            )
            result.index_add_(0, token, output.to(result.dtype))

    def _start_on_cpu(
        self,
        routed: Sequence[int],
        hidden_states: torch.Tensor,
        chosen: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> CpuExperts | None:
        """Starts the experts that compute on the CPU next to an accelerator; None if there are none."""
        device = hidden_states.device.type
        if (
            device in ("cpu", "mps")
            or torch.is_autocast_enabled(device)
            or needs_gradient(hidden_states, top_k_weights)
        ):
            return None
        tokens = {}
        for expert in routed:
            layers = self[expert].values()  # type: ignore[operator]
            if all(layer.on_cpu is not None and is_plain(layer) for layer in layers):
                token = torch.where(chosen == expert)[0]
                if all(
                    layer.on_cpu.is_chosen_for(layer, len(token), hidden_states.dtype) for layer in layers
                ):
                    tokens[expert] = token
        if not tokens:
            return None
        return CpuExperts(hidden_states, tokens, lambda expert, rows: self._compute(self[expert], rows))

    def _combine_late(
        self,
        routed: Sequence[int],
        cpu_experts: CpuExperts,
        hidden_states: torch.Tensor,
        chosen: torch.Tensor,
        top_k_weights: torch.Tensor,
        stacked: tuple[Kernel, int] | None,
    ) -> torch.Tensor:
        """Returns the result of the loop over experts, late if a block waits for it (`is_late`)."""
        found = [torch.stack(torch.where(chosen == expert)) for expert in routed]
        sent = torch.cat(found, 1).pin_memory().to(hidden_states.device, non_blocking=True)
        places = dict(zip(routed, sent.split([each.shape[1] for each in found], 1), strict=True))
        computed = dict[int, torch.Tensor]()

        def compute(experts: Sequence[int], _: Tensors) -> None:
            for expert in experts:
                computed[expert] = self._compute(self[expert], hidden_states[places[expert][0]], stacked)

        others = [expert for expert in routed if expert not in cpu_experts.tokens]
        self._with_weights(others, chosen, hidden_states, compute)

        def join() -> torch.Tensor:
            result, outputs = torch.zeros_like(hidden_states), computed | cpu_experts.outputs()
            for expert, (token, place) in places.items():
                output = outputs[expert] * top_k_weights[token, place, None]
                result.index_add_(0, token, output.to(result.dtype))
            return result

        return LateTensor(hidden_states, join) if self.is_late else join()

    def _add_together(
        self,
        result: torch.Tensor,
        experts: Sequence[int],
        tensors: Tensors,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> bool:
        """Adds what `_add` adds, with one call of the kernel for all experts.

        Returns:
            False if it cannot. Then nothing was added.
        """
        if (
            not experts
            or hidden_states.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
            or needs_gradient(hidden_states, top_k_weights)
        ):
            return False
        table = self._table_of(experts)
        kernel = table.common_kernel(experts, self.onload is not None)
        if kernel is None or kernel.experts is None or kernel.experts.add is None:
            return False
        numbers = torch.tensor(experts, dtype=top_k_index.dtype)
        place = torch.searchsorted(numbers, top_k_index.contiguous()).clamp_(max=len(experts) - 1)
        index = place.masked_fill_(numbers[place] != top_k_index, -1)
        projections: list[list[tuple[Mapping[str, torch.Tensor], Any]]] = []
        for layers in zip(*[table.projections[expert] for expert in experts], strict=True):
            projections.append([])
            for layer, weight_format in layers:
                held = tensors.get(layer)
                projections[-1].append((layer.onloaded_tensors() if held is None else held, weight_format))
        routed = result, hidden_states, index, top_k_weights
        return kernel.experts.add(*routed, self._gate, projections, not self.is_interleaved)

    def _gate(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the gated outputs. On the CPU, their bits do not depend on the number of rows.

        Without a gate, an activation with an exponential function needs widths that are multiples of 64.
        """
        both = self._join(parts)
        if not both.is_cpu or both.numel() <= _SERIAL:
            return self._apply_gate(both)
        pieces = [self._apply_gate(piece) for piece in _even_pieces(both, torch.get_num_threads())]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns gate and up channels in the order that the model's gating expects."""
        if len(parts) == 1:
            return parts[0]
        return torch.stack(list(parts), -1).flatten(-2) if self.is_interleaved else torch.cat(list(parts), -1)

    def _compute(
        self, layers: nn.Module, activations: torch.Tensor, stacked: tuple[Kernel, int] | None = None
    ) -> torch.Tensor:
        """Returns an expert's output, with the bits of `StackedExperts` if the others compute so."""

        def multiply(name: str, rows: torch.Tensor) -> torch.Tensor:
            layer = layers[name]  # type: ignore[index]
            return layer(rows) if stacked is None else multiply_as_stacked(layer, rows, *stacked)

        return multiply(
            "down_proj", self._gate([multiply(name, activations) for name in first_projections(layers)])
        )


class SortedExperts(QuantizedExperts):
    """Replaces the experts of Llama 4, `forward(hidden_states)`.

    Each expert receives every token.

    Tokens are already multiplied by the router's weight. It is zero for an expert that is not routed, and so
    is that expert's output.
    """

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Returns each expert's outputs for its tokens.

        Args:
            hidden_states: [experts * tokens, hidden], the rows of the first expert first.

        Returns:
            The same shape and dtype. Rows of zeros are not computed.
        """
        expert = torch.arange(len(self), device=hidden_states.device).repeat_interleave(
            len(hidden_states) // len(self)
        )
        routed = expert.masked_fill((hidden_states == 0).all(-1), len(self))[:, None]
        return super().forward(hidden_states, routed, torch.ones_like(routed, dtype=hidden_states.dtype))


class DroppedActivation:
    """An activation, and the dropout that training puts behind it.

    Args:
        activation: The activation.
        dropout: The share of values that training sets to zero.

    Attributes:
        is_training: True in training.
    """

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor], dropout: float) -> None:
        self._activation, self._dropout = activation, dropout
        self.is_training = False

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return self._activation(values)

    def drop(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the values after dropout."""
        return functional.dropout(values, self._dropout, self.is_training)


class MaskedExperts(QuantizedExperts):
    """Replaces the experts of Switch Transformers, `forward(hidden_states, mask, weights)`."""

    _apply_gate: DroppedActivation

    def __getitem__(self, key: Any) -> Any:
        """Returns an expert.

        transformers' initialization asks by the model's own names, and gets weights that it leaves alone.
        """
        if not isinstance(key, str):
            return super().__getitem__(key)
        weight = torch.empty(0)
        weight._is_hf_initialized = True  # type: ignore[attr-defined]
        return SimpleNamespace(wi=SimpleNamespace(weight=weight), wo=SimpleNamespace(weight=weight))

    def train(self, mode: bool = True) -> Self:
        """Also tells the activation."""
        self._apply_gate.is_training = mode
        return super().train(mode)

    def _gate(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._apply_gate.drop(super()._gate(parts))  # of all rows: pieces would draw other numbers

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns the weighted outputs of the routed experts.

        Args:
            hidden_states: [tokens, hidden].
            mask: 1 for the expert of a token, [tokens, 1, experts]. A token without one gets zeros.
            weights: The weight of each token's expert, [tokens, 1].

        Returns:
            [tokens, hidden] in the dtype of the hidden states.
        """
        routed = torch.where(mask.any(-1), mask.argmax(-1), len(self))
        return super().forward(hidden_states, routed, weights)


def distinct(chosen: torch.Tensor) -> list[int]:
    """Returns the distinct numbers of a tensor of integers on the CPU, sorted."""
    if len(chosen) == 1:  # of one token; for many, Python takes longer
        return sorted(set(chosen.flatten().tolist()))
    return chosen.unique().tolist()


def _even_pieces(values: torch.Tensor, threads: int) -> list[torch.Tensor]:
    """Returns rows that threads divide into whole vectors, and the others in pieces for one."""
    rows, width = len(values), values.shape[1] // 2  # of gate or up
    unit = threads * (_VECTOR // math.gcd(_VECTOR, width))
    even = rows - rows % unit
    even *= even * width >= threads * _SERIAL  # for fewer numbers, torch takes fewer threads
    rest = [piece for piece in values[even:].split(max(_SERIAL // values.shape[1], 1)) if len(piece)]
    return [values[:even], *rest] if even else rest
