"""Random tensors of transformers' models, drawn while a file is written."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.real_sizes.shapes import router_weight, to_bfloat16
from hfq.machine_profile.probe_models import Planned, WeightLayout

__all__ = ["Tensors", "floats", "linear", "mlp", "router"]

Tensors = Iterator[tuple[str, Planned]]
"""Names and tensors in model order."""

_ROWS = 4096  # drawn at once


def linear(name: str, rows: int, columns: int, weights: WeightLayout) -> Tensors:
    """Yields the tensors of a linear layer."""
    for local, planned in weights.tensors(rows, columns).items():
        yield f"{name}.{local}", planned


def mlp(name: str, inner: int, hidden: int, weights: WeightLayout) -> Tensors:
    """Yields the tensors of gate, up, and down."""
    yield from linear(f"{name}.gate_proj", inner, hidden, weights)
    yield from linear(f"{name}.up_proj", inner, hidden, weights)
    yield from linear(f"{name}.down_proj", hidden, inner, weights)


def floats(*shape: int, deviation: float) -> Planned:
    """Returns a tensor of bfloat16 with a mean of zero."""

    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        found = np.empty(shape, np.uint16)
        for start in range(0, shape[0], _ROWS):
            part = found[start : start + _ROWS]
            part[:] = to_bfloat16(random.standard_normal(part.shape, np.float32) * np.float32(deviation))
        return found

    return Planned("BF16", shape, draw)


def router(random: np.random.Generator, experts: int, hidden: int) -> Planned:
    """Returns the weight of a router that uses all experts equally."""
    weight = to_bfloat16(router_weight(random, experts, hidden, False))
    return Planned("BF16", weight.shape, lambda *_: weight)
