"""Integer formats of NVIDIA ModelOpt (its FP8 is in fp8.py, its NVFP4 in nvfp4.py).

W4A16_AWQ, W4A8_AWQ:
    weight U8 [out / 2, in]     rows 2r in the low nibble, 2r + 1 in the high one, two's complement
    weight_scale [out, groups], pre_quant_scale [in]
    weight_scale_2 [] and input_scale (W4A8: the second, FP8 level only)
    W[n, k] = code[n, k] * weight_scale[n, g] (* pre_quant_scale[k])
W8A8_SQ_PER_CHANNEL (with or without SmoothQuant), W8A16:
    weight I8 [out, in], weight_scale [out]
    pre_quant_scale [in] (smoothed layers only), input_scale (W8A8 only)
    W[n, k] = weight[n, k] * weight_scale[n] (* pre_quant_scale[k])

`pre_quant_scale` multiplies the input of the layer, which is equivalent to multiplying the columns of its
weight. MIXED_PRECISION names the algorithm of each layer in `quantized_layers`.

Format: ModelOpt's unified Hugging Face export.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, ActivationScheme, Format, FormatVariant, bounded_int
from hfq.formats.codecs.groups import apply_groups, rows_of
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.layouts.scaled import Others, ScaledCodes, other_specs, other_tensors
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["ModeloptInt4", "ModeloptInt8"]


@dataclass(frozen=True)
class ModeloptInt8(ScaledCodes):
    """W8A8_SQ_PER_CHANNEL and W8A16; see the module docstring."""

    name = "modelopt-int8"
    codes, scale = "weight", "weight_scale"
    variants = (
        FormatVariant(
            "ModelOpt W8A8 SmoothQuant",
            "nvidia-modelopt",
            "weight I8, weight_scale, pre_quant_scale, input_scale",
            ("modelopt-w8a8-sq",),
            ("modelopt-w8a8-sq",),
        ),
        FormatVariant(
            "ModelOpt W8A8, W8A16 (not smoothed)",
            "nvidia-modelopt",
            "weight I8, weight_scale, input_scale",
            ("modelopt-w8a8", "modelopt-w8a16"),
            ("modelopt-w8a8", "modelopt-w8a16"),
        ),
    )

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> ModeloptInt8 | None:
        weight, scale = tensors.get("weight"), tensors.get("weight_scale")
        if (
            weight is None
            or weight.dtype != "I8"
            or len(weight.shape) != 2
            or config.get("quant_method") != "modelopt"
        ):
            return None
        algorithm = str(_settings_of(module, config).get("quant_algo") or "")
        if (
            algorithm
            and "SQ" not in algorithm
            and "INT8" not in algorithm.upper()
            and "W8A" not in algorithm.upper()
        ):
            raise FormatError(
                f"quantization_config contradicts the tensors of {module}. Nothing was loaded.",
                file=weight.range.file,
                tensor=weight.name,
                expected=f"a weight of {algorithm}",
                found=str(weight),
                fix="Restore the original quant_algo in config.json.",
            )
        # ModelOpt smooths either every linear layer or none, and never the experts that the model fuses
        is_smoothed = (
            "SQ" in algorithm and bool(config.get("__smoothed__")) and "experts" not in module.split(".")
        )
        return cls(
            scale_shape=scale.shape if scale is not None and len(scale.shape) <= 2 else (weight.shape[0],),
            has_columns=is_smoothed or "pre_quant_scale" in tensors,
            others=other_tensors(tensors, ("input_scale",)),
        )

    @property
    def activation_scheme(self) -> ActivationScheme | None:
        return (
            ActivationScheme("tensor", dtype="static int8 of ModelOpt")
            if self.others or self.has_columns
            else None
        )


@dataclass(frozen=True)
class ModeloptInt4(Format):
    """W4A16_AWQ and W4A8_AWQ with the parameters of one module; see the module docstring.

    Attributes:
        group_size: Input channels that share a scale.
        has_columns: True if `pre_quant_scale` is stored.
        others: Tensors that are saved unchanged and that no weight depends on: (name, dtype, shape).
    """

    name = "modelopt-int4"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "ModelOpt W4A16_AWQ, W4A8_AWQ",
            "nvidia-modelopt",
            "weight U8, weight_scale, pre_quant_scale, weight_scale_2",
            ("modelopt-int4",),
            ("modelopt-int4-awq",),
        ),
    )
    group_size: int = 128
    has_columns: bool = False
    others: Others = ()
    num_bits = 4

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> ModeloptInt4 | None:
        weight, scale = tensors.get("weight"), tensors.get("weight_scale")
        if weight is None or weight.dtype != "U8" or len(weight.shape) != 2:
            return None
        if config.get("quant_method") not in (None, "modelopt"):
            return None
        is_named = config.get("quant_method") == "modelopt" and "AWQ" in str(config.get("quant_algo"))
        if scale is None or scale.dtype not in FLOATS or len(scale.shape) != 2:
            return cls(has_columns="pre_quant_scale" in tensors) if is_named else None
        if not scale.shape[1] or weight.shape[1] % scale.shape[1] or scale.shape[0] != 2 * weight.shape[0]:
            raise FormatError(
                f"The scales of {module} do not fit its weight. Nothing was loaded.",
                file=scale.range.file,
                tensor=scale.name,
                expected=f"[{2 * weight.shape[0]}, groups] whose groups divide {weight.shape[1]}",
                found=str(scale),
                fix="Download the checkpoint again.",
            )
        group_size = weight.shape[1] // scale.shape[1]
        hinted = bounded_int(config, "group_size", lambda size: size >= 0, "a group size", module)
        if hinted and hinted != group_size:
            raise FormatError(
                f"quantization_config contradicts the tensors of {module}. Nothing was loaded.",
                file=scale.range.file,
                tensor=scale.name,
                expected=f"groups of {hinted}",
                found=str(scale),
                fix="Restore the original group_size in config.json.",
            )
        return cls(
            group_size=group_size,
            has_columns="pre_quant_scale" in tensors,
            others=other_tensors(tensors, ("weight_scale_2", "input_scale")),
        )

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        if out_features % 2 or in_features % self.group_size:
            raise FormatError(
                "ModelOpt's INT4 cannot hold a layer of this size.",
                found=f"[{out_features}, {in_features}]",
                expected=f"an even output and an input divisible by {self.group_size}",
                fix="Choose another method, or add the layer to modules_to_not_convert.",
            )
        specs = [
            TensorSpec("weight", ("U8",), (out_features // 2, in_features), "codes"),
            TensorSpec("weight_scale", FLOATS, (out_features, in_features // self.group_size), "scale"),
        ]
        if self.has_columns:
            specs.append(TensorSpec("pre_quant_scale", FLOATS, (in_features,), "scale", optional=True))
        return (
            *specs,
            *other_specs(self.others),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "weight"

    @property
    def row_multiple(self) -> int:
        return 2

    @property
    def activation_scheme(self) -> ActivationScheme | None:
        is_w4a8 = any(name == "input_scale" for name, _, _ in self.others)
        return ActivationScheme("tensor", dtype="FP8 of W4A8") if is_w4a8 else None

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        pairs, in_features = tensors["weight"].shape
        return 2 * pairs, in_features

    def describe(self) -> str:
        return f"modelopt int4 g{self.group_size}{' pre-scaled' if self.has_columns else ''}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> ModeloptInt4:
        for name in ("weight_scale", "pre_quant_scale"):
            if name in tensors:
                check_finite(module, name, tensors[name])
        return self

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        stop = start + panel.shape[0]
        packed = tensors["weight"][start // 2 : -(-stop // 2)]
        signed = torch.stack([packed << 4, packed & 0xF0], 1).flatten(0, 1).view(torch.int8) >> 4
        panel.copy_(signed[: stop - start])
        apply_groups(panel, torch.Tensor.mul_, rows_of(tensors["weight_scale"], start, stop), self.group_size)
        if self.has_columns:
            panel.mul_(tensors["pre_quant_scale"].to(torch.float32))

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out_features, in_features = weight.shape
        self.tensor_specs(in_features, out_features)
        stored: dict[str, torch.Tensor] = {}
        weight = weight.detach().to(torch.float32)
        if self.has_columns:
            stored["pre_quant_scale"] = weight.abs().amax(0).clamp(min=1e-6).sqrt()
            weight = weight / stored["pre_quant_scale"]
        grouped = weight.unflatten(1, (-1, self.group_size))
        scale = grouped.abs().amax(2) / 7
        stored["weight_scale"] = torch.where(scale == 0, 1, scale)
        codes = (grouped / stored["weight_scale"][:, :, None]).round().clamp(-8, 7).flatten(1).to(
            torch.int32
        ) & 15
        stored["weight"] = (codes[::2] | (codes[1::2] << 4)).to(torch.uint8)
        return stored | {name: torch.ones(shape) for name, _, shape in self.others}


def _settings_of(module: str, config: Mapping) -> Mapping:
    """Returns the config's options for a layer: under MIXED_PRECISION, its own entry."""
    if config.get("quant_algo") != "MIXED_PRECISION":
        return config
    layers = config.get("quantized_layers")
    own = layers.get(module) if isinstance(layers, Mapping) else None
    return own if isinstance(own, Mapping) else {}
