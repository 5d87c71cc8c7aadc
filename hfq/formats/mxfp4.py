"""MXFP4, with power-of-two scales (E8M0) of 32 channels, and MXINT4, with the same tensors.

    weight_packed U8 [out, in / 2] (ModelOpt, Quark: `weight`), weight_scale U8 or F8_E8M0 [out, in / 32]
    W[n, k] = code[n, k] * 2**(weight_scale[n, k // 32] - 127)

A code is E2M1. For auto-round's data_type mx_int, it is a sign and a magnitude in quarters. The experts of
gpt-oss are in gpt_oss.py.

Writers: compressed-tensors (mxfp4-pack-quantized), auto-round, ModelOpt, Quark.
Format: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from hfq.errors import FormatError
from hfq.formats.base import FormatVariant
from hfq.formats.codecs.groups import check_divides
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.configs.compressed_tensors_config import (
    format_of,
    group_of,
    read_activations,
    refuse_transforms,
)
from hfq.formats.configs.gptq_config import module_options
from hfq.formats.configs.quark_config import float_codes, read_inputs
from hfq.formats.detection.unsupported import refused
from hfq.formats.layouts.fp4 import E2M1, OTHERS, Fp4Format, powers, store_powers
from hfq.formats.layouts.scaled import other_tensors
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["MXINT4", "Mxfp4"]

MXINT4 = (*(code / 4 for code in range(8)), *(-code / 4 for code in range(8)))
"""The value of each code of MXINT4: sign and magnitude, in quarters."""


@dataclass(frozen=True)
class Mxfp4(Fp4Format):
    """MXFP4 of compressed-tensors and auto-round.

    Attributes:
        scale_dtype: U8 or F8_E8M0.
        stored_codes_name: `weight_packed`, or `weight` (ModelOpt, Quark).
        is_integer: True if the codes are MXINT4.
    """

    name = "mxfp4"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "MXFP4 (compressed-tensors mxfp4-pack-quantized)",
            "llmcompressor, compressed-tensors, auto-round",
            "weight_packed U8, weight_scale U8",
            ("mxfp4",),
            ("llmcompressor-mxfp4a16",),
            is_emitted=True,
        ),
        FormatVariant(
            "MXINT4 (auto-round mx_int)",
            "auto-round",
            "weight_packed U8, weight_scale U8",
            ("mxint4",),
            ("autoround-mxint4",),
        ),
        FormatVariant(
            "MXFP4 (ModelOpt)", "nvidia-modelopt", "weight U8, weight_scale U8", ("mxfp4-modelopt",)
        ),
        FormatVariant(
            "MXFP4 (Quark)", "amd-quark", "weight U8, weight_scale U8", ("mxfp4-quark",), ("quark-mxfp4",)
        ),
    )
    scale_dtype: str = "U8"
    stored_codes_name: str = "weight_packed"
    is_integer: bool = False
    group_size: ClassVar[int] = 32

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Mxfp4 | None:
        codes_name = "weight_packed" if "weight_packed" in tensors else "weight"
        codes, scale = tensors.get(codes_name), tensors.get("weight_scale")
        if codes is None or codes.dtype != "U8" or len(codes.shape) != 2:
            return None
        quark = float_codes(module, config)
        if quark is not None and quark != "fp4 e8m0":
            return None
        kinds = (
            str(config.get("data_type") or ""),
            format_of(module, config),
            str(config.get("quant_algo")).lower(),
        )
        is_named = quark is not None or any(kind.startswith(("mx_", "mxfp4")) for kind in kinds)
        if scale is None and not is_named:
            return None
        is_of_sixteen = scale is not None and len(scale.shape) == 2 and scale.shape[1] * 8 == codes.shape[1]
        if scale is not None and (scale.dtype not in ("U8", "F8_E8M0") or is_of_sixteen):
            return None
        _refuse_mxfp6(module, codes, config)
        refuse_transforms(config)
        return cls(
            scale_dtype=scale.dtype if scale is not None else "U8",
            stored_codes_name=codes_name,
            is_integer=quark is None and _is_mxint4(module, codes, config),
            scheme=read_inputs(module, config)
            if quark
            else read_activations(group_of(module, config).get("input_activations"), tensors),
            others=other_tensors(tensors, OTHERS),
        )

    @property
    def values(self) -> tuple[float, ...]:
        return MXINT4 if self.is_integer else E2M1

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        check_divides(in_features, self.group_size, "MXFP4")
        return (
            TensorSpec(self.codes_name, ("U8",), (out_features, in_features // 2), "codes"),
            TensorSpec("weight_scale", (self.scale_dtype,), (out_features, in_features // 32), "scale"),
            *self._other_specs(out_features),
        )

    @property
    def codes_name(self) -> str:
        return self.stored_codes_name

    def describe(self) -> str:
        return "mxint4" if self.is_integer else "mxfp4"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Mxfp4:
        check_finite(module, "weight_scale", powers(tensors["weight_scale"]))
        return self

    def _multiplier(self, tensors: Mapping[str, torch.Tensor], start: int, stop: int) -> torch.Tensor:
        return powers(tensors["weight_scale"][start:stop])

    def _quantize_scales(self, amax: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = store_powers(amax, 0 if self.is_integer else 2)
        return {"weight_scale": scale if self.scale_dtype == "U8" else scale.view(torch.float8_e8m0fnu)}


def _is_mxint4(module: str, codes: TensorInfo, config: Mapping) -> bool:
    """Returns True if the config says that the codes are integers (MXINT4).

    The tensors of MXINT4 and MXFP4 look the same.

    Raises:
        FormatError: The config says neither.
    """
    kind = str(module_options(module, config).get("data_type") or "")
    weights = group_of(module, config).get("weights") or {}
    says_float = (
        kind.startswith("mx_fp")
        or "mxfp4" in format_of(module, config)
        or weights.get("type") == "float"
        or str(config.get("quant_algo")).lower().startswith(("mxfp4", "w4a8_mxfp4"))
    )
    if kind.startswith("mx_int") or says_float:
        return kind.startswith("mx_int")
    raise FormatError(
        "The format of 4-bit codes is ambiguous: MXFP4 and MXINT4 have the same tensors. Nothing was loaded.",
        file=codes.range.file,
        tensor=codes.name,
        expected="data_type, or a format, in quantization_config",
        found=str(codes),
        fix="Restore the original quantization_config in config.json.",
    )


def _refuse_mxfp6(module: str, codes: TensorInfo, config: Mapping) -> None:
    label = format_of(module, config)
    if "mxfp6" in label or (group_of(module, config).get("weights") or {}).get("num_bits", 4) != 4:
        raise refused("mxfp6-pack-quantized", codes.range.file, codes.name, f"{label}: {codes}")
