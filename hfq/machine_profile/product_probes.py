"""Probes of matrix products with one kind of weight.

A rate is the median of its samples. Rates vary with the machine's other work. Samples taken in turns with the
runs that they explain see the same load.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hfq.checkpoint.headers_only import MARKER
from hfq.checkpoint.reader import Reader
from hfq.formats import Format
from hfq.kernels.registry import choose_kernel
from hfq.loading.dry_run import PlannedModel, kind_of_layer
from hfq.modules.flat_buffer import read_tensor
from hfq.modules.graph_ops import multiply_head
from hfq.modules.linear import QuantizedLinear
from hfq.modules.output_head import OutputHead

__all__ = ["KindProbe", "Layer", "ProductProbe", "layers_of"]

_SMALL, _LAYERS_NBYTES = 256, 96 << 20
_CALLS = 24


@dataclass(frozen=True)
class Layer:
    """A linear layer to multiply by.

    Attributes:
        weight_format: Format of the weights. None if unquantized.
        out_features: Number of outputs.
        in_features: Number of inputs.
        is_head: True for an `OutputHead`.
        read: Returns the stored tensors of such a layer; None to quantize random weights.
    """

    weight_format: Format | None
    out_features: int
    in_features: int
    is_head: bool = False
    read: Callable[[], dict[str, torch.Tensor]] | None = field(default=None, compare=False)

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.out_features * self.in_features


class ProductProbe:
    """Products with one kind of weight, quantized or not.

    Args:
        large: Layer whose rate is measured.
        small: Layer of the same kind that determines the fixed cost of a call. None means a small square one.
        rows: Rows of activations.
        dtype: Dtype of the activations and of unquantized weights.
        copies: Number of large layers per pass. None means as many as together exceed the caches.
    """

    def __init__(
        self,
        large: Layer,
        small: Layer | None = None,
        rows: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        copies: int | None = None,
    ) -> None:
        self._rows = rows
        self._dtype = dtype
        self._large = large
        self._small = small or Layer(
            large.weight_format, min(_SMALL, large.out_features), min(_SMALL, large.in_features)
        )
        first, self._little = self._make(self._large), self._make(self._small)
        nbytes = sum(tensor.nbytes for tensor in first.values())
        count = (
            max(1 + (nbytes < _LAYERS_NBYTES), min(_LAYERS_NBYTES // nbytes, 24))
            if copies is None
            else copies
        )
        self._count = _CALLS if copies is None else copies
        self._layers = [{name: tensor.clone() for name, tensor in first.items()} for _ in range(count)]
        self._products = {layer: self._choose(layer) for layer in (self._large, self._small)}
        self.run()
        self._samples: list[float] = []
        self._calls: list[float] = []

    @property
    def weights(self) -> int:
        """Number of weights of the large layer."""
        return self._large.weights

    def run(self) -> float:
        """Runs one pass over all large layers, and returns the seconds per product."""
        return self._time(self._layers, self._large)

    def measure(self) -> None:
        """Adds a sample."""
        self._samples.append(self.run())
        self._calls.append(self._time([self._little] * self._count, self._small))

    def forget(self) -> None:
        """Drops all samples."""
        self._samples.clear()
        self._calls.clear()

    @property
    def call_seconds(self) -> float:
        """Fixed seconds per product: the time at zero weights, extrapolated from both sizes."""
        large, small, ratio = *self._medians(), self._small.weights / self._large.weights
        return min(max((small - large * ratio) / (1 - ratio), 0.0), small) if ratio < 1 else 0.0

    @property
    def rate(self) -> float:
        """Weights per second, without the fixed cost of calls."""
        large = self._medians()[0]
        return self._large.weights / max(large - self.call_seconds, large / 100)

    def _medians(self) -> tuple[float, float]:
        return statistics.median(self._samples), statistics.median(self._calls)

    def _make(self, layer: Layer) -> dict[str, torch.Tensor]:
        if layer.read is not None:
            return layer.read()
        weight = (
            torch.randn(layer.out_features, layer.in_features, generator=torch.Generator().manual_seed(0))
            * 0.02
        )
        if layer.weight_format is None:
            return {"weight": weight.to(self._dtype)}
        return dict(layer.weight_format.sized(layer.in_features, layer.out_features).quantize(weight))

    def _choose(self, layer: Layer) -> Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]:
        if layer.weight_format is None:
            multiply = multiply_head if layer.is_head else nn.functional.linear
            return lambda activations, tensors: multiply(activations, tensors["weight"])
        sized = layer.weight_format.sized(layer.in_features, layer.out_features)
        kernel = choose_kernel("auto", sized, layer.in_features, layer.out_features)
        return lambda activations, tensors: kernel.linear(activations, tensors, sized)

    def _time(self, layers: list[dict[str, torch.Tensor]], kind: Layer) -> float:
        product, activations = self._products[kind], torch.randn(self._rows, kind.in_features).to(self._dtype)
        with torch.inference_mode():
            started = time.perf_counter()
            for layer in layers:
                product(activations, layer)
            return (time.perf_counter() - started) / len(layers)


class KindProbe:
    """Products with all layers of one kind in a model, weighted by the number of each size.

    Args:
        layers: {layer: number of layers of its size}.
        dtype: Dtype of the activations.
        copies: Same as for `ProductProbe`.
    """

    def __init__(self, layers: Mapping[Layer, int], dtype: torch.dtype, copies: int | None = None) -> None:
        self._probes = [
            (ProductProbe(layer, layer, 1, dtype, copies), count) for layer, count in layers.items()
        ]

    def measure(self) -> None:
        """Adds one sample per size."""
        for probe, _ in self._probes:
            probe.measure()

    def forget(self) -> None:
        """Drops all samples."""
        for probe, _ in self._probes:
            probe.forget()

    @property
    def rate(self) -> float:
        """Weights per second, including the fixed cost of calls."""
        weights = sum(probe.weights * count for probe, count in self._probes)
        return weights / sum(probe.weights / probe.rate * count for probe, count in self._probes)


def layers_of(model: PlannedModel, dtype: str) -> dict[str, dict[Layer, int]]:
    """Returns {kind of weight: {layer of each size: number of such layers}} for a model.

    Args:
        model: The model.
        dtype: Dtype of the activations.
    """
    found: dict[str, dict[Layer, int]] = defaultdict(dict)
    loading = model.loading
    reader = None if Path(loading.checkpoint.root, MARKER).exists() else loading.reader
    for module in loading.model.modules():
        if isinstance(module, (QuantizedLinear, nn.Linear)):
            layers, layer = found[kind_of_layer(module, dtype)], _layer_of(module, reader)
            layers[layer] = layers.get(layer, 0) + 1
    return dict(found)


def _layer_of(module: QuantizedLinear | nn.Linear, reader: Reader | None) -> Layer:
    """Returns the layer of a module; without a reader, its weights are not those of the file."""
    out_features, in_features = module.out_features, module.in_features
    if isinstance(module, nn.Linear):
        return Layer(None, out_features, in_features, isinstance(module, OutputHead))
    read = None if reader is None else partial(_read, module, reader)
    return Layer(module.weight_format, out_features, in_features, read=read)


def _read(module: QuantizedLinear, reader: Reader) -> dict[str, torch.Tensor]:
    return {name: read_tensor(reader, info) for name, info in module.infos.items()}
