"""Probes: rates of a machine, each the median of as many samples as are taken.

Rates vary with the machine's other work. Samples that are taken in turns with the runs that they explain see the
same other work.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hfq.formats import Format
from hfq.kernels.registry import choose_kernel
from hfq.loading.dry_run import PlannedModel, kind_of_weight
from hfq.machine_profile.machine_limits import CHUNK_NBYTES, read_files, reading_slots
from hfq.modules.linear import QuantizedLinear
from hfq.placement.estimate.pipeline import SideBySide

__all__ = ["BesideProbe", "KindProbe", "Layer", "ProductProbe", "ReadProbe", "layers_of"]

_SMALL, _LAYERS_NBYTES = 256, 96 << 20
_CALLS = 24
_LEAST_SHARE = 0.02


@dataclass(frozen=True)
class Layer:
    """A linear layer to multiply by.

    Attributes:
        weight_format: The format of its weights; None for dense ones.
        out_features: Its outputs.
        in_features: Its inputs.
    """

    weight_format: Format | None
    out_features: int
    in_features: int

    @property
    def weights(self) -> int:
        """How many it has."""
        return self.out_features * self.in_features


class ProductProbe:
    """Products with one kind of weight, dense or packed.

    Args:
        large: The layer whose weights count.
        small: A layer of the same kind, which gives the fixed cost of a call; None for a small square one.
        rows: Rows of activations.
        dtype: Their dtype, and that of dense weights.
        copies: Large layers of one pass; None for as many as do not fit the caches together.
    """

    def __init__(
        self,
        large: Layer,
        small: Layer | None = None,
        rows: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        copies: int | None = None,
    ) -> None:
        self._rows, self._dtype, self._large = rows, dtype, large
        self._small = small or Layer(
            large.weight_format, *(min(_SMALL, size) for size in (large.out_features, large.in_features))
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
        """Those of a large layer."""
        return self._large.weights

    def run(self) -> float:
        """One pass over all large layers: seconds of a product."""
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
        """Fixed seconds of a product: its time without weights, on the line through both sizes."""
        large, small, ratio = *self._medians(), self._small.weights / self._large.weights
        return min(max((small - large * ratio) / (1 - ratio), 0.0), small) if ratio < 1 else 0.0

    @property
    def rate(self) -> float:
        """Weights per second, beside what calls take."""
        large = self._medians()[0]
        return self._large.weights / max(large - self.call_seconds, large / 100)

    def _medians(self) -> tuple[float, float]:
        return statistics.median(self._samples), statistics.median(self._calls)

    def _make(self, layer: Layer) -> dict[str, torch.Tensor]:
        weight = (
            torch.randn(layer.out_features, layer.in_features, generator=torch.Generator().manual_seed(0))
            * 0.02
        )
        if layer.weight_format is None:
            return {"weight": weight.to(self._dtype)}
        return dict(layer.weight_format.sized(layer.in_features, layer.out_features).quantize(weight))

    def _choose(self, layer: Layer) -> Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]:
        if layer.weight_format is None:
            return lambda activations, tensors: torch.nn.functional.linear(activations, tensors["weight"])
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
    """Products with all layers of one kind that a model has, each size as often as it is there.

    Args:
        layers: {layer: how many of its size there are}.
        dtype: The dtype of activations.
        copies: As those of `ProductProbe`.
    """

    def __init__(self, layers: Mapping[Layer, int], dtype: torch.dtype, copies: int | None = None) -> None:
        self._probes = [
            (ProductProbe(layer, layer, 1, dtype, copies), count) for layer, count in layers.items()
        ]

    def measure(self) -> None:
        """Adds a sample of each."""
        for probe, _ in self._probes:
            probe.measure()

    def forget(self) -> None:
        """Drops all samples."""
        for probe, _ in self._probes:
            probe.forget()

    @property
    def rate(self) -> float:
        """Weights per second, calls included."""
        weights = sum(probe.weights * count for probe, count in self._probes)
        return weights / sum(probe.weights / probe.rate * count for probe, count in self._probes)


def layers_of(model: PlannedModel, dtype: str) -> dict[str, dict[Layer, int]]:
    """Returns {kind of weight: {a layer of each size: number of such layers}} of a model.

    Args:
        model: The model.
        dtype: The dtype of activations.
    """
    found: dict[str, dict[tuple[int, int], list[Layer]]] = defaultdict(lambda: defaultdict(list))
    for module in model.loading.model.modules():
        if isinstance(module, (QuantizedLinear, nn.Linear)):
            weight_format = module.weight_format if isinstance(module, QuantizedLinear) else None
            kind = f"dense {dtype}" if weight_format is None else kind_of_weight(weight_format, dtype)
            size = module.out_features, module.in_features
            found[kind][size].append(Layer(weight_format, *size))
    return {kind: {layers[0]: len(layers) for layers in sizes.values()} for kind, sizes in found.items()}


class ReadProbe:
    """Reads of a file, past the page cache or from it.

    Args:
        file: The file.
        is_direct: Whether to pass by the page cache, where the file system allows it.
    """

    def __init__(self, file: Path, is_direct: bool) -> None:
        self.file, self.is_direct = file, is_direct and _seconds(file, True) is not None
        self.threads = 8 if self.is_direct else 4
        self._samples: list[float] = []

    def measure(self) -> None:
        """Adds a sample."""
        self._samples.append(_seconds(self.file, self.is_direct) or float("inf"))

    def forget(self) -> None:
        """Drops all samples."""
        self._samples.clear()

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.file.stat().st_size / statistics.median(self._samples)


class BesideProbe:
    """What reading and computing leave of each other.

    Args:
        product: What computes.
        read: What reads.
        seconds: How long is computed at least, alone and beside reading.
    """

    def __init__(self, product: ProductProbe, read: ReadProbe, seconds: float = 0.15) -> None:
        self._product, self._read, self._seconds = product, read, seconds
        self._samples: list[tuple[float, float]] = []

    def measure(self) -> None:
        """Adds a sample."""
        alone = self._compute()
        with _reading(self._read) as count:
            first, started = count[0], time.perf_counter()
            together = self._compute()
            read = (count[0] - first) / (time.perf_counter() - started)
        reading = self._read.file.stat().st_size / (
            _seconds(self._read.file, self._read.is_direct) or float("inf")
        )
        self._samples.append((_share(alone / together), _share(read / reading)))

    def forget(self) -> None:
        """Drops all samples."""
        self._samples.clear()

    @property
    def shares(self) -> SideBySide:
        """The medians."""
        computing, reading = zip(*self._samples, strict=True)
        return SideBySide(statistics.median(computing), statistics.median(reading))

    def _compute(self) -> float:
        """Seconds of a product, over as many passes as the time takes."""
        passes, started = [self._product.run()], time.perf_counter()
        while time.perf_counter() - started < self._seconds:
            passes.append(self._product.run())
        return statistics.mean(passes)


@contextmanager
def _reading(probe: ReadProbe) -> Iterator[list[int]]:
    """Reads a file over and over until this ends; gives a list of the bytes read so far."""
    descriptor = os.open(probe.file, os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if probe.is_direct else 0))
    whole = probe.file.stat().st_size // CHUNK_NBYTES * CHUNK_NBYTES or 1
    offsets, stop, count, lock = (
        itertools.cycle(range(0, whole, CHUNK_NBYTES)),
        threading.Event(),
        [0],
        threading.Lock(),
    )

    def read(slot: memoryview) -> None:
        for offset in offsets:  # in C, so that each item is handed out once
            if stop.is_set():
                return
            nbytes = os.preadv(descriptor, [slot], offset)
            with lock:
                count[0] += nbytes

    threads = [
        threading.Thread(target=read, args=(slot,), daemon=True) for slot in reading_slots(probe.threads)
    ]
    try:
        for thread in threads:
            thread.start()
        yield count
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        os.close(descriptor)


def _seconds(file: Path, is_direct: bool) -> float | None:
    return read_files([file], direct=is_direct, threads=8 if is_direct else 4)


def _share(value: float) -> float:
    return min(max(value, _LEAST_SHARE), 1.0)
