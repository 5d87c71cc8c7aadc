"""Float codes of MLX, in its modes mxfp4, nvfp4, and mxfp8.

The bytes are those of the formats with these names.

    <m>.weight U32 [out, in * bits / 32]
        the codes of a row in sequence, from the lowest bit of its first word on
    <m>.scales U8 [out, in / g]
        powers of two (E8M0) in groups of 32; for nvfp4, E4M3 in groups of 16
    W[n, k] = value(codes[n, k]) * scales[n, k // g]

config.json stores the `mode` next to the bits (see affine.py). The shapes must agree with it.

Format: `mlx.core.quantize` with these modes; OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from hfq.errors import FormatError
from hfq.formats.base import FormatVariant
from hfq.formats.codecs.fp8_codes import widen_into
from hfq.formats.codecs.groups import apply_groups, check_divides
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.layouts.fp4 import Fp4Format, powers, store_powers
from hfq.formats.mlx.affine import MlxWords, layer_options
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["MlxFp4", "MlxFp8"]

_MODES = ("mxfp4", "nvfp4", "mxfp8")


@dataclass(frozen=True)
class MlxFp4(MlxWords, Fp4Format):
    """mxfp4 and nvfp4 with the parameters of one module; see the module docstring.

    Attributes:
        mode: `mxfp4` or `nvfp4`.
    """

    name = "mlx-fp4"
    resolves_each_value = True
    scale_name = "scales"
    variants = (
        FormatVariant(
            "MLX mxfp4, nvfp4",
            "mlx-lm",
            "weight U32, scales U8",
            ("mlx-mxfp4", "mlx-nvfp4"),
            ("mlx-mxfp4", "mlx-nvfp4"),
        ),
    )
    mode: str = "mxfp4"

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> MlxFp4 | None:
        mode = _mode_of(module, tensors, config)
        return None if mode is None or mode == "mxfp8" else cls(mode=mode)

    @property
    def group_size(self) -> int:
        """The number of channels that share a scale."""
        return 16 if self.mode == "nvfp4" else 32

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        check_divides(in_features, self.group_size, f"MLX {self.mode}")
        scales = TensorSpec("scales", ("U8",), (out_features, in_features // self.group_size), "scale")
        return self._specs(in_features, out_features, scales)

    def describe(self) -> str:
        return f"mlx {self.mode}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> MlxFp4:
        check_finite(module, "scales", self._multiplier(tensors, 0, len(tensors["scales"])))
        return self

    def _shape_codes(self, packed: torch.Tensor) -> torch.Tensor:
        return packed.view(torch.uint32)

    def _multiplier(self, tensors: Mapping[str, torch.Tensor], start: int, stop: int) -> torch.Tensor:
        scales = tensors["scales"][start:stop]
        return scales.view(torch.float8_e4m3fn).to(torch.float32) if self.mode == "nvfp4" else powers(scales)

    def _quantize_scales(self, amax: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.mode == "nvfp4":
            return {"scales": (amax / 6).clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8)}
        return {"scales": store_powers(amax)}


@dataclass(frozen=True)
class MlxFp8(MlxWords):
    """mxfp8; see the module docstring."""

    name = "mlx-fp8"
    resolves_each_value = True
    variants = (
        FormatVariant("MLX mxfp8", "mlx-lm", "weight U32, scales U8", ("mlx-mxfp8",), ("mlx-mxfp8",)),
    )
    group_size: ClassVar[int] = 32

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> MlxFp8 | None:
        return cls() if _mode_of(module, tensors, config) == "mxfp8" else None

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        check_divides(in_features, self.group_size, "MLX mxfp8")
        scales = TensorSpec("scales", ("U8",), (out_features, in_features // self.group_size), "scale")
        return self._specs(in_features, out_features, scales)

    def describe(self) -> str:
        return "mlx mxfp8"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> MlxFp8:
        check_finite(module, "scales", powers(tensors["scales"]))
        return self

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        rows = slice(start, start + panel.shape[0])
        widen_into(panel, tensors["weight"][rows].view(torch.float8_e4m3fn))
        apply_groups(panel, torch.Tensor.mul_, powers(tensors["scales"][rows]), self.group_size)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        check_divides(weight.shape[1], self.group_size, "MLX mxfp8")
        grouped = weight.detach().to(torch.float32).unflatten(1, (-1, self.group_size))
        scales = store_powers(grouped.abs().amax(2), 8)
        codes = (grouped / powers(scales)[:, :, None]).flatten(1).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes.view(torch.uint32), "scales": scales}


def _mode_of(module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> str | None:
    """Returns the mode of a layer with float codes, or None for any other layer.

    Raises:
        FormatError: The mode is unknown, or the layer has a global scale.
    """
    weight, mode = tensors.get("weight"), layer_options(module, config).get("mode")
    if weight is None or weight.dtype != "U32" or len(weight.shape) != 2 or mode in (None, "affine"):
        return None
    if mode not in _MODES or "global_scale" in tensors:
        raise FormatError(
            f"{module} is quantized in an MLX mode that hfq does not support. Nothing was loaded.",
            file=weight.range.file,
            tensor=weight.name,
            expected=f"mode affine, {', '.join(_MODES)}, without a global scale",
            found=f"mode={mode!r}, {', '.join(sorted(tensors))}",
            fix="Quantize the model again with mlx_lm.convert --q-mode affine.",
        )
    return mode
