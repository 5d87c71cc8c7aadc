"""4-bit integers of AMD Quark.

Its FP8 is in fp8.py, its int8 in compressed_tensors.py, and its FP4 in mxfp4.py, nvfp4.py, and nvfp4_e5m3.py.

Groups (int4, uint4):
    weight I32 [in, out / 8], weight_scale [groups, out], weight_zero_point I32 [groups, out / 8]
    W[n, k] = (q - z) * s
Channels (int4, uint4):
    weight I32 [out, in / 8], weight_scale [out], weight_zero_point I32 [out / 8]
    W[n, k] = (q - z) * s
Two levels (int4_fp8):
    weight I32 [out, in / 8], weight_scale_2 [out], weight_zero_point_2 I32 [out / 8], weight_scale []
    W[n, k] = (q - z) * s_2 * s

Codes and zero points of int4 are in two's complement; those of uint4 are not. Nibble i of a word belongs to
column 8c + (0, 2, 4, 6, 1, 3, 5, 7)[i], or to column 8c + i with pack_method="order".

Format: Quark's `Pack_4_bits`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, ActivationScheme, Format, FormatVariant, bounded_int
from hfq.formats.codecs.awq_words import order_columns, reorder_columns
from hfq.formats.codecs.bit_packing import pack_stream
from hfq.formats.codecs.constants import constant
from hfq.formats.codecs.groups import check_divides
from hfq.formats.codecs.nibbles import look_up_nibbles
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.configs.quark_config import (
    is_quark,
    packs_in_order,
    read_dtype,
    read_inputs,
    weight_specs,
)
from hfq.formats.layouts.scaled import Others, other_specs, other_tensors
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["QuarkInt4"]

_UNSIGNED = tuple(float(code) for code in range(16))
_SIGNED = tuple(float(code - 16 if code > 7 else code) for code in range(16))
_OTHERS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


@dataclass(frozen=True)
class QuarkInt4(Format):
    """int4, uint4, and int4_fp8 with the parameters of one module; see the module docstring.

    Attributes:
        is_signed: True for int4, whose codes are in two's complement.
        is_in_order: True if the codes of a word are in order.
        group_size: Input channels that share a scale; None if a row has one scale.
        is_two_level: True if a scale of the whole layer multiplies the scales of rows.
        has_zeros: True if any zero point differs from 0, as far as their values are known.
        scheme: The activation quantization that the checkpoint requests.
        others: Tensors that are saved unchanged and that no weight depends on: (name, dtype, shape).
    """

    name = "quark-int4"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "Quark int4, uint4 (groups, channels)",
            "amd-quark",
            "weight I32, weight_scale, weight_zero_point I32",
            ("quark-uint4-group", "quark-int4-group", "quark-uint4-channel", "quark-int4-channel-order"),
            ("quark-uint4-g32", "quark-int4-g32-order", "quark-uint4-channel", "quark-int4-channel"),
        ),
        FormatVariant(
            "Quark int4_fp8",
            "amd-quark",
            "weight I32, weight_scale_2, weight_zero_point_2 I32, weight_scale",
            ("quark-int4-fp8",),
            ("quark-int4-fp8",),
        ),
    )
    num_bits = 4
    is_signed: bool = False
    is_in_order: bool = False
    group_size: int | None = None
    is_two_level: bool = False
    has_zeros: bool = True
    scheme: ActivationScheme | None = None
    others: Others = ()

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> QuarkInt4 | None:
        weight = tensors.get("weight")
        if not is_quark(config) or weight is None or weight.dtype != "I32" or len(weight.shape) != 2:
            return None
        kind = read_dtype(module, weight, config, ("int4", "uint4"), level=-1)
        specs = weight_specs(module, config)
        return cls(
            is_signed=kind == "int4",
            is_in_order=packs_in_order(config),
            group_size=_read_group_size(module, specs[-1], weight, tensors.get("weight_scale")),
            is_two_level=len(specs) == 2,
            scheme=read_inputs(module, config),
            others=other_tensors(tensors, _OTHERS),
        )

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        if self.group_size is not None:
            check_divides(in_features, self.group_size, "Quark")
        else:
            check_divides(in_features, 8, "Quark", "a word")
        if out_features % 8:
            raise FormatError(
                "Quark cannot hold a layer of this output size.",
                expected="a multiple of 8",
                found=f"{out_features} output channels",
                fix="Add the layer to modules_to_not_convert.",
            )
        codes: tuple[int, ...] = (out_features, in_features // 8)
        scale: tuple[int, ...] = (out_features,)
        zero: tuple[int, ...] = (out_features // 8,)
        if self.group_size is not None:
            codes = (in_features, out_features // 8)
            groups = in_features // self.group_size
            scale, zero = (groups, out_features), (groups, out_features // 8)
        specs = [
            TensorSpec("weight", ("I32",), codes, "codes"),
            TensorSpec(self.scale_name, FLOATS, scale, "scale"),
            TensorSpec(self.zero_name, ("I32",), zero, "zero_point"),
        ]
        if self.is_two_level:
            specs.append(TensorSpec("weight_scale", FLOATS, (), "scale"))
        return (
            *specs,
            *other_specs(self.others),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "weight"

    @property
    def scale_name(self) -> str:
        """The name of the scales of rows or groups."""
        return "weight_scale_2" if self.is_two_level else "weight_scale"

    @property
    def zero_name(self) -> str:
        return "weight_zero_point_2" if self.is_two_level else "weight_zero_point"

    @property
    def row_multiple(self) -> int:
        return 8

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        first, second = tensors["weight"].shape
        return (first, 8 * second) if self.group_size is None else (8 * second, first)

    def describe(self) -> str:
        kind = "int4" if self.is_signed else "uint4"
        sharing = "channel" if self.group_size is None else f"g{self.group_size}"
        return f"quark {kind}{'_fp8' if self.is_two_level else ''} {sharing}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> QuarkInt4:
        check_finite(module, self.scale_name, tensors[self.scale_name])
        if self.is_two_level:
            check_finite(module, "weight_scale", tensors["weight_scale"])
        return dataclasses.replace(self, has_zeros=bool(tensors[self.zero_name].any()))

    def resolve_stack(self, tensors: Mapping[str, torch.Tensor]) -> Format | None:
        zeros = tensors[self.zero_name]
        has_zeros = zeros.reshape(zeros.shape[0], -1).any(1)
        return super().resolve_stack(tensors) if bool(has_zeros.all() == has_zeros.any()) else None

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        stop = start + panel.shape[0]
        scale, zeros = tensors[self.scale_name], tensors[self.zero_name]
        if self.group_size is None:
            look_up_nibbles(panel, self._ordered(tensors["weight"][start:stop]), self._values(panel.device))
            if self.has_zeros:
                panel.sub_(self._columns(zeros[None], start, stop).t())
            panel.mul_(scale[start:stop, None].to(torch.float32))
            if self.is_two_level:
                panel.mul_(tensors["weight_scale"].to(torch.float32))
            return
        weight = self._columns(tensors["weight"], start, stop)
        grouped = weight.unflatten(0, (scale.shape[0], self.group_size))
        if self.has_zeros:
            grouped.sub_(self._columns(zeros, start, stop)[:, None])
        grouped.mul_(scale[:, None, start:stop].to(torch.float32))
        panel.copy_(weight.t())

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out_features, in_features = weight.shape
        self.tensor_specs(in_features, out_features)
        grouped = weight.detach().to(torch.float32).unflatten(1, (-1, self.group_size or in_features))
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        step = torch.maximum(-low, high) / 7.5 if self.is_signed else (high - low) / 15
        scale = torch.where(step == 0, 1, step).to(torch.bfloat16).float()
        zero = torch.zeros_like(scale) if self.is_signed else (-low / scale).round().clamp(0, 15)
        bounds = (-8, 7) if self.is_signed else (0, 15)
        codes = (grouped / scale[:, :, None] + zero[:, :, None]).round().clamp(*bounds).flatten(1)
        by_row = self.group_size is None
        stored = {
            "weight": self._pack(codes if by_row else codes.t()),
            self.scale_name: (scale[:, 0] if by_row else scale.t()).to(torch.bfloat16).contiguous(),
            self.zero_name: self._pack(zero.t())[0] if by_row else self._pack(zero.t()),
        }
        if self.is_two_level:
            stored |= {"weight_scale": torch.tensor(1 / 64), self.scale_name: scale[:, 0] * 64}
        return stored

    def _values(self, device: torch.device) -> torch.Tensor:
        return constant(_SIGNED if self.is_signed else _UNSIGNED, device)

    def _ordered(self, words: torch.Tensor) -> torch.Tensor:
        return words if self.is_in_order else order_columns(words)

    def _columns(self, words: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Returns the codes of columns [start, stop) of words; `start` is a multiple of 8.

        The result is float32 [words, stop - start], contiguous.
        """
        columns = torch.empty(len(words), stop - start, device=words.device)
        part = self._ordered(words[:, start // 8 : -(-stop // 8)])
        look_up_nibbles(columns, part, self._values(words.device))
        return columns

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Packs eight codes of a row, each in a word."""
        codes = codes.to(torch.int32) & 15
        if not self.is_in_order:
            codes = reorder_columns(codes)
        return pack_stream(codes.t(), 4).t().contiguous()


def _read_group_size(module: str, spec: Mapping, weight: TensorInfo, scale: TensorInfo | None) -> int | None:
    """Returns the group size that the scales imply, or None if a row has one scale.

    Raises:
        FormatError: The config contradicts the tensors.
    """
    hinted = bounded_int(spec, "group_size", lambda size: 0 < size < 1 << 24, "a positive number", module)
    is_grouped = spec.get("qscheme") == "per_group" if scale is None else len(scale.shape) == 2
    if not is_grouped:
        return None
    if scale is None or not scale.shape[0]:
        return hinted or 128  # the check of the specs reports the scale
    found = weight.shape[0] // scale.shape[0]
    if hinted is not None and hinted != found:
        raise FormatError(
            f"quantization_config contradicts the tensors of {module}. Nothing was loaded.",
            file=scale.range.file,
            tensor=scale.name,
            expected=f"groups of {hinted}",
            found=str(scale),
            fix="Restore the original group_size in config.json.",
        )
    return max(found, 1)
