"""BitNet: ternary weights, four rows in a byte, with one scale.

    weight U8 [out / 4, in], weight_scale [1]
    Bits 2i and 2i + 1 of row r are the code of row r + i * out / 4.

    linear_class="autobitlinear":          W[n, k] = (code[n, k] - 1) * weight_scale
    linear_class="bitlinear", the default:  W[n, k] = (code[n, k] - 1) / weight_scale

Format: `integrations/bitnet.py` of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, ActivationScheme, Format, FormatVariant
from hfq.formats.codecs.value_checks import check_finite, check_positive
from hfq.formats.configs.compressed_tensors_config import unusable
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["BitNet"]

_CLASSES = ("bitlinear", "autobitlinear")


@dataclass(frozen=True)
class BitNet(Format):
    """BitNet; see the module docstring.

    Attributes:
        is_divided: True if the scale divides (`bitlinear`).
        scheme: The activation quantization that the checkpoint requests.
    """

    name = "bitnet"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "BitNet (bitlinear, autobitlinear)",
            "transformers",
            "weight U8, weight_scale",
            ("bitnet-bitlinear", "bitnet-autobitlinear"),
            ("transformers-bitnet-bitlinear", "transformers-bitnet-autobitlinear"),
        ),
    )
    num_bits = 2
    is_divided: bool = True
    scheme: ActivationScheme | None = None

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> BitNet | None:
        weight = tensors.get("weight")
        if config.get("quant_method") != "bitnet" or weight is None or weight.dtype != "U8":
            return None
        linear = config.get("linear_class")
        linear = "bitlinear" if linear is None else linear
        if linear not in _CLASSES:
            raise unusable("linear_class", linear, " or ".join(_CLASSES))
        if config.get("use_rms_norm"):
            raise unusable("use_rms_norm", True, "no norm within linear layers")
        return cls(is_divided=linear == "bitlinear", scheme=ActivationScheme("token", dtype="int8 of bitnet"))

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        if out_features % 4:
            raise FormatError(
                "BitNet cannot hold a layer of this output size.",
                expected="a multiple of 4",
                found=f"{out_features} output channels",
                fix="Add the layer to modules_to_not_convert.",
            )
        return (
            TensorSpec("weight", ("U8",), (out_features // 4, in_features), "codes"),
            TensorSpec("weight_scale", FLOATS, (1,), "scale"),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "weight"

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        rows, in_features = tensors["weight"].shape
        return 4 * rows, in_features

    def describe(self) -> str:
        return f"bitnet {'divided' if self.is_divided else 'multiplied'}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> BitNet:
        check_finite(module, "weight_scale", tensors["weight_scale"])
        if self.is_divided:
            check_positive(module, "weight_scale", tensors["weight_scale"])
        return self

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        packed, stop = tensors["weight"], start + panel.shape[0]
        rows = packed.shape[0]
        for quarter in range(4):
            low, high = max(start, quarter * rows), min(stop, (quarter + 1) * rows)
            if low < high:
                part = packed[low - quarter * rows : high - quarter * rows]
                panel[low - start : high - start] = part >> 2 * quarter & 3
        apply = torch.Tensor.div_ if self.is_divided else torch.Tensor.mul_
        apply(panel.sub_(1), tensors["weight_scale"].to(torch.float32))

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        self.tensor_specs(weight.shape[1], weight.shape[0])
        weight = weight.detach().to(torch.float32)
        scale = (1 / weight.abs().mean().clamp(min=1e-5)).to(torch.bfloat16)
        codes = (weight * scale.float()).round().clamp(-1, 1).add(1).to(torch.uint8).unflatten(0, (4, -1))
        packed = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
        stored = scale if self.is_divided else (1 / scale.float()).to(torch.bfloat16)
        return {"weight": packed, "weight_scale": stored.reshape(1)}
