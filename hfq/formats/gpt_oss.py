"""MXFP4 experts of gpt-oss, fused per layer into tensors with one more dimension.

    experts.gate_up_proj_blocks U8 [experts, out, in / 32, 16]   two codes per byte, the even channel in
                                                                 the low nibble
    experts.gate_up_proj_scales U8 [experts, out, in / 32]       2**(u - 127)
    experts.gate_up_proj_bias   [experts, out]

The tensors of down_proj are the same. `hfq.formats.layouts.fused_experts.split_experts` makes the slice of
each expert a separate module with tensors `blocks`, `scales`, `bias`.

Source: openai/gpt-oss, transformers' `integrations/mxfp4.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.formats.base import FLOATS, FormatVariant
from hfq.formats.codecs.groups import check_divides
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.layouts.fp4 import Fp4Format, powers, store_powers
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["GptOssMxfp4"]


@dataclass(frozen=True)
class GptOssMxfp4(Fp4Format):
    """One expert of gpt-oss: a slice of the fused `…_blocks`, `…_scales` and `…_bias`."""

    name = "mxfp4-blocks"
    resolves_each_value = True
    group_size = 32
    scale_name = "scales"
    variants = (
        FormatVariant(
            "MXFP4 experts of gpt-oss",
            "transformers, OpenAI",
            "…_blocks U8, …_scales U8, …_bias",
            ("mxfp4-blocks",),
            ("transformers-mxfp4-gptoss",),
        ),
    )

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> GptOssMxfp4 | None:
        blocks = tensors.get("blocks")
        return cls() if blocks is not None and blocks.dtype == "U8" and len(blocks.shape) == 3 else None

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        check_divides(in_features, self.group_size, "MXFP4")
        return (
            TensorSpec("blocks", ("U8",), (out_features, in_features // 32, 16), "codes"),
            TensorSpec("scales", ("U8",), (out_features, in_features // 32), "scale"),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "blocks"

    def describe(self) -> str:
        return "mxfp4 blocks"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> GptOssMxfp4:
        check_finite(module, "scales", powers(tensors["scales"]))
        return self

    def _multiplier(self, tensors: Mapping[str, torch.Tensor], start: int, stop: int) -> torch.Tensor:
        return powers(tensors["scales"][start:stop])

    def _quantize_scales(self, amax: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scales": store_powers(amax)}

    def _shape_codes(self, packed: torch.Tensor) -> torch.Tensor:
        return packed.unflatten(1, (-1, 16))
