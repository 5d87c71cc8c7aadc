"""The float codes of MLX: its modes mxfp4, mxfp8 and nvfp4, whose bytes are those of the formats of these names.

    <m>.weight U32 [out, in * bits / 32]   the codes of a row one after the other, from the lowest bit of its first word on
    <m>.scales U8 [out, in / g]            powers of two (E8M0) in groups of 32; of nvfp4 E4M3, in groups of 16
    W[n, k] = value(codes[n, k]) * scales[n, k // g]

config.json has the `mode` where it has the bits (see mlx.py); the shapes must agree.

Format: `mlx.core.quantize` with these modes; OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, Dialect, Format
from hfq.formats.fp4 import E2M1, powers, store_powers
from hfq.formats.fp8_codes import widen_into
from hfq.formats.groups import apply_groups, check_divides
from hfq.formats.mlx import layer_options
from hfq.formats.nibbles import look_up_nibbles
from hfq.formats.packing import pack_stream
from hfq.formats.values import check_finite
from hfq.spec import TensorInfo, TensorSpec

__all__ = ["MlxFloat"]

_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""mode → (bits of a code, channels of a group)."""


@dataclass(frozen=True)
class MlxFloat(Format):
    """Float codes with the parameters of one module; see the file's docstring.

    Attributes:
        mode: A key of `_MODES`.
    """

    name = "mlx-float"
    dialects = (
        Dialect("MLX mxfp4, mxfp8, nvfp4", "mlx-lm", "weight U32, scales U8",
                ("mlx-mxfp4", "mlx-mxfp8", "mlx-nvfp4"), ("mlx-mxfp4", "mlx-mxfp8", "mlx-nvfp4")),
    )  # fmt: skip
    mode: str = "mxfp4"

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> MlxFloat | None:
        weight, mode = tensors.get("weight"), layer_options(module, config).get("mode")
        if weight is None or weight.dtype != "U32" or len(weight.shape) != 2 or mode in (None, "affine"):
            return None
        if mode not in tuple(_MODES) or "global_scale" in tensors:  # whatever JSON may hold
            raise FormatError(
                f"{module} is packed by MLX in a way that hfq does not read; nothing was loaded.", file=weight.range.file,
                tensor=weight.name, expected=f"a mode of affine, {', '.join(_MODES)}, without a global scale",
                found=f"mode={mode!r}, {', '.join(sorted(tensors))}", fix="quantize the model again with --q-mode affine",
            )  # fmt: skip
        return cls(mode=mode)

    @property
    def num_bits(self) -> int:
        return _MODES[self.mode][0]

    @property
    def group_size(self) -> int:
        """Channels that share a scale."""
        return _MODES[self.mode][1]

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        check_divides(in_features, self.group_size, f"MLX {self.mode}")
        return (
            TensorSpec("weight", ("U32",), (out_features, in_features * self.num_bits // 32), "codes"),
            TensorSpec("scales", ("U8",), (out_features, in_features // self.group_size), "scale"),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "weight"

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        out_features, words = tensors["weight"].shape
        return out_features, words * 32 // self.num_bits

    def describe(self) -> str:
        return f"mlx {self.mode}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> MlxFloat:
        check_finite(module, "scales", self._scales(tensors["scales"]))
        return self

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        rows = slice(start, start + panel.shape[0])
        words = tensors["weight"][rows]
        if self.num_bits == 8:
            widen_into(panel, words.view(torch.float8_e4m3fn))
        else:
            look_up_nibbles(panel, words, torch.tensor(E2M1, device=panel.device))
        apply_groups(panel, torch.Tensor.mul_, self._scales(tensors["scales"][rows]), self.group_size)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        check_divides(weight.shape[1], self.group_size, f"MLX {self.mode}")
        grouped = weight.detach().to(torch.float32).unflatten(1, (-1, self.group_size))
        amax = grouped.abs().amax(2)
        if self.mode == "nvfp4":
            scales = (amax / 6).clamp(min=2.0**-9).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            scales = store_powers(amax, 2 if self.mode == "mxfp4" else 8)
        scaled = (grouped / self._scales(scales)[:, :, None]).flatten(1)
        if self.num_bits == 8:
            return {"weight": scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint32), "scales": scales}
        magnitudes = torch.tensor(E2M1[:8])
        bounds = (magnitudes[1:] + magnitudes[:-1]) / 2
        codes = torch.bucketize(scaled.abs().contiguous(), bounds, out_int32=True) + 8 * (scaled < 0)
        return {"weight": pack_stream(codes.t(), 4).t().contiguous().view(torch.uint32), "scales": scales}

    def _scales(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.view(torch.float8_e4m3fn).to(torch.float32) if self.mode == "nvfp4" else powers(scales)
