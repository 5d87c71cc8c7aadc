"""NVFP4 with UE5M3 scales, as auto-round writes it (data_type nvfp4_v2).

UE5M3 has no sign, five bits of exponent, and three bits of mantissa.

    weight_packed U8 [out, in / 2]    E2M1, the even channel in the low nibble
    weight_scale  U8 [out, in / 16]   2**(e - 15) * (1 + m / 8), for e = 0 2**-14 * m / 8; 255 is NaN

    W[n, k] = e2m1(code[n, k]) * weight_scale[n, k // 16]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.formats.base import FormatVariant
from hfq.formats.codecs.groups import check_divides
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.layouts.fp4 import Fp4Format
from hfq.formats.layouts.scaled import other_tensors
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["Nvfp4E5m3"]


@dataclass(frozen=True)
class Nvfp4E5m3(Fp4Format):
    """NVFP4 with UE5M3 scales; see the module docstring."""

    name = "nvfp4-e5m3"
    resolves_each_value = True
    group_size = 16
    variants = (
        FormatVariant(
            "NVFP4 with UE5M3 scales",
            "auto-round (nvfp4_v2)",
            "weight_packed U8, weight_scale U8",
            ("nvfp4-e5m3",),
            ("autoround-nvfp4-e5m3",),
        ),
    )

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Nvfp4E5m3 | None:
        codes, scale = tensors.get("weight_packed"), tensors.get("weight_scale")
        if codes is None or codes.dtype != "U8" or len(codes.shape) != 2:
            return None
        if scale is None:
            is_of_sixteen = config.get("data_type") == "nvfp4_v2"
        else:
            is_of_sixteen = (
                scale.dtype == "U8" and len(scale.shape) == 2 and scale.shape[1] * 8 == codes.shape[1]
            )
        return (
            cls(others=other_tensors(tensors, ("input_scale", "input_global_scale")))
            if is_of_sixteen
            else None
        )

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        check_divides(in_features, self.group_size, "NVFP4")
        return (
            TensorSpec("weight_packed", ("U8",), (out_features, in_features // 2), "codes"),
            TensorSpec("weight_scale", ("U8",), (out_features, in_features // self.group_size), "scale"),
            *self._other_specs(out_features),
        )

    @property
    def codes_name(self) -> str:
        return "weight_packed"

    def describe(self) -> str:
        return "nvfp4 ue5m3"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Nvfp4E5m3:
        check_finite(module, "weight_scale", _values(tensors["weight_scale"]))
        return self

    def _multiplier(self, tensors: Mapping[str, torch.Tensor], start: int, stop: int) -> torch.Tensor:
        return _values(tensors["weight_scale"][start:stop])

    def _quantize_scales(self, amax: torch.Tensor) -> dict[str, torch.Tensor]:
        table = _table(amax.device)[:255]
        nearest = torch.bucketize(amax / 6, (table[1:] + table[:-1]) / 2)
        return {"weight_scale": nearest.to(torch.uint8)}


def _values(scale: torch.Tensor) -> torch.Tensor:
    return _table(scale.device)[scale.to(torch.int32)]


def _table(device: torch.device) -> torch.Tensor:
    """Returns the value of each byte, float32 [256]."""
    byte = torch.arange(256, device=device)
    exponent, mantissa = byte >> 3, (byte & 7).to(torch.float32) / 8
    values = torch.where(
        exponent > 0, (1 + mantissa) * 2.0 ** (exponent - 15).to(torch.float32), mantissa * 2.0**-14
    )
    values[255] = float("nan")
    return values
