"""ModelOpt's experts of gpt-oss and Llama 4, fused per layer with inputs before outputs.

    experts.gate_up_proj                F8_E4M3 [experts, in, out], or
                                        U8 [experts, in / 2, out], the even channel in the low nibble
    experts.gate_up_proj_weight_scale   FP8: F32 [], or [experts]; NVFP4: F8_E4M3 [experts, in / 16, out]
    experts.gate_up_proj_weight_scale_2 F32 [], NVFP4 only
    experts.gate_up_proj_input_scale    F32 []
    experts.gate_up_proj_bias           [experts, out], gpt-oss only

The tensors of down_proj are the same. Gate and up channels have the order of the model: interleaved in
gpt-oss, in halves in Llama 4.

`hfq.formats.layouts.fused_experts.split_experts` makes the slice of each expert a separate module and names
its codes `transposed`. A number without dimensions belongs to every expert. The result is ModelOpt's linear
layer of the same format, transposed. In ModelOpt's other formats (MXFP8, MXFP4, W4A8_NVFP4_FP8), the scales
here are shared by outputs, unlike in its calibration. hfq does not support them.

Source: ModelOpt 0.47, `export/unified_export_hf.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.errors import FormatError
from hfq.formats.base import ActivationScheme, Format, FormatVariant
from hfq.formats.fp8 import Fp8
from hfq.formats.layouts.fused_experts import TRANSPOSED
from hfq.formats.nvfp4 import Nvfp4
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["ModeloptExpert"]

_VARIANTS: dict[str, type[Fp8 | Nvfp4]] = {"F8_E4M3": Fp8, "U8": Nvfp4}
"""The format of an expert's codes, by their dtype."""


@dataclass(frozen=True)
class ModeloptExpert(Format):
    """One expert: a slice of the fused tensors; see the module docstring.

    Attributes:
        turned: The format of its tensors after codes and scales are transposed.
    """

    name = "modelopt-experts"
    variants = (
        FormatVariant(
            "ModelOpt FP8, NVFP4 experts of gpt-oss, Llama 4",
            "nvidia-modelopt",
            "…_proj F8_E4M3 or U8, …_weight_scale, …_weight_scale_2, …_input_scale, …_bias",
            ("modelopt-experts-nvfp4", "modelopt-experts-fp8"),
            ("modelopt-fp8-gptoss", "modelopt-nvfp4-gptoss"),
        ),
    )
    turned: Fp8 | Nvfp4

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> ModeloptExpert | None:
        codes, scale = tensors.get(TRANSPOSED), tensors.get("weight_scale")
        if (
            codes is None
            or codes.dtype not in _VARIANTS
            or len(codes.shape) != 2
            or config.get("quant_method") != "modelopt"
        ):
            return None
        is_by_group = codes.dtype == "U8" and scale is not None and scale.dtype == "F8_E4M3"
        if scale is not None and scale.shape[-1:] != (codes.shape[-1:] if is_by_group else ()):
            raise FormatError(
                f"The scales of {module} are not those of ModelOpt's FP8 or NVFP4. Nothing was loaded.",
                file=scale.range.file,
                tensor=scale.part_of or scale.name,
                expected="one number, or F8_E4M3 for each 16 inputs of an output",
                found=f"{scale} for codes {codes}",
                fix="Export the model again as FP8 or NVFP4.",
            )
        infos = {local: info._replace(shape=info.shape[::-1]) for local, info in tensors.items()}
        infos["weight"] = infos.pop(TRANSPOSED)
        turned = _VARIANTS[codes.dtype].detect(module, infos, config)
        return None if turned is None else cls(turned)

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        return tuple(
            dataclasses.replace(
                spec, name=TRANSPOSED if spec.role == "codes" else spec.name, shape=spec.shape[::-1]
            )
            for spec in self.turned.tensor_specs(in_features, out_features)
        )

    @property
    def codes_name(self) -> str:
        return TRANSPOSED

    @property
    def bits_per_code(self) -> float:
        return self.turned.bits_per_code

    @property
    def activation_scheme(self) -> ActivationScheme | None:
        return self.turned.activation_scheme

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        rows, out_features = tensors[TRANSPOSED].shape
        return out_features, int(rows * 8 // self.bits_per_code)

    def describe(self) -> str:
        return f"{self.turned.describe()} transposed"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> ModeloptExpert:
        self.turned.resolve(module, tensors)
        return self

    def resolve_stack(self, tensors: Mapping[str, torch.Tensor]) -> ModeloptExpert | None:
        return None if self.turned.resolve_stack(tensors) is None else self

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        stop = start + panel.shape[0]
        rows = {
            local: tensor[:, start:stop].t().contiguous() if tensor.dim() == 2 else tensor
            for local, tensor in tensors.items()
        }
        self.turned.dequantize_into(panel, {**rows, "weight": rows[TRANSPOSED]}, 0)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        stored = self.turned.quantize(weight)
        stored[TRANSPOSED] = stored.pop("weight")
        return {
            local: tensor.t().contiguous() if tensor.dim() == 2 else tensor
            for local, tensor in stored.items()
        }
