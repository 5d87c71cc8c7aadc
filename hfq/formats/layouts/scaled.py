"""Base of formats with one unpacked 8-bit code per weight, in the orientation of nn.Linear.

    W[n, k] = (codes[n, k] - zero_point[n, g]) * weight_scale[n, g] (* column_scale[k])
    with  g = k // group_size

The shape of the scale tells which weights share it: [] or [1] for the tensor, [out] or [out, 1] for a row,
and [out, groups] for a group of a row. Only a grid of blocks requires the block size from the config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.formats.codecs.fp8_codes import widen_into
from hfq.formats.codecs.groups import apply_groups, block_amax, rows_of
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.layouts.row_order import ScaledOrder
from hfq.formats.layouts.slicing import ScaledShards
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["Others", "ScaledCodes", "other_specs", "other_tensors"]

Others = tuple[tuple[str, str, tuple[int, ...]], ...]
"""(name, dtype, shape) of tensors that are saved unchanged and that no weight depends on.

An example is the scale of an activation.
"""

_INTEGERS = ("U8", "I8", "I32", "I64")
_TOPS = {"I8": 127.0, "F8_E4M3": 448.0, "F8_E5M2": 57344.0}


@dataclass(frozen=True)
class ScaledCodes(ScaledShards, ScaledOrder):
    """8-bit codes with scales; each format defines the names of its tensors.

    Attributes:
        codes_dtype: `I8`, `F8_E4M3` or `F8_E5M2`.
        scale_shape: The shape of the scale on disk.
        block: (out, in) of a block, if blocks share a scale; None otherwise.
        zero_dtype: The dtype of the zero points on disk; None if there are none.
        has_columns: True if the file also stores a scale for each input channel.
        others: Further tensors that are saved unchanged and that no weight depends on: (name, dtype, shape).
    """

    codes: ClassVar[str]
    scale: ClassVar[str]
    zero: ClassVar[str] = "weight_zero_point"
    columns: ClassVar[str] = "pre_quant_scale"
    multiplier: ClassVar[float] = 1.0

    resolves_each_value = True
    codes_dtype: str = "I8"
    scale_shape: tuple[int, ...] = (1,)
    block: tuple[int, int] | None = None
    zero_dtype: str | None = None
    has_columns: bool = False
    others: Others = ()

    @property
    def codes_name(self) -> str:
        return self.codes

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        shape = self._scale_shape(in_features, out_features)
        specs = [
            TensorSpec(self.codes, (self.codes_dtype,), (out_features, in_features), "codes"),
            TensorSpec(self.scale, FLOATS, shape, "scale"),
        ]
        if self.zero_dtype:
            specs.append(TensorSpec(self.zero, (self.zero_dtype,), shape, "zero_point"))
        if self.has_columns:
            specs.append(TensorSpec(self.columns, FLOATS, (in_features,), "scale"))
        return (
            *specs,
            *other_specs(self.others),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        out_features, in_features = tensors[self.codes].shape
        return out_features, in_features

    def describe(self) -> str:
        codes = {"I8": "int8", "F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}[self.codes_dtype]
        zero = " asym" if self.zero_dtype else ""
        columns = " pre-scaled" if self.has_columns else ""
        return f"{self.name} {codes} {self.strategy}{zero}{columns}"

    @property
    def strategy(self) -> str:
        """The weights that share a scale: `tensor`, `channel`, `group` or `block`."""
        if self.block:
            return "block"
        if self.scale_shape in ((), (1,), (1, 1)):
            return "tensor"
        return "channel" if len(self.scale_shape) == 1 or self.scale_shape[1] == 1 else "group"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> ScaledCodes:
        for name in (self.scale, self.columns):
            if name in tensors:
                check_finite(module, name, tensors[name])
        return self

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        stop = start + panel.shape[0]
        widen_into(panel, tensors[self.codes][start:stop])
        scale = self._rows_of(tensors[self.scale], start, stop)
        group_size = self.block[1] if self.block else -(-panel.shape[1] // scale.shape[1])
        if self.zero_dtype:
            apply_groups(panel, torch.Tensor.sub_, self._rows_of(tensors[self.zero], start, stop), group_size)
        apply_groups(panel, torch.Tensor.mul_, scale, group_size)
        if self.multiplier != 1.0:
            panel.mul_(self.multiplier)
        if self.has_columns:
            panel.mul_(tensors[self.columns].to(torch.float32))

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out_features, in_features = weight.shape
        shape = self._scale_shape(in_features, out_features)
        if self.block and self.zero_dtype:
            raise FormatError(
                "hfq does not support quantizing to int8 with a zero point per block.",
                expected="a zero point for each row or group",
                found=f"blocks of {self.block}",
                fix="Choose strategy channel or group.",
            )
        groups = shape[1] if len(shape) == 2 and shape[0] == out_features else 1
        weight = weight.detach().to(torch.float32)
        stored: dict[str, torch.Tensor] = {}
        if self.has_columns:
            stored[self.columns] = weight.abs().amax(0).clamp(min=1e-6).sqrt()
            weight = weight / stored[self.columns]
        grouped = weight.reshape(1 if self.strategy == "tensor" else out_features, groups, -1)
        top = _TOPS[self.codes_dtype]
        if self.zero_dtype:
            low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
            scale = (high - low) / 255
            scale = torch.where(scale == 0, 1, scale)
            stored[self.zero] = (
                (-128 - low / scale).round().clamp(-128, 127).reshape(shape).to(torch_dtype(self.zero_dtype))
            )
        else:
            scale = (block_amax(weight, self.block) if self.block else grouped.abs().amax(2)) / top
        stored[self.scale] = torch.where(scale == 0, 1, scale).reshape(shape) / self.multiplier
        blank = torch.ones(out_features, in_features)
        steps = self._bare().dequantize({**stored, self.codes: blank})
        codes = weight / steps
        if self.zero_dtype:
            span = -(-in_features // groups)
            apply_groups(codes, torch.Tensor.add_, rows_of(stored[self.zero], 0, out_features), span)
        if self.codes_dtype == "I8":
            codes = codes.round().clamp(-128 if self.zero_dtype else -127, 127)
        stored[self.codes] = codes.clamp(-max(top, 128), top).to(torch_dtype(self.codes_dtype))
        return stored | {
            name: torch.zeros(other, dtype=torch_dtype(dtype)) for name, dtype, other in self.others
        }

    def _rows_of(self, values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Returns the scales of output rows [start, stop), float32 [rows or 1, groups]."""
        if not self.block:
            return rows_of(values, start, stop)
        row = torch.arange(start, stop, device=values.device) // self.block[0]
        return values[row].to(torch.float32)

    def _bare(self) -> ScaledCodes:
        """Returns this format without zero points and column scales."""
        return dataclasses.replace(self, zero_dtype=None, has_columns=False)

    def _scale_shape(self, in_features: int, out_features: int) -> tuple[int, ...]:
        if self.block:
            return -(-out_features // self.block[0]), -(-in_features // self.block[1])
        if self.strategy == "tensor":
            return self.scale_shape
        if self.strategy == "channel":
            return (out_features,) if len(self.scale_shape) == 1 else (out_features, 1)
        groups = self.scale_shape[1]
        if not groups or in_features % groups:
            raise FormatError(
                "The groups of a layer do not divide its input.",
                expected=f"a multiple of {groups} groups",
                found=f"{in_features} input channels",
                fix="Choose a group size that divides the input, or add the layer to modules_to_not_convert.",
            )
        return (out_features, groups)


def other_tensors(tensors: Mapping[str, TensorInfo], names: tuple[str, ...]) -> Others:
    """Returns (name, dtype, shape) of the tensors in `names` that the module has."""
    return tuple((name, tensors[name].dtype, tensors[name].shape) for name in names if name in tensors)


def other_specs(others: Others) -> tuple[TensorSpec, ...]:
    """Returns the requirements on these tensors: one number each."""
    return tuple(
        TensorSpec(
            name,
            _INTEGERS if name.endswith(("zero_point", "format")) else FLOATS,
            shape if shape == (1,) else (),
            "meta",
            optional=True,
        )
        for name, _, shape in others
    )
