"""FP4 with UE5M3 scales: auto-round's NVFP4 of data_type nvfp4_v2, and Quark's AMD FP4.

UE5M3 has no sign, five bits of exponent, and three bits of mantissa.

    weight_packed U8 [out, in / 2] (Quark: `weight`)     E2M1, the even channel in the low nibble
    weight_scale  U8 [out, in / 16] (Quark: or in / 32)  2**(e - 15) * (1 + m / 8); 2**-14 * m / 8 for e = 0;
                                                         255 is NaN

    W[n, k] = e2m1(code[n, k]) * weight_scale[n, k // group_size]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.formats.base import FormatVariant
from hfq.formats.codecs.groups import check_divides
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.configs.quark_config import float_codes, read_inputs
from hfq.formats.layouts.fp4 import Fp4Format
from hfq.formats.layouts.scaled import other_tensors
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["Nvfp4E5m3"]


@dataclass(frozen=True)
class Nvfp4E5m3(Fp4Format):
    """FP4 with UE5M3 scales; see the module docstring.

    Attributes:
        stored_codes_name: `weight_packed`, or `weight` (Quark).
        group_size: 16, or 32 in Quark's amdfp4_g32.
    """

    name = "nvfp4-e5m3"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "NVFP4 with UE5M3 scales",
            "auto-round (nvfp4_v2)",
            "weight_packed U8, weight_scale U8",
            ("nvfp4-e5m3",),
            ("autoround-nvfp4-e5m3",),
        ),
        FormatVariant(
            "AMD FP4 (Quark)",
            "amd-quark",
            "weight U8, weight_scale U8",
            ("amdfp4", "amdfp4-g32"),
            ("quark-amdfp4", "quark-amdfp4-g32"),
        ),
    )
    stored_codes_name: str = "weight_packed"
    group_size: int = 16

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Nvfp4E5m3 | None:
        quark = float_codes(module, config)
        codes_name = "weight_packed" if quark is None else "weight"
        codes, scale = tensors.get(codes_name), tensors.get("weight_scale")
        if codes is None or codes.dtype != "U8" or len(codes.shape) != 2:
            return None
        groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 0
        if quark is not None:
            is_e5m3 = quark == "fp4 e5m3"
        elif scale is None:
            is_e5m3 = config.get("data_type") == "nvfp4_v2"
        else:
            is_e5m3 = scale.dtype == "U8" and groups * 8 == codes.shape[1]
        found = cls(
            stored_codes_name=codes_name,
            group_size=32 if quark is not None and groups * 16 == codes.shape[1] else 16,
            scheme=None if quark is None else read_inputs(module, config),
            others=other_tensors(tensors, ("input_scale", "input_global_scale")),
        )
        return found if is_e5m3 else None

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        check_divides(in_features, self.group_size, "NVFP4")
        return (
            TensorSpec(self.codes_name, ("U8",), (out_features, in_features // 2), "codes"),
            TensorSpec("weight_scale", ("U8",), (out_features, in_features // self.group_size), "scale"),
            *self._other_specs(out_features),
        )

    @property
    def codes_name(self) -> str:
        return self.stored_codes_name

    def describe(self) -> str:
        return "nvfp4 ue5m3" if self.stored_codes_name == "weight_packed" else f"amdfp4 g{self.group_size}"

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
