"""Format of unquantized weights, for experts that a checkpoint leaves in floats.

Such experts may be next to quantized ones, or alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.formats.base import FLOATS, Format
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["Unquantized"]


@dataclass(frozen=True)
class Unquantized(Format):
    """`weight` [out, in] in a float dtype; never detected from tensors."""

    name = "dense"
    num_bits: int = 16

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Unquantized | None:
        return None

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("weight", (*FLOATS, "F64"), (out_features, in_features), "codes"),
            TensorSpec("bias", (*FLOATS, "F64"), (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "weight"

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        out_features, in_features = tensors["weight"].shape
        return out_features, in_features

    def describe(self) -> str:
        return "dense"

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        panel.copy_(tensors["weight"][start : start + panel.shape[0]])

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight": weight.detach().clone()}
