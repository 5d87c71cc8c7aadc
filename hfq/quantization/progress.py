"""What is told of a quantization: of each layer, after each block, and of the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["LayerReport", "Progress", "QuantizeReport"]


@dataclass(frozen=True)
class LayerReport:
    """One quantized layer.

    Attributes:
        name: Its name in the model.
        method: How it was quantized.
        tokens: The calibration tokens that reached it; None where the method needs none.
        loss: The mean squared error of its outputs on them.
        damp_percent: The damping that its factorization took.
        exponent: The power of the activations' magnitudes that AWQ scaled its input channels by; None where
            nothing before it can take a scale.
    """

    name: str
    method: str
    tokens: int | None = None
    loss: float | None = None
    damp_percent: float | None = None
    exponent: float | None = None


@dataclass(frozen=True)
class Progress:
    """A finished decoder layer: name, number, layers, seconds since the start and left."""

    decoder_layer: str
    done: int
    decoder_layers: int
    layers: tuple[LayerReport, ...]
    seconds: float
    eta_seconds: float | None

    @property
    def loss(self) -> float:
        """The mean loss of its layers, NaN where the method has none."""
        losses = [layer.loss for layer in self.layers if layer.loss is not None]
        return sum(losses) / len(losses) if losses else math.nan


@dataclass(frozen=True)
class QuantizeReport:
    """What was written.

    Attributes:
        path: The folder.
        format: The format of its quantized layers.
        layers: What is known of each layer.
        nbytes: The bytes of all tensors.
        resumed: Blocks that an earlier run had finished.
        seconds: How long it took.
        distilled: With recovery, the mean squared error of each block's outputs before and after it.
    """

    path: Path
    format: str
    layers: tuple[LayerReport, ...]
    nbytes: int
    resumed: int
    seconds: float
    distilled: Mapping[str, tuple[float, float]] = field(default_factory=dict)
