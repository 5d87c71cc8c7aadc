"""optimum-quanto's file format (`QuantizedModelForCausalLM.save_pretrained`).

The files are model.safetensors and quanto_qmap.json.

qint8, qfloat8 (e4m3), qfloat8_e5m2:
    <m>.weight._data I8 or F8 [out, in], <m>.weight._scale [out, 1]
    W[n, k] = data[n, k] * scale[n]
qint4, qint2, in groups of `g` consecutive weights of the flattened matrix [out * in / g, g]:
    <m>.weight._data._data U8 [rows / (8 / bits), g]   the low bits hold the first slab of rows, the next bits
                                                       the second, …
    <m>.weight._scale, <m>.weight._shift [rows, 1]
    W = data * scale - shift

Both have <m>.input_scale and <m>.output_scale, which no weight depends on.

Format: optimum-quanto's `QBytesTensor`, `WeightQBitsTensor` and `pack_weights`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, ActivationScheme, Format, FormatVariant
from hfq.formats.codecs.groups import check_divides
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.layouts.scaled import Others, ScaledCodes, other_specs, other_tensors
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["QuantoBits", "QuantoBytes"]

_ACTIVATION_SCALES = ("input_scale", "output_scale")
_KINDS = {"I8": ("qint8",), "F8_E4M3": ("qfloat8", "qfloat8_e4m3fn"), "F8_E5M2": ("qfloat8_e5m2",)}
"""Names of weights of these dtypes in quanto_qmap.json."""


@dataclass(frozen=True)
class QuantoBytes(ScaledCodes):
    """qint8 and qfloat8; see the module docstring."""

    name = "quanto-8bit"
    codes, scale = "weight._data", "weight._scale"
    variants = (
        FormatVariant(
            "optimum-quanto qint8, qfloat8",
            "optimum-quanto",
            "weight._data, weight._scale, quanto_qmap.json",
            ("quanto-qint8", "quanto-qfloat8"),
            ("quanto-qfloat8-e5m2",),
        ),
    )
    scheme: ActivationScheme | None = None

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> QuantoBytes | None:
        codes, scale = tensors.get("weight._data"), tensors.get("weight._scale")
        if codes is None or "weight._shift" in tensors:
            return None
        if codes.dtype not in ("I8", "F8_E4M3", "F8_E5M2"):
            raise FormatError(
                "A tensor of optimum-quanto has an unsupported dtype. Nothing was loaded.",
                file=codes.range.file,
                tensor=codes.name,
                expected="I8, F8_E4M3, or F8_E5M2",
                found=str(codes),
                fix="Quantize the model again as qint8 or qfloat8.",
            )
        _check_qmap(module, codes, config, _KINDS[codes.dtype])
        return cls(
            codes_dtype=codes.dtype,
            scale_shape=scale.shape if scale is not None and len(scale.shape) <= 2 else (*codes.shape[:1], 1),
            others=other_tensors(tensors, _ACTIVATION_SCALES),
            scheme=_scheme(module, config),
        )


@dataclass(frozen=True)
class QuantoBits(Format):
    """qint4 and qint2 with the parameters of one module; see the module docstring.

    Attributes:
        num_bits: 4 or 2.
        group_size: Weights of a group.
        packed_rows: Rows of the packed tensor.
        others: Tensors that are saved unchanged and that no weight depends on: (name, dtype, shape).
        size: (out, in) of the layer.
    """

    name = "quanto-bits"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "optimum-quanto qint4, qint2",
            "optimum-quanto",
            "weight._data._data U8, weight._scale, weight._shift",
            ("quanto-qint4", "quanto-qint2"),
            ("quanto-qint4", "quanto-qint2-g32"),
        ),
    )
    num_bits: int = 4
    group_size: int = 128
    packed_rows: int = 0
    others: Others = ()
    scheme: ActivationScheme | None = None
    size: tuple[int, int] = (0, 0)

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> QuantoBits | None:
        packed = tensors.get("weight._data._data")
        if packed is None or len(packed.shape) != 2:
            return None
        _check_qmap(module, packed, config, ("qint4", "qint2"))
        named = {"qint4": 4, "qint2": 2}.get(str(_qmap_entry(module, config).get("weights")), 0)
        return cls(
            num_bits=named or _likely_bits(packed, tensors.get("weight._scale")),
            group_size=packed.shape[1],
            packed_rows=packed.shape[0],
            others=other_tensors(tensors, _ACTIVATION_SCALES),
            scheme=_scheme(module, config),
        )

    def sized(self, in_features: int, out_features: int) -> QuantoBits:
        check_divides(in_features * out_features, self.group_size, "optimum-quanto")
        rows = in_features * out_features // self.group_size
        candidates = [self.num_bits] if self.num_bits else [4, 2]
        fitting = [bits for bits in candidates if self.packed_rows == -(-rows * bits // 8)]
        if len(fitting) == 1:
            return dataclasses.replace(self, num_bits=fitting[0], size=(out_features, in_features))
        raise FormatError(
            "The quantized codes of a layer do not fit its size.",
            expected=f"{rows} groups in 4 or 2 bits",
            found=f"{self.packed_rows} packed rows of {self.group_size}",
            fix="Restore the original config.json of the checkpoint.",
        )

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        rows = in_features * out_features // self.group_size
        specs = [
            TensorSpec(
                "weight._data._data", ("U8",), (-(-rows * self.num_bits // 8), self.group_size), "codes"
            ),
            TensorSpec("weight._scale", FLOATS, (rows, 1), "scale"),
            TensorSpec("weight._shift", FLOATS, (rows, 1), "zero_point"),
        ]
        return (
            *specs,
            *other_specs(self.others),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "weight._data._data"

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        return self.size

    def describe(self) -> str:
        return f"quanto qint{self.num_bits or '?'} g{self.group_size}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> QuantoBits:
        check_finite(module, "weight._scale", tensors["weight._scale"])
        check_finite(module, "weight._shift", tensors["weight._shift"])
        return self

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        first, count = start * panel.shape[1], panel.numel()
        top, bottom = first // self.group_size, -(-(first + count) // self.group_size)
        packed, mask = tensors["weight._data._data"], (1 << self.num_bits) - 1
        codes = torch.empty(bottom - top, self.group_size, dtype=torch.float32, device=panel.device)
        for slab in range(8 // self.num_bits):
            low, high = max(top, slab * packed.shape[0]), min(bottom, (slab + 1) * packed.shape[0])
            if low < high:
                part = packed[low - slab * packed.shape[0] : high - slab * packed.shape[0]]
                codes[low - top : high - top] = (part >> (slab * self.num_bits)) & mask
        scale = tensors["weight._scale"][top:bottom].to(torch.float32)
        codes.mul_(scale).sub_(tensors["weight._shift"][top:bottom].to(torch.float32))
        panel.view(-1).copy_(codes.view(-1)[first - top * self.group_size :][:count])

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        check_divides(weight.shape[1], self.group_size, "optimum-quanto")
        groups = weight.detach().to(torch.float32).reshape(-1, self.group_size)
        top, slabs = (1 << self.num_bits) - 1, 8 // self.num_bits
        low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
        scale = torch.where(high == low, 1, (high - low) / top).to(torch.bfloat16)
        shift = (-low).to(torch.bfloat16)
        codes = ((groups + shift.float()) / scale.float()).round().clamp(0, top).to(torch.uint8)
        codes = torch.nn.functional.pad(codes, (0, 0, 0, -codes.shape[0] % slabs)).unflatten(0, (slabs, -1))
        packed = codes[0].clone()
        for slab in range(1, slabs):
            packed |= codes[slab] << (slab * self.num_bits)
        others = {name: torch.ones(shape, dtype=torch.bfloat16) for name, _, shape in self.others}
        return {"weight._data._data": packed, "weight._scale": scale, "weight._shift": shift, **others}


def _likely_bits(packed: TensorInfo, scale: TensorInfo | None) -> int:
    """Returns the bits that the number of groups implies, or 0 if it is ambiguous."""
    groups = scale.shape[0] if scale is not None and scale.shape else 0
    fitting = [bits for bits in (4, 2) if groups and packed.shape[0] == -(-groups * bits // 8)]
    return fitting[0] if len(fitting) == 1 else 0


def _qmap_entry(module: str, config: Mapping) -> Mapping:
    """Returns the entry of a module in quanto_qmap.json."""
    qmap = config.get("quanto_qmap")
    entry = qmap.get(module) if isinstance(qmap, Mapping) else None
    return entry if isinstance(entry, Mapping) else {}


def _check_qmap(module: str, codes: TensorInfo, config: Mapping, kinds: tuple[str, ...]) -> None:
    """Raises an error if quanto_qmap.json gives the codes another type."""
    named = _qmap_entry(module, config).get("weights")
    if named is not None and named not in kinds:
        raise FormatError(
            f"quanto_qmap.json contradicts the tensors of {module}. Nothing was loaded.",
            file=codes.range.file,
            tensor=codes.name,
            expected=f"weights of {named!r}",
            found=str(codes),
            fix="Restore the original quanto_qmap.json of the checkpoint.",
        )


def _scheme(module: str, config: Mapping) -> ActivationScheme | None:
    activations = _qmap_entry(module, config).get("activations")
    return (
        None if activations in (None, "none") else ActivationScheme("tensor", dtype=f"quanto {activations}")
    )
