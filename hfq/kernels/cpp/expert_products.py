"""All experts of a layer in two calls of the C++ library, around the model's own gating.

The library sorts tokens by expert, multiplies the rows of all experts together, and adds up the weighted
results. Results are bit-identical to a loop over experts that calls `kernel.linear`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence

import torch

from hfq.formats import Format
from hfq.kernels.cpp.kernel import most_fused
from hfq.kernels.cpp.layer_struct import DTYPES
from hfq.kernels.cpp.layers import CppLayer, describe_layer, reads_values
from hfq.kernels.cpp.library import library
from hfq.kernels.layer_tensors import PlacedTensors

__all__ = ["ExpertProducts", "Layers", "add_products"]

Layers = Sequence[tuple[Mapping[str, torch.Tensor], Format]]
"""The tensors and the format of one projection of each expert."""

_IN = struct.Struct("=19q")
"""The struct `ExpertsIn` of src/experts.h."""

_OUT = struct.Struct("=16q")
"""The struct `ExpertsOut` of src/experts.h."""


class ExpertProducts:
    """The projections of all experts of a layer, or of some, described once.

    Args:
        first: The projections that multiply an expert's input, in the order of their outputs.
        down: The projection that multiplies the gated outputs.
        is_joined: True if the gating receives the outputs of `first` in one tensor.
        is_kept: False if the products are used once. Then descriptions may contain values of tensors.

    Attributes:
        reason: Why the experts cannot be multiplied together, or None.
    """

    def __init__(self, first: Sequence[Layers], down: Layers, is_joined: bool, is_kept: bool = True) -> None:
        self._is_joined, self._is_kept = is_joined, is_kept
        self._projections = (*first, down)  # keeps the tensors, whose addresses are in the tables
        self.reason = self._reason()
        if self.reason is None:
            *self._first, self._down = [_Table(layers) for layers in self._projections]
            self.reason = next((each.reason for each in (*self._first, self._down) if each.reason), None)
        if self.reason is None and len({table.out_features for table in self._first}) > 1:
            self.reason = "the first projections have different sizes"
        if self.reason is None and self._down.out_features != self._first[0].in_features:
            self.reason = "the last projection has another size"

    def __call__(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        gate: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        size: int,
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Returns the weighted sums of the experts' outputs.

        Args:
            hidden_states: [tokens, hidden], on the CPU.
            top_k_index: The experts of each token, integers [tokens, top_k]. Values outside [0, experts) are
                ignored.
            top_k_weights: Their weights, [tokens, top_k].
            gate: The outputs of the first projections, in one tensor if `is_joined`, → the input of `down`.
            size: Unused; it has a meaning on accelerators.
            sums: The sums of experts before these, [tokens, hidden], to which this call adds. None makes new
                ones.

        Returns:
            [tokens, hidden] in the dtype of the hidden states. None if the library declines: an expert has
            too many rows for it, a row is not finite, or a dtype or size is another one. Then it added
            nothing.
        """
        compiled, dtype = library(), DTYPES.get(hidden_states.dtype)
        weights_dtype = DTYPES.get(top_k_weights.dtype)
        if compiled is None or dtype is None or weights_dtype is None:
            return None
        if hidden_states.shape[1] != self._first[0].in_features:
            return None
        rows, weights = hidden_states.contiguous(), top_k_weights.contiguous()
        index = top_k_index.to(torch.int64).contiguous()
        (tokens, top_k), experts = index.shape, self._down.count
        order, ends = index.new_empty(tokens * top_k), index.new_empty(experts)
        sorted_rows = rows.new_empty(tokens * top_k, rows.shape[1])
        outputs, stride = self._outputs(rows, tokens * top_k)
        places = [each.data_ptr() for each in outputs]
        if self._is_joined and len(self._first) == 2:
            places.append(places[0] + self._first[0].out_features * rows.element_size())
        tables, missing = self._first, [0] * (2 - len(self._first))
        common = most_fused(rows.dtype), torch.get_num_threads()
        total = compiled.hfq_experts_in(
            _IN.pack(
                *(index.data_ptr(), tokens, top_k, experts, rows.data_ptr(), dtype, len(tables)),
                *(*[table.here for table in tables], *missing),
                *(*[table.biases_here for table in tables], *missing),
                *(*places, *missing),
                *(stride, sorted_rows.data_ptr(), order.data_ptr(), ends.data_ptr(), *common),
            )
        )
        if total < 0:
            return None
        if total == 0:
            return torch.zeros_like(rows) if sums is None else sums
        del sorted_rows
        inner = gate([each[:total] for each in outputs])
        if inner.dtype != rows.dtype or inner.shape != (total, self._down.in_features):
            return None
        inner = inner.contiguous()
        products = rows.new_empty(total, rows.shape[1])
        result = torch.empty_like(rows) if sums is None else sums
        status = compiled.hfq_experts_out(
            _OUT.pack(
                *(tokens, top_k, experts, inner.data_ptr(), dtype, self._down.here, self._down.biases_here),
                *(products.data_ptr(), order.data_ptr(), ends.data_ptr(), weights.data_ptr(), weights_dtype),
                *(result.data_ptr(), *common, sums is not None),
            )
        )
        return None if status < 0 else result

    def _outputs(self, rows: torch.Tensor, pairs: int) -> tuple[list[torch.Tensor], int]:
        """Returns memory for the outputs of the first projections, and the stride of their rows."""
        widths = [table.out_features for table in self._first]
        if self._is_joined:
            return [rows.new_empty(pairs, sum(widths))], sum(widths)
        return [rows.new_empty(pairs, width) for width in widths], widths[0]

    def _reason(self) -> str | None:
        if not 1 <= len(self._projections) - 1 <= 2:
            return "an expert has another number of projections"
        if self._is_kept and any(
            reads_values(weight_format) for layers in self._projections for _, weight_format in layers
        ):
            return "descriptions of the layers contain values of tensors"
        return None


