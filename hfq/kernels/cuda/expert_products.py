"""Products by all experts of a layer in a fixed number of launches.

Which experts compute is read on the device: no value is copied to the host, so that a CUDA graph can record
the launches. A pair is a token and one of its experts. Few tokens are multiplied pair by pair, others in
blocks of rows that belong to one expert. `multiply_rows` gives the same bits for an expert by itself, for
those whose weights are not in one place with the others'.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hfq.formats import Format
from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.kernels.cuda import launch
from hfq.kernels.cuda.launch import FEW_ROWS, Launch, Product, device_code
from hfq.kernels.cuda.layers import Layer, describe, fast

__all__ = ["ExpertProduct", "ExpertProducts", "ExpertStack", "Routing", "block_size", "multiply_rows"]

Layers = Sequence[tuple[Mapping[str, torch.Tensor], Format]]

_COMBINED_AT_ONCE = 1024
_NUMBERS = {True: 1, False: 2}
"""How many of a product's last sizes belong to one layer, by `is_across`."""


def block_size(tokens: int, top_k: int, experts: int, dtype: torch.dtype) -> int | None:
    """Returns the rows of a block: 1, 16, 32, or 64; None if experts get more rows.

    Then experts compute one by one. The size depends on these numbers alone, so that results do not depend
    on the places of the weights.
    """
    if tokens <= FEW_ROWS:
        return 1
    if dtype == torch.float32 and not launch.is_interpreted():  # tensor cores do not multiply it exactly
        return None
    average = tokens * top_k / experts
    return next((size for size in (16, 32, 64) if average <= size), None)


def multiply_rows(
    rows: torch.Tensor, tensors: Mapping[str, torch.Tensor], weight_format: Format, size: int
) -> torch.Tensor:
    """Multiplies rows by one expert, with the bits of `ExpertStack`.

    Args:
        rows: [count, in_features].
        tensors: The tensors of the layer, on the device of the rows.
        weight_format: Their format.
        size: See `block_size`.

    Returns:
        [count, out_features] in the dtype of the rows.
    """
    layer = describe(weight_format, tensors)
    rows = rows.contiguous()
    out = rows.new_empty(rows.shape[0], layer.out_features)
    product = Product(layer, rows.dtype, size, tensors.get("bias"), is_split=size == 1)
    with _on(rows):
        for first in range(0, rows.shape[0], size):
            product(rows[first : first + size], out[first : first + size])
    return out


