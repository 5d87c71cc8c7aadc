"""Probes: what a machine does, measured as often as one likes, so that calibrating and what is predicted from it can take turns.

Each `measure` adds one sample; what is told is the median of all. Rates vary with what else a machine does: samples that are taken
in turns with what they explain see the same of it.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hfq.benchmarks.limits import CHUNK_NBYTES, read_files, reading_slots
from hfq.formats import Format
from hfq.kernels.table import choose_kernel
from hfq.placement.pipeline import SideBySide

__all__ = ["BesideProbe", "ProductProbe", "ReadProbe"]

_SMALL, _LAYERS_NBYTES = 256, 96 << 20
_CALLS = 24
_LEAST_SHARE = 0.02


class ProductProbe:
    """Products with one kind of weight, dense or packed.

    Args:
        weight_format: The format of the weights; None for dense ones.
        rows: Rows of activations.
        dtype: Their dtype, and that of dense weights.
        size: Inputs and outputs of a layer; a second, small one tells what a call costs beside its weights.
        copies: How many layers a pass goes through, which do not fit the caches together; None for as many.
    """

    def __init__(
        self, weight_format: Format | None, rows: int, dtype: torch.dtype, size: int = 2048, copies: int | None = None
    ) -> None:
        self._format, self._rows, self._dtype, self._size = weight_format, rows, dtype, size
        self._small_size = min(_SMALL, size)
        large, self._small = self._layer(size), self._layer(self._small_size)
        nbytes = sum(tensor.nbytes for tensor in large.values())
        count = max(2, min(_LAYERS_NBYTES // nbytes, 24)) if copies is None else copies
        self._layers = [{name: tensor.clone() for name, tensor in large.items()} for _ in range(count)]
        self._kernels = {side: self._choose(side) for side in (size, self._small_size)}
        self.run()
        self._samples: list[float] = []
        self._calls: list[float] = []

    def run(self) -> float:
        """One pass over all layers: seconds of a product."""
        return self._time(self._layers, self._size)

    def measure(self) -> None:
        """Adds a sample."""
        self._samples.append(self.run())
        self._calls.append(self._time([self._small] * _CALLS, self._small_size))

    def forget(self) -> None:
        """Drops all samples."""
        self._samples.clear()
        self._calls.clear()

    @property
    def call_seconds(self) -> float:
        """What a product takes beside its weights: that of no weight at all, on the line through both sizes."""
        large, small, ratio = *self._medians(), (self._small_size / self._size) ** 2
        return max((small - large * ratio) / (1 - ratio), 0.0) if ratio < 1 else 0.0

    @property
    def rate(self) -> float:
        """Weights per second, beside what calls take."""
        large = self._medians()[0]
        return self._size**2 / max(large - self.call_seconds, large / 100)

    def _medians(self) -> tuple[float, float]:
        return statistics.median(self._samples), statistics.median(self._calls)

    def _layer(self, size: int) -> dict[str, torch.Tensor]:
        weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0)) * 0.02
        if self._format is None:
            return {"weight": weight.to(self._dtype)}
        return dict(self._format.sized(size, size).quantize(weight))

    def _choose(self, size: int):
        if self._format is None:
            return lambda activations, layer: torch.nn.functional.linear(activations, layer["weight"])
        sized = self._format.sized(size, size)
        kernel = choose_kernel("auto", sized, size, size)
        return lambda activations, layer: kernel.linear(activations, layer, sized)

    def _time(self, layers: list[dict[str, torch.Tensor]], size: int) -> float:
        product, activations = self._kernels[size], torch.randn(self._rows, size).to(self._dtype)
        with torch.inference_mode():
            started = time.perf_counter()
            for layer in layers:
                product(activations, layer)
            return (time.perf_counter() - started) / len(layers)


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
        passes: How many passes over the layers of `product` are timed, alone and beside reading.
    """

    def __init__(self, product: ProductProbe, read: ReadProbe, passes: int = 8) -> None:
        self._product, self._read, self._passes = product, read, passes
        self._samples: list[tuple[float, float]] = []

    def measure(self) -> None:
        """Adds a sample."""
        alone = self._compute()
        with _reading(self._read) as count:
            first, started = count[0], time.perf_counter()
            together = self._compute()
            read = (count[0] - first) / (time.perf_counter() - started)
        reading = self._read.file.stat().st_size / (_seconds(self._read.file, self._read.is_direct) or float("inf"))
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
        return sum(self._product.run() for _ in range(self._passes))


@contextmanager
def _reading(probe: ReadProbe) -> Iterator[list[int]]:
    """Reads a file over and over until this ends; gives a list of the bytes read so far."""
    descriptor = os.open(probe.file, os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if probe.is_direct else 0))
    whole = probe.file.stat().st_size // CHUNK_NBYTES * CHUNK_NBYTES or 1
    offsets, stop, count, lock = itertools.cycle(range(0, whole, CHUNK_NBYTES)), threading.Event(), [0], threading.Lock()

    def read(slot: memoryview) -> None:
        for offset in offsets:  # in C, so that each item is handed out once
            if stop.is_set():
                return
            nbytes = os.preadv(descriptor, [slot], offset)
            with lock:
                count[0] += nbytes

    threads = [threading.Thread(target=read, args=(slot,), daemon=True) for slot in reading_slots(probe.threads)]
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