def add_products(
    sums: torch.Tensor,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    projections: Sequence[Layers],
    is_joined: bool,
) -> bool:
    """Adds the weighted outputs of experts that are in memory for this call alone.

    Args:
        sums: The sums of experts before these, contiguous [tokens, hidden].
        hidden_states: See `ExpertProducts`, and the following.
        top_k_index: As there.
        top_k_weights: As there.
        gate: As there.
        projections: Those of `ExpertProducts`, `down` last.
        is_joined: As there.

    Returns:
        False if the library declines. Then it added nothing.
    """
    *first, down = projections
    products = ExpertProducts(first, down, is_joined, is_kept=False)
    if products.reason is not None:
        return False
    return products(hidden_states, top_k_index, top_k_weights, gate, 0, sums) is not None


class _Table:
    """The descriptions of one projection of all experts.

    Attributes:
        reason: Why the library cannot multiply by the layers, or None.
        count: Number of experts.
        in_features: Number of input channels.
        out_features: Number of outputs.
        here: The address of an array of `Layer`.
        biases_here: The address of an array of `Bias`; 0 without biases.
    """

    def __init__(self, layers: Layers) -> None:
        self.reason: str | None = None
        self.count = len(layers)
        found, held, sizes = list[CppLayer](), list[torch.Tensor](), set[tuple[int, int]]()
        for tensors, weight_format in layers:
            layer = describe_layer(weight_format, tensors)
            if layer is None:
                self.reason = "the library cannot read an expert"
                return
            found.append(layer)
            sizes.add(layer.sizes)
            if "bias" in (tensors.places.infos if type(tensors) is PlacedTensors else tensors):
                held.append(tensors["bias"])
        if len(sizes) > 1:
            self.reason = "the experts have different sizes"
            return
        if held and len(held) < len(found):
            self.reason = "the experts have different biases"
            return
        self.out_features, self.in_features = found[0].sizes
        self._described, self._layers = found, (CppLayer * self.count)(*found)
        self.here, self.biases_here = ctypes.addressof(self._layers), 0
        if held:
            if any(bias.dtype not in DTYPES or not bias.is_contiguous() for bias in held):
                self.reason = "the library cannot read a bias"
                return
            numbers = [number for bias in held for number in (bias.data_ptr(), DTYPES[bias.dtype])]
            self._biases = (ctypes.c_int64 * len(numbers))(*numbers)
            self.biases_here = ctypes.addressof(self._biases)
