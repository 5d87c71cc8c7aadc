"""Progress and results of a quantization run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["LayerReport", "Progress", "QuantizeReport"]


@dataclass(frozen=True)
class LayerReport:
    """Result for one quantized layer.

    Attributes:
        name: Name in the model.
        method: Method that quantized it.
        tokens: Number of calibration tokens that reached it. None if the method needs none.
        loss: Mean squared error of its outputs on these tokens, or of its weights without tokens.
        damp_percent: Damping that its factorization used, as a fraction.
        exponent: AWQ's exponent: input channels are scaled by the activations' magnitudes to this power. None
            if no preceding module can absorb a scale.
    """

    name: str
    method: str
    tokens: int | None = None
    loss: float | None = None
    damp_percent: float | None = None
    exponent: float | None = None


@dataclass(frozen=True)
class Progress:
    """Report on a finished decoder layer: its name and number, and seconds elapsed and left."""

    decoder_layer: str
    done: int
    decoder_layers: int
    layers: tuple[LayerReport, ...]
    seconds: float
    eta_seconds: float | None

    @property
    def loss(self) -> float:
        """Mean loss of its layers. NaN if the method computes none."""
        losses = [layer.loss for layer in self.layers if layer.loss is not None]
        return sum(losses) / len(losses) if losses else math.nan


@dataclass(frozen=True)
class QuantizeReport:
    """Summary of a finished quantization.

    Attributes:
        path: Folder of the quantized checkpoint.
        format: Format of the quantized layers.
        layers: Result for each layer.
        nbytes: Bytes of all tensors.
        resumed: Number of decoder layers that an earlier run had finished.
        seconds: Duration of this run.
        distilled: Mean squared error of each distilled decoder layer's outputs, before and after. Empty
            without distillation.
    """

    path: Path
    format: str
    layers: tuple[LayerReport, ...]
    nbytes: int
    resumed: int
    seconds: float
    distilled: Mapping[str, tuple[float, float]] = field(default_factory=dict)
