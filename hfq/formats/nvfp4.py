"""NVFP4: E2M1 codes, an E4M3 scale for each 16 channels, and one scale per tensor.

compressed-tensors (nvfp4-pack-quantized), auto-round:
    weight_packed U8 [out, in / 2], weight_scale F8_E4M3 [out, in / 16], weight_global_scale F32 [1]
    W[n, k] = e2m1(code[n, k]) * (weight_scale[n, k // 16] / weight_global_scale)
ModelOpt, Quark:
    weight U8 [out, in / 2], weight_scale F8_E4M3 [out, in / 16] (W4A8_NVFP4_FP8: in / 32)
    weight_scale_2 F32 []
    W[n, k] = e2m1(code[n, k]) * (weight_scale[n, k // 16] * weight_scale_2)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.formats.base import FormatVariant
from hfq.formats.codecs.groups import check_divides
from hfq.formats.codecs.value_checks import check_finite, check_positive
from hfq.formats.configs.compressed_tensors_config import (
    format_of,
    group_of,
    read_activations,
    refuse_transforms,
)
from hfq.formats.configs.quark_config import float_codes, read_inputs
from hfq.formats.layouts.fp4 import OTHERS, Fp4Format
from hfq.formats.layouts.scaled import other_tensors
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["Nvfp4"]


@dataclass(frozen=True)
class Nvfp4(Fp4Format):
    """NVFP4; see the module docstring.

    Attributes:
        stored_codes_name: `weight_packed` (compressed-tensors) or `weight` (ModelOpt, Quark).
        global_shape: The shape of the global scale on disk.
        group_size: 16, or 32 in ModelOpt's W4A8_NVFP4_FP8.
    """

    name = "nvfp4"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "NVFP4 (compressed-tensors nvfp4-pack-quantized)",
            "llmcompressor, compressed-tensors, auto-round",
            "weight_packed U8, weight_scale F8_E4M3, weight_global_scale",
            ("nvfp4",),
            ("llmcompressor-nvfp4",),
        ),
        FormatVariant(
            "NVFP4 (ModelOpt)",
            "nvidia-modelopt",
            "weight U8, weight_scale F8_E4M3, weight_scale_2",
            ("nvfp4-modelopt",),
            ("modelopt-nvfp4",),
        ),
        FormatVariant(
            "NVFP4 (Quark)",
            "amd-quark",
            "weight U8, weight_scale F8_E4M3, weight_scale_2",
            ("nvfp4-quark",),
            ("quark-nvfp4",),
        ),
    )
    stored_codes_name: str = "weight_packed"
    global_shape: tuple[int, ...] = (1,)
    group_size: int = 16

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Nvfp4 | None:
        codes_name = "weight_packed" if "weight_packed" in tensors else "weight"
        codes, scale = tensors.get(codes_name), tensors.get("weight_scale")
        if codes is None or codes.dtype != "U8" or len(codes.shape) != 2:
            return None
        quark = float_codes(module, config)
        if quark is not None and quark != "fp4 fp8_e4m3":
            return None
        global_name = "weight_global_scale" if codes_name == "weight_packed" else "weight_scale_2"
        says_nvfp4 = (
            "nvfp4" in format_of(module, config) or config.get("quant_algo") == "NVFP4" or quark is not None
        )
        is_nvfp4 = says_nvfp4 if scale is None else scale.dtype == "F8_E4M3"
        if not is_nvfp4 or (codes_name == "weight" and global_name not in tensors and not says_nvfp4):
            return None
        refuse_transforms(config)
        stored = tensors.get(global_name)
        is_wide = scale is not None and len(scale.shape) == 2 and scale.shape[1] * 16 == codes.shape[1]
        return cls(
            stored_codes_name=codes_name,
            group_size=32 if is_wide and codes_name == "weight" else 16,
            global_shape=stored.shape if stored is not None and stored.numel == 1 else (1,),
            scheme=read_inputs(module, config)
            if quark
            else read_activations(group_of(module, config).get("input_activations"), tensors),
            others=other_tensors(tensors, (*OTHERS, "input_scale_2")),
        )

    @property
    def codes_name(self) -> str:
        return self.stored_codes_name

    @property
    def global_name(self) -> str:
        """The name of the global scale; `weight_global_scale` divides, `weight_scale_2` multiplies."""
        return "weight_global_scale" if self.stored_codes_name == "weight_packed" else "weight_scale_2"

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        check_divides(in_features, self.group_size, "NVFP4")
        return (
            TensorSpec(self.codes_name, ("U8",), (out_features, in_features // 2), "codes"),
            TensorSpec("weight_scale", ("F8_E4M3",), (out_features, in_features // self.group_size), "scale"),
            TensorSpec(self.global_name, ("F32", "BF16", "F16"), self.global_shape, "scale"),
            *self._other_specs(out_features),
        )

    def describe(self) -> str:
        return "nvfp4" if self.stored_codes_name == "weight_packed" else f"nvfp4 g{self.group_size}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Nvfp4:
        check_finite(module, "weight_scale", tensors["weight_scale"])
        check_finite(module, self.global_name, tensors[self.global_name])
        check_positive(module, self.global_name, tensors[self.global_name])
        return self

    def _multiplier(self, tensors: Mapping[str, torch.Tensor], start: int, stop: int) -> torch.Tensor:
        scale = tensors["weight_scale"][start:stop].to(torch.float32)
        shared = tensors[self.global_name].to(torch.float32)
        return (
            scale / shared.reshape(1, 1)
            if self.global_name == "weight_global_scale"
            else scale * shared.reshape(1, 1)
        )

    def _quantize_scales(self, amax: torch.Tensor) -> dict[str, torch.Tensor]:
        shared = amax.amax().clamp(min=1e-12) / (448 * 6)
        scale = (amax / 6 / shared).clamp(max=448).to(torch.float8_e4m3fn)
        stored = 1 / shared if self.global_name == "weight_global_scale" else shared
        others = {name: torch.ones(shape) for name, _, shape in self.others}
        return {"weight_scale": scale, self.global_name: stored.reshape(self.global_shape), **others}