@dataclass(frozen=True)
class Routing:
    """The pairs of a call, as the kernels need them.

    Attributes:
        size: See `block_size`.
        tokens: The number of tokens.
        top_k: Experts of a token.
        experts: The number of experts.
        order: The pair of each row of the products, int64 [tokens * top_k].
        routed: The experts of each token in rising order, int64 [tokens, top_k].
        places: The row of the products of each of them, int64 [tokens, top_k].
        weights: Their weights [tokens, top_k].
        blocks: int64 [blocks, 3]: expert, first row, and number of rows; None if `size` is 1.
    """

    size: int
    tokens: int
    top_k: int
    experts: int
    order: torch.Tensor
    routed: torch.Tensor
    places: torch.Tensor
    weights: torch.Tensor
    blocks: torch.Tensor | None

    @classmethod
    def of(cls, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, experts: int, size: int) -> Routing:
        """Sorts the pairs by expert, without a wait for the device.

        Args:
            top_k_index: The experts of each token, integers [tokens, top_k]. Values outside [0, experts) are
                ignored.
            top_k_weights: Their weights, [tokens, top_k].
            experts: The number of experts.
            size: See `block_size`.
        """
        tokens, top_k = top_k_index.shape
        index = top_k_index.long()
        routed, column = index.sort(dim=1, stable=True)
        weights = top_k_weights.gather(1, column)
        first = torch.arange(tokens, device=index.device)[:, None] * top_k
        if size == 1:
            order, places = (first + column).flatten(), first + torch.arange(top_k, device=index.device)
            return cls(size, tokens, top_k, experts, order, routed, places, weights, None)
        pairs = index.flatten()
        chosen, order = torch.where((pairs < 0) | (pairs >= experts), experts, pairs).sort(stable=True)
        rows = torch.empty_like(order)
        rows[order] = torch.arange(tokens * top_k, device=index.device)
        blocks = _blocks(chosen, experts, size)
        return cls(size, tokens, top_k, experts, order, routed, rows[first + column], weights, blocks)

    def combine(self, outputs: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sums of the rows of each token's experts, [tokens, features].

        Experts are added in rising order, and each product and each sum is rounded, as a loop over experts
        does.
        """
        result = outputs.new_empty(self.tokens, outputs.shape[1])
        grid = (self.tokens, -(-outputs.shape[1] // _COMBINED_AT_ONCE), 1)
        constants = self.top_k, launch.triton_dtype(outputs.dtype), _COMBINED_AT_ONCE
        with _on(outputs):
            kernel = _combining(constants)
            arguments = outputs, self.weights.contiguous(), self.routed, self.places, result
            kernel(grid, *arguments, self.experts, outputs.shape[1])
        return result


@functools.cache
def _combining(constants: tuple) -> Callable[..., None]:
    """Returns the kernel of `combine`, whose sums and products must not be fused."""
    kernel = device_code().combine
    options = {} if launch.is_interpreted() else {"enable_fp_fusion": False}

    def run(grid: launch.Grid, *arguments: object) -> None:
        kernel[grid](*arguments, *constants, **options)

    return run


def _blocks(chosen: torch.Tensor, experts: int, size: int) -> torch.Tensor:
    """Returns the blocks of `Routing` for sorted experts, and unused ones at the end."""
    pairs, device = chosen.numel(), chosen.device
    starts = torch.searchsorted(chosen, torch.arange(experts + 1, device=device))
    last = ((starts[1:] - starts[:-1] + size - 1) // size).cumsum(0)
    number = torch.arange(min(pairs, experts + pairs // size), device=device)
    expert = torch.searchsorted(last, number, right=True)
    is_used, expert = expert < experts, expert.clamp(max=experts - 1)
    before = torch.cat([last.new_zeros(1), last[:-1]])
    first = starts[expert] + (number - before[expert]) * size
    rows = torch.where(is_used, (starts[expert + 1] - first).clamp(max=size), 0)
    return torch.stack([expert, torch.where(is_used, first, 0), rows], 1)


class ExpertProducts:
    """The projections of all experts of a layer.

    Args:
        first: The tensors and the format of each expert, for each projection that multiplies an expert's
            input, in the order of their outputs.
        down: The same for the projection that multiplies the gated outputs.
        is_joined: As in `hfq.kernels.cpp.expert_products.ExpertProducts`; the gating joins outputs here.

    Attributes:
        reason: Why the experts cannot be multiplied together, or None.
    """

    def __init__(self, first: Sequence[Layers], down: Layers, is_joined: bool) -> None:
        self._first, self._down = [ExpertStack(layers) for layers in first], ExpertStack(down)
        self._count = len(down)
        self.reason = next((each.reason for each in (*self._first, self._down) if each.reason), None)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        gate: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        size: int,
    ) -> torch.Tensor:
        """Returns the weighted sums of the experts' outputs, [tokens, hidden].

        Args:
            hidden_states: [tokens, hidden].
            top_k_index: See `Routing.of`.
            top_k_weights: See `Routing.of`.
            gate: The outputs of the first projections → the input of `down`.
            size: See `block_size`.
        """
        routing = Routing.of(top_k_index, top_k_weights, self._count, size)
        inner = gate([stack(hidden_states, routing, True) for stack in self._first])
        return routing.combine(self._down(inner, routing, False))


class ExpertStack:
    """One projection of all experts of a layer.

    Args:
        layers: The tensors and the format of each expert, on one device.

    Attributes:
        reason: Why the layers cannot be multiplied together, or None.
    """

    def __init__(self, layers: Sequence[tuple[Mapping[str, torch.Tensor], Format]]) -> None:
        described = [describe(weight_format, tensors) for tensors, weight_format in layers]
        self._layers = [fast(layer) or layer for layer in described]
        self._biases = [tensors.get("bias") for tensors, _ in layers]
        self.reason = self._reason()
        self._products: dict[tuple[torch.dtype, int], ExpertProduct] = {}

    def __call__(self, rows: torch.Tensor, routing: Routing, are_tokens: bool) -> torch.Tensor:
        """Multiplies the rows of all pairs by their experts.

        Args:
            rows: [tokens, in_features], or a row for each row of a product before.
            routing: The pairs.
            are_tokens: True if `rows` are tokens.

        Returns:
            [tokens * top_k, out_features], in the order of `routing.order`. Rows without an expert are
            undefined.
        """
        with _on(rows):
            return self.product(rows.dtype, routing.size)(rows.contiguous(), routing, are_tokens)

    def product(self, dtype: torch.dtype, size: int) -> ExpertProduct:
        """Returns the product for rows of a dtype in blocks of a size, kept for later calls."""
        found = self._products.get((dtype, size))
        if found is None:
            found = self._products[dtype, size] = ExpertProduct(self._layers, self._biases, dtype, size)
        return found

    def _reason(self) -> str | None:
        first = self._layers[0]
        if any(layer.columns is not None for layer in self._layers):
            return "the experts scale their channels differently"
        if any(_likeness(layer) != _likeness(first) for layer in self._layers):
            return "the experts have different layouts"
        if len({None if bias is None else bias.dtype for bias in self._biases}) > 1:
            return "the experts have different biases"
        for tensors in zip(*map(launch.tensors_of, self._layers), strict=True):
            if any((each.data_ptr() - tensors[0].data_ptr()) % each.element_size() for each in tensors):
                return "the experts are not aligned"
        return None


def _likeness(layer: Layer) -> tuple:
    """Returns what the layers of a stack have in common."""
    tensors = tuple((each.dtype, each.shape, each.device) for each in launch.tensors_of(layer))
    codes = layer.code_word, layer.code_other, layer.slab
    steps = layer.scale_n, layer.scale_g, layer.zero_word, layer.zero_other
    return layer.layout, layer.out_features, layer.in_features, codes, steps, tensors


class ExpertProduct:
    """The product of pairs, or of blocks of rows, by the layers of a stack.

    Args:
        layers: The layers, which differ only in their tensors and numbers.
        biases: Their biases.
        dtype: The dtype of the rows.
        size: See `block_size`.
    """

    def __init__(
        self, layers: Sequence[Layer], biases: Sequence[torch.Tensor | None], dtype: torch.dtype, size: int
    ) -> None:
        self._product = product = Product(layers[0], dtype, size, biases[0], is_split=size == 1)
        spare = [each.scales if bias is None else bias for bias, each in zip(biases, layers, strict=True)]
        tensors = [(*launch.tensors_of(each), bias) for each, bias in zip(layers, spare, strict=True)]
        self._tensors, device = tensors[0], layers[0].codes.device
        distances = torch.tensor(
            [
                [
                    (each.data_ptr() - first.data_ptr()) // each.element_size()
                    for each, first in zip(of_expert, tensors[0], strict=True)
                ]
                for of_expert in tensors
            ]
        )
        unit = 16 if not (distances % 16).any() else 1
        self._distances = (distances // unit).to(device)
        self._numbers = torch.tensor([[each.factor, each.nested_offset] for each in layers]).to(device)
        self._sizes = product.sizes[: -_NUMBERS[product.is_across]]
        kernels = device_code()
        if product.uses_dot:
            kernel = kernels.some_across_of_expert if product.is_across else kernels.some_of_expert
        else:
            kernel = kernels.few_across_of_expert if product.is_across else kernels.few_of_expert
        self._multiply = Launch(kernel, (*product.multiply.constants, unit), product.blocks)

    def __call__(self, rows: torch.Tensor, routing: Routing, are_tokens: bool) -> torch.Tensor:
        """Multiplies, see `ExpertStack`."""
        for kernel, grid, arguments in self.launches(rows, routing, are_tokens):
            kernel(grid, *arguments)
        return arguments[self._place_of_out]

    @property
    def _place_of_out(self) -> int:
        return len(self._tensors) + (1 if self._product.is_across or self._product.uses_dot else 2)

    def launches(
        self, rows: torch.Tensor, routing: Routing, are_tokens: bool
    ) -> tuple[launch.Launched, launch.Launched]:
        """Returns the two kernels of a product with their grids and arguments."""
        product, device, pairs = self._product, rows.device, routing.order.numel()
        blocks = routing.blocks
        if blocks is not None and are_tokens:
            rows = rows[routing.order // routing.top_k]
        ready = rows.shape[0] if blocks is None else pairs + product.size
        prepare, inputs = product.prepared(rows, ready)
        count = pairs if blocks is None else blocks.shape[0]
        outputs, tiles = product.layer.out_features, product.grid[0]
        out = rows.new_empty(pairs, outputs)
        height = product.splits * product.size * outputs if product.splits > 1 else 0
        parts = thread_buffer("triton parts", torch.float32, device, max(count * height, 1))
        counters = thread_buffer("triton counters", torch.int32, device, count * tiles, is_zero=True)
        multiplied: tuple = (*inputs, *self._tensors, out, parts, counters)
        if blocks is None:
            share = routing.top_k if are_tokens else 1
            multiplied += routing.routed, self._distances, self._numbers, routing.experts, share
        else:
            multiplied += blocks, self._distances, self._numbers
        grid = (tiles, product.splits, count)
        return prepare, (self._multiply, grid, (*multiplied, *self._sizes))


def _on(rows: torch.Tensor) -> torch.cuda.device_of:
    return torch.cuda.device_of(rows)
