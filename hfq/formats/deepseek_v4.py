"""MXFP4 experts of DeepSeek-V4, whose codes have the dtype of integers.

Its FP8 is in fp8.py.

    weight I8 [out, in / 2]          two codes per byte, the even channel in the low nibble
    scale  F8_E8M0 [out, in / 32]    2**(u - 127)

    W[n, k] = e2m1(code[n, k]) * scale[n, k // 32]

Source: `convert.py` of DeepSeek-V4. A scale is an exponent: a cast of its byte to a float is another number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.formats.base import FLOATS, FormatVariant
from hfq.formats.codecs.groups import check_divides
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.configs.fp8_config import is_fp4_expert
from hfq.formats.layouts.fp4 import Fp4Format, powers, store_powers
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["DeepseekMxfp4"]


@dataclass(frozen=True)
class DeepseekMxfp4(Fp4Format):
    """One projection of one expert; see the module docstring."""

    name = "mxfp4-deepseek"
    resolves_each_value = True
    group_size = 32
    scale_name = "scale"
    variants = (
        FormatVariant(
            "MXFP4 experts of DeepSeek-V4",
            "DeepSeek",
            "weight I8, scale F8_E8M0",
            ("mxfp4-deepseek",),
        ),
    )

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> DeepseekMxfp4 | None:
        return cls() if is_fp4_expert(tensors, config) else None

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        check_divides(in_features, self.group_size, "MXFP4")
        return (
            TensorSpec("weight", ("I8",), (out_features, in_features // 2), "codes"),
            TensorSpec("scale", ("F8_E8M0",), (out_features, in_features // 32), "scale"),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "weight"

    def describe(self) -> str:
        return "mxfp4 deepseek"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> DeepseekMxfp4:
        check_finite(module, "scale", powers(tensors["scale"]))
        return self

    def _multiplier(self, tensors: Mapping[str, torch.Tensor], start: int, stop: int) -> torch.Tensor:
        return powers(tensors["scale"][start:stop])

    def _quantize_scales(self, amax: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scale": store_powers(amax).view(torch.float8_e8m0fnu)}

    def _shape_codes(self, packed: torch.Tensor) -> torch.Tensor:
        return packed.view(torch.int8)
