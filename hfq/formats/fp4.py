"""FP4 E2M1 in its packings, two codes a byte, the even channel in the low nibble.

NVFP4 (compressed-tensors nvfp4-pack-quantized, ModelOpt):
    weight_packed U8 [out, in / 2] (ModelOpt: `weight`), weight_scale F8_E4M3 [out, in / 16] (W4A8_NVFP4_FP8: in / 32)
    weight_global_scale F32 [1] divides (compressed-tensors); weight_scale_2 F32 [] multiplies (ModelOpt)
MXINT4 (auto-round's data_type mx_int): as MXFP4, each code sign and magnitude in quarters
MXFP4 (compressed-tensors mxfp4-pack-quantized, auto-round, ModelOpt):
    weight_packed U8 [out, in / 2] (ModelOpt: `weight`), weight_scale U8 or F8_E8M0 [out, in / 32]: 2**(u - 127)
(The experts of gpt-oss are in gpt_oss.py.)

    W[n, k] = e2m1(code[n, k]) * scale[n, k // group_size] (/ weight_global_scale, * weight_scale_2)

Format: OCP Microscaling Formats 1.0 for E2M1 and E8M0; NVIDIA's NVFP4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, ActivationScheme, Dialect, Format
from hfq.formats.compressed_config import format_of, group_of, read_activations, refuse_transforms
from hfq.formats.groups import apply_groups, check_divides
from hfq.formats.scaled import Others, other_specs, other_tensors
from hfq.formats.values import check_finite, check_positive
from hfq.spec import TensorInfo, TensorSpec

__all__ = ["E2M1", "Mxfp4", "Nvfp4", "PackedFp4", "powers", "store_powers"]

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
"""The value of each 4-bit code."""
_MXINT4 = (*(code / 4 for code in range(8)), *(-code / 4 for code in range(8)))
"""The value of each code of MXINT4: sign and magnitude, in quarters."""

_OTHERS = ("input_scale", "input_global_scale", "output_scale")


@dataclass(frozen=True)
class PackedFp4(Format):
    """What the packings have in common; each names its tensors.

    Attributes:
        scheme: How the checkpoint wants activations quantized.
        others: Tensors that a save writes back and no weight depends on: (name, dtype, shape).
    """

    num_bits: ClassVar[int] = 4
    scheme: ActivationScheme | None = None
    others: Others = ()

    @property
    def activation_scheme(self) -> ActivationScheme | None:
        return self.scheme

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        out_features, nbytes = tensors[self.codes_name].flatten(1).shape
        return out_features, 2 * nbytes

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        stop = start + panel.shape[0]
        packed = tensors[self.codes_name][start:stop].flatten(1)
        panel.view(*packed.shape, 2).copy_(_pairs(self._values, panel.device)[packed.to(torch.int32)])
        apply_groups(panel, torch.Tensor.mul_, self._multiplier(tensors, start, stop), self._span)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out_features, in_features = weight.shape
        check_divides(in_features, self._span, self.name)
        grouped = weight.detach().to(torch.float32).unflatten(1, (-1, self._span))
        stored = self._quantize_scales(grouped.abs().amax(2))
        steps = self._multiplier(stored, 0, out_features)
        scaled = (grouped / torch.where(steps == 0, 1, steps)[:, :, None]).flatten(1)
        values = self._values[:8]
        bounds = torch.tensor([(low + high) / 2 for low, high in zip(values, values[1:], strict=False)])
        codes = torch.bucketize(scaled.abs(), bounds) + 8 * (scaled < 0)
        packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
        return {self.codes_name: self._shape_codes(packed), **stored}

    @property
    def _values(self) -> tuple[float, ...]:
        """The value of each 4-bit code."""
        return E2M1

    @property
    def _span(self) -> int:
        """Channels that share a scale."""
        return getattr(self, "group_size", 32)

    def _shape_codes(self, packed: torch.Tensor) -> torch.Tensor:
        return packed

    def _other_specs(self, out_features: int) -> tuple[TensorSpec, ...]:
        return (*other_specs(self.others), TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True))

    def _multiplier(self, tensors: Mapping[str, torch.Tensor], start: int, stop: int) -> torch.Tensor:
        """float32 [rows, groups]."""
        raise NotImplementedError

    def _quantize_scales(self, amax: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class Nvfp4(PackedFp4):
    """NVFP4; see the file's docstring.

    Attributes:
        stored_codes_name: `weight_packed` (compressed-tensors) or `weight` (ModelOpt).
        global_shape: The shape of the global scale on disk.
        group_size: 16, or 32 in ModelOpt's W4A8_NVFP4_FP8.
    """

    name = "nvfp4"
    dialects = (
        Dialect(
            "NVFP4 (compressed-tensors nvfp4-pack-quantized)", "llmcompressor, compressed-tensors, auto-round",
            "weight_packed U8, weight_scale F8_E4M3, weight_global_scale", ("nvfp4",), ("llmcompressor-nvfp4",),
        ),
        Dialect(
            "NVFP4 (ModelOpt)", "nvidia-modelopt", "weight U8, weight_scale F8_E4M3, weight_scale_2", ("nvfp4-modelopt",),
            ("modelopt-nvfp4",),
        ),
    )  # fmt: skip
    stored_codes_name: str = "weight_packed"
    global_shape: tuple[int, ...] = (1,)
    group_size: int = 16

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Nvfp4 | None:
        codes_name = "weight_packed" if "weight_packed" in tensors else "weight"
        codes, scale = tensors.get(codes_name), tensors.get("weight_scale")
        if codes is None or codes.dtype != "U8" or len(codes.shape) != 2:
            return None
        global_name = "weight_global_scale" if codes_name == "weight_packed" else "weight_scale_2"
        says_nvfp4 = "nvfp4" in format_of(module, config) or config.get("quant_algo") == "NVFP4"
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
            scheme=read_activations(group_of(module, config).get("input_activations"), tensors),
            others=other_tensors(tensors, _OTHERS),
        )

    @property
    def codes_name(self) -> str:
        return self.stored_codes_name

    @property
    def global_name(self) -> str:
        """The global scale: one divides, the other multiplies."""
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
        return "nvfp4" if self.stored_codes_name == "weight_packed" else f"nvfp4 modelopt g{self.group_size}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Nvfp4:
        check_finite(module, "weight_scale", tensors["weight_scale"])
        check_finite(module, self.global_name, tensors[self.global_name])
        check_positive(module, self.global_name, tensors[self.global_name])
        return self

    def _multiplier(self, tensors: Mapping[str, torch.Tensor], start: int, stop: int) -> torch.Tensor:
        scale, shared = tensors["weight_scale"][start:stop].to(torch.float32), tensors[self.global_name].to(torch.float32)
        return scale / shared.reshape(1, 1) if self.global_name == "weight_global_scale" else scale * shared.reshape(1, 1)

    def _quantize_scales(self, amax: torch.Tensor) -> dict[str, torch.Tensor]:
        shared = amax.amax().clamp(min=1e-12) / (448 * 6)
        scale = (amax / 6 / shared).clamp(max=448).to(torch.float8_e4m3fn)
        stored = 1 / shared if self.global_name == "weight_global_scale" else shared
        others = {name: torch.ones(shape) for name, _, shape in self.others}
        return {"weight_scale": scale, self.global_name: stored.reshape(self.global_shape), **others}


@dataclass(frozen=True)
class Mxfp4(PackedFp4):
    """MXFP4 of compressed-tensors and auto-round; see the file's docstring.

    Attributes:
        scale_dtype: U8 or F8_E8M0.
        stored_codes_name: `weight_packed`, or `weight` (ModelOpt).
        is_integer: Whether the codes are those of MXINT4.
    """

    name = "mxfp4"
    dialects = (
        Dialect(
            "MXFP4 (compressed-tensors mxfp4-pack-quantized)", "llmcompressor, compressed-tensors, auto-round",
            "weight_packed U8, weight_scale U8", ("mxfp4",), ("llmcompressor-mxfp4a16",),
        ),
        Dialect("MXINT4 (auto-round mx_int)", "auto-round", "weight_packed U8, weight_scale U8", ("mxint4",)),
        Dialect("MXFP4 (ModelOpt)", "nvidia-modelopt", "weight U8, weight_scale U8", ("mxfp4-modelopt",)),
    )  # fmt: skip
    scale_dtype: str = "U8"
    stored_codes_name: str = "weight_packed"
    is_integer: bool = False
    group_size: ClassVar[int] = 32

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Mxfp4 | None:
        codes_name = "weight_packed" if "weight_packed" in tensors else "weight"
        codes, scale = tensors.get(codes_name), tensors.get("weight_scale")
        is_named = codes_name == "weight_packed" or str(config.get("quant_algo")).lower() == "mxfp4"
        if codes is None or codes.dtype != "U8" or len(codes.shape) != 2 or (scale is None and not is_named):
            return None
        if scale is not None and scale.dtype not in ("U8", "F8_E8M0"):
            return None
        _refuse_others(module, codes, scale, config)
        refuse_transforms(config)
        return cls(
            scale_dtype=scale.dtype if scale is not None else "U8",
            stored_codes_name=codes_name,
            is_integer=_is_mxint4(module, codes, config),
            scheme=read_activations(group_of(module, config).get("input_activations"), tensors),
            others=other_tensors(tensors, _OTHERS),
        )

    @property
    def _values(self) -> tuple[float, ...]:
        return _MXINT4 if self.is_integer else E2M1

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
        kind = "mxint4" if self.is_integer else "mxfp4"
        return kind if self.stored_codes_name == "weight_packed" else f"{kind} modelopt"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Mxfp4:
        check_finite(module, "weight_scale", powers(tensors["weight_scale"]))
        return self

    def _multiplier(self, tensors: Mapping[str, torch.Tensor], start: int, stop: int) -> torch.Tensor:
        return powers(tensors["weight_scale"][start:stop])

    def _quantize_scales(self, amax: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = store_powers(amax, 0 if self.is_integer else 2)
        return {"weight_scale": scale if self.scale_dtype == "U8" else scale.view(torch.float8_e8m0fnu)}


def _pairs(codes: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The two values of each byte, the low nibble's first: float32 [256, 2]."""
    values = torch.tensor(codes, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([values[byte & 15], values[byte >> 4]], 1)


def powers(scale: torch.Tensor) -> torch.Tensor:
    """Powers of two stored as E8M0, as float32; 255 is NaN."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).to(torch.float32)


def store_powers(amax: torch.Tensor, emax: int = 2) -> torch.Tensor:
    """The shared exponents of MX groups, floor(log2(amax)) less the largest exponent of a code (OCP MX 1.0, 6.3), as U8."""
    exponent = torch.floor(torch.log2(amax.clamp(min=2.0**-120))) - emax
    return (exponent + 127).clamp(0, 254).to(torch.uint8)


def _is_mxint4(module: str, codes: TensorInfo, config: Mapping) -> bool:
    """Whether auto-round says that the codes, whose tensors look as those of MXFP4, are integers."""
    kind = str(config.get("data_type") or "")
    if config.get("quant_method") in ("auto-round", "intel/auto-round") and kind.startswith("mx") and kind[:5] not in ("mx_fp", "mx_in"):
        raise FormatError(
            f"data_type={kind!r} is a dialect that hfq does not read; nothing was loaded.", file=codes.range.file, tensor=codes.name,
            expected="mx_fp or mx_int", found=repr(kind), fix="re-export the checkpoint with data_type mx_fp",
        )  # fmt: skip
    return kind.startswith("mx_int")


def _refuse_others(module: str, codes: TensorInfo, scale: TensorInfo | None, config: Mapping) -> None:
    label = format_of(module, config)
    if scale is not None and len(scale.shape) == 2 and scale.shape[1] * 8 == codes.shape[-1]:
        raise FormatError(
            "NVFP4 with scales in UE5M3 is a dialect that hfq does not read; nothing was loaded.", file=codes.range.file,
            tensor=scale.name, expected="F8_E4M3 scales of 16 channels, or E8M0 scales of 32", found=str(scale),
            fix="re-export the checkpoint as NVFP4 with E4M3 scales, or as MXFP4",
        )  # fmt: skip
    if "mxfp6" in label or (group_of(module, config).get("weights") or {}).get("num_bits", 4) != 4:
        raise FormatError(
            f"format={label!r} is a dialect that hfq does not read; nothing was loaded.", file=codes.range.file, tensor=codes.name,
            expected="mxfp4-pack-quantized or nvfp4-pack-quantized", found=f"{label}: {codes}",
            fix="re-export the checkpoint with another format, as mxfp8",
        )  # fmt: skip
