"""Integer formats of compressed-tensors.

Its FP8 is in fp8.py, and its FP4 in nvfp4.py and mxfp4.py.

pack-quantized, 1 to 8 bits:

    weight_packed      I32 [out, in * bits / 32]    code + 2**(bits - 1), a bit stream along the input
    weight_scale       [out, groups], [out, 1] or [1]
    weight_zero_point  I32 [out * bits / 32, groups]  only if asymmetric: packed along the output, with the
                                                      offset of the codes
    weight_g_idx       I32 [in]                     the group of each channel; only of old writers with
                                                    actorder="group"
    weight_shape       I64 [2]                      (out, in)

int-quantized and naive-quantized: one I8 code per weight (also for 4 bits), weight_scale, weight_zero_point
I8.

    W[n, k] = (code[n, k] - zero_point[n, g]) * weight_scale[n, g]

Format: compressed-tensors' `pack_to_int32`. In files of old writers, no code straddles two words. The width
of `weight_packed` tells the difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, ActivationScheme, Format, FormatVariant, bounded_int
from hfq.formats.codecs.bit_packing import pack_stream, pack_words, unpack_rows, unpack_stream
from hfq.formats.codecs.groups import apply_groups, check_divides, rows_of
from hfq.formats.codecs.value_checks import check_finite, check_index, with_common
from hfq.formats.configs.compressed_tensors_config import (
    group_of,
    read_activations,
    read_block,
    refuse_float,
    refuse_transforms,
)
from hfq.formats.configs.fp8_config import is_fp4_expert
from hfq.formats.configs.quark_config import is_quark, read_dtype, read_inputs, weight_specs
from hfq.formats.layouts.row_order import PackOrder
from hfq.formats.layouts.scaled import Others, ScaledCodes, other_specs, other_tensors
from hfq.formats.layouts.slicing import PackShards
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["IntQuantized", "PackQuantized"]

_OTHERS = ("modelopt", "bitsandbytes", "blockwise_int8", "gemma")
"""Methods whose I8 weights other formats read."""


@dataclass(frozen=True)
class IntQuantized(ScaledCodes):
    """int-quantized and naive-quantized; see the module docstring."""

    name = "int-quantized"
    codes, scale = "weight", "weight_scale"
    variants = (
        FormatVariant(
            "compressed-tensors int-quantized, naive-quantized",
            "llmcompressor, compressed-tensors",
            "weight I8, weight_scale, weight_zero_point I8",
            ("int-quantized-channel", "int-quantized-group-asym"),
            ("llmcompressor-w8a8-int-asym", "llmcompressor-w4afp8"),
            is_emitted=True,
        ),
        FormatVariant("w8a8_int8", "SGLang", "weight I8, weight_scale", ("w8a8-int8",)),
        FormatVariant(
            "Quark int8",
            "amd-quark",
            "weight I8, weight_scale, weight_zero_point I8",
            ("quark-int8",),
            ("quark-int8",),
        ),
    )
    scheme: ActivationScheme | None = None

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> IntQuantized | None:
        weight, scale = tensors.get("weight"), tensors.get("weight_scale")
        if weight is None or weight.dtype != "I8" or len(weight.shape) != 2:
            return None
        if "SCB" in tensors or config.get("quant_method") in _OTHERS:
            return None
        if is_fp4_expert(tensors, config):
            return None
        refuse_transforms(config)
        group = group_of(module, config)
        weights = group.get("weights") or {}
        refuse_float(module, weight, weights, config)
        if is_quark(config):
            read_dtype(module, weight, config, ("int8",))
            weights = {"symmetric": weight_specs(module, config)[0].get("symmetric")}
        is_asymmetric = weights.get("symmetric") is False or "weight_zero_point" in tensors
        is_blocked = weights.get("strategy") == "block" and (scale is None or len(scale.shape) == 2)
        block = read_block(weights.get("block_structure"), "block_structure") if is_blocked else None
        detected = cls(
            codes_dtype="I8",
            scale_shape=scale.shape if scale is not None else (weight.shape[0], 1),
            block=block,
            zero_dtype="I8" if is_asymmetric else None,
            others=other_tensors(tensors, ("input_scale", "input_zero_point", "output_scale")),
            scheme=read_inputs(module, config)
            if is_quark(config)
            else read_activations(group.get("input_activations"), tensors),
        )
        hinted = bounded_int(
            weights, "group_size", lambda size: size == -1 or size > 0, "a group size", module
        )
        groups = (
            detected.scale_shape[1] if detected.strategy == "group" and len(detected.scale_shape) == 2 else 1
        )
        if hinted and hinted > 0 and weight.shape[1] != hinted * groups:
            raise FormatError(
                f"quantization_config contradicts the tensors of {module}. Nothing was loaded.",
                file=weight.range.file,
                tensor=f"{module}.weight_scale",
                expected=f"groups of {hinted}",
                found=str(scale),
                fix="Restore the original group_size in config_groups of config.json.",
            )
        return detected


@dataclass(frozen=True)
class PackQuantized(PackShards, PackOrder):
    """pack-quantized with the parameters of one module; see the module docstring.

    Attributes:
        num_bits: 1 to 8.
        is_straddling: True if a code may straddle two words.
        scale_shape: The shape of the scale on disk.
        width: Words in a row of `weight_packed`.
        is_symmetric: True if there are no zero points.
        zero_dtype: I32 for packed zero points, I8 for unpacked ones.
        has_g_idx: True if the group of each channel is stored.
        group_size: The group size in the config; None if the config does not state it.
        scheme: The activation quantization that the checkpoint requests.
        others: Tensors that are saved unchanged and that no weight depends on: (name, dtype, shape).
        size: (out, in) of the layer; (0, 0) if only `weight_shape` stores it.
    """

    name = "pack-quantized"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "compressed-tensors pack-quantized",
            "llmcompressor, compressed-tensors",
            "weight_packed I32, weight_scale, weight_zero_point I32, weight_shape I64, weight_g_idx",
            (
                "pack-quantized-w4",
                "pack-quantized-w4-asym",
                "pack-quantized-w3-channel",
                "pack-quantized-w8",
                "pack-quantized-w8-asym",
                "pack-quantized-w3-words",
                "pack-quantized-g-idx",
            ),
            ("llmcompressor-w4a16-g32-asym", "llmcompressor-w3a16-g32-asym"),
            is_emitted=True,
        ),
    )
    num_bits: int = 4
    is_straddling: bool = True
    scale_shape: tuple[int, ...] = (1, 1)
    width: int = 0
    is_symmetric: bool = True
    zero_dtype: str = "I32"
    has_g_idx: bool = False
    group_size: int | None = None
    scheme: ActivationScheme | None = None
    others: Others = ()
    size: tuple[int, int] = (0, 0)

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> PackQuantized | None:
        packed, scale = tensors.get("weight_packed"), tensors.get("weight_scale")
        if packed is None or packed.dtype != "I32" or len(packed.shape) != 2:
            return None
        refuse_transforms(config)
        group = group_of(module, config)
        weights = group.get("weights") or {}
        refuse_float(module, packed, weights, config)
        zero = tensors.get("weight_zero_point")
        bits = bounded_int(weights, "num_bits", lambda bits: 1 <= bits <= 8, "1 to 8", module, default=0)
        return cls(
            num_bits=bits or 0,
            scale_shape=scale.shape if scale is not None else (packed.shape[0], 1),
            width=packed.shape[1],
            is_symmetric=zero is None and weights.get("symmetric") is not False,
            zero_dtype=zero.dtype if zero is not None and zero.dtype == "I8" else "I32",
            has_g_idx="weight_g_idx" in tensors or weights.get("actorder") == "group",
            group_size=bounded_int(
                weights, "group_size", lambda size: size == -1 or size > 0, "a group size", module
            ),
            scheme=read_activations(group.get("input_activations"), tensors),
            others=other_tensors(tensors, ("input_scale", "input_zero_point", "input_global_scale")),
        )

    def sized(self, in_features: int, out_features: int) -> PackQuantized:
        """Returns this format with the bits that the width of a row implies; the config must agree."""
        groups = self._groups(in_features)
        if not groups:
            raise FormatError(
                "A layer has no scales.",
                expected="at least one group",
                found=f"weight_scale {list(self.scale_shape)}",
                fix="Download the checkpoint again.",
            )
        is_grouped = groups > 1 or (self.group_size or -1) > 0
        if is_grouped and not self.has_g_idx:
            check_divides(in_features, self.group_size or in_features // groups or 1, "pack-quantized")
            if in_features != groups * (self.group_size or in_features // groups):
                raise FormatError(
                    "The scales of a layer contradict the config.",
                    expected=f"groups of {self.group_size or 'one size'}",
                    found=f"{groups} groups of {in_features} channels",
                    fix="Restore the original group_size in config_groups of config.json.",
                )
        candidates = [self.num_bits] if self.num_bits else list(range(1, 9))
        layouts = [(bits, True) for bits in candidates] + [(bits, False) for bits in candidates if 32 % bits]
        fitting = [(bits, way) for bits, way in layouts if self.width == _words(in_features, bits, way)]
        is_told = len({bits for bits, _ in fitting}) == 1 and (fitting[0][1] or self.is_symmetric)
        if is_told:
            bits, way = fitting[0]
            return dataclasses.replace(
                self, num_bits=bits, is_straddling=way, size=(out_features, in_features)
            )
        raise FormatError(
            "The quantized codes of a layer do not fit its input.",
            expected=f"{in_features} codes of "
            + (f"{self.num_bits} bits, as config.json says" if self.num_bits else "1 to 8 bits"),
            found=f"{self.width} words of 32 bits in a row",
            fix="Restore the original num_bits in config_groups of config.json.",
        )

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        groups = self._groups(in_features)
        scale = self.scale_shape if self.scale_shape in ((), (1,)) else (out_features, groups)
        specs = [
            TensorSpec(
                "weight_packed",
                ("I32",),
                (out_features, _words(in_features, self.num_bits, self.is_straddling)),
                "codes",
            ),
            TensorSpec("weight_scale", FLOATS, scale, "scale"),
            TensorSpec("weight_shape", ("I64", "I32"), (2,), "meta", optional=True),
        ]
        if not self.is_symmetric:
            zero = (-(-out_features * self.num_bits // 32), groups) if self.zero_dtype == "I32" else scale
            specs.append(TensorSpec("weight_zero_point", (self.zero_dtype,), zero, "zero_point"))
        if self.has_g_idx:
            specs.append(TensorSpec("weight_g_idx", ("I32",), (in_features,), "index", bound=groups))
        return (
            *specs,
            *other_specs(self.others),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "weight_packed"

    @property
    def row_multiple(self) -> int:
        return 1 if self.is_symmetric or self.zero_dtype != "I32" else 32

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        if self.size != (0, 0):
            return self.size
        out_features, in_features = tensors["weight_shape"].tolist()
        return out_features, in_features

    def describe(self) -> str:
        kind, order = "sym" if self.is_symmetric else "asym", " act-order" if self.has_g_idx else ""
        sharing = "group" if self._groups(0) > 1 else "channel"
        return f"pack-quantized int{self.num_bits or '?'} {sharing} {kind}{order}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> PackQuantized:
        check_finite(module, "weight_scale", tensors["weight_scale"])
        stored = tensors["weight_shape"].tolist() if "weight_shape" in tensors else list(self.size)
        if stored != list(self.size):
            raise FormatError(
                "The stored shape of a layer differs from its shape in the model. Nothing was loaded.",
                tensor=f"{module}.weight_shape",
                expected=list(self.size),
                found=stored,
                fix="Restore the original config.json of the checkpoint.",
            )
        if self.has_g_idx:
            check_index(module, "weight_g_idx", tensors["weight_g_idx"], self._groups(0))
        return self

    def resolve_stack(self, tensors: Mapping[str, torch.Tensor]) -> Format | None:
        common = with_common(tensors, "weight_shape")
        return None if common is None else super().resolve_stack(common)

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        (rows, in_features), stop = panel.shape, start + panel.shape[0]
        half = 1 << (self.num_bits - 1)
        unpack_rows(panel, tensors["weight_packed"][start:stop], self.num_bits, self.is_straddling, half)
        scale = rows_of(tensors["weight_scale"], start, stop)
        zero = self.zero_points(tensors, start, stop)
        if self.has_g_idx:
            group = tensors["weight_g_idx"].to(torch.int64)
            if zero is not None:
                panel.sub_(zero.expand(rows, -1).index_select(1, group))
            panel.mul_(scale.expand(rows, -1).index_select(1, group))
            return
        group_size = -(-in_features // scale.shape[1])
        if zero is not None:
            apply_groups(panel, torch.Tensor.sub_, zero, group_size)
        apply_groups(panel, torch.Tensor.mul_, scale, group_size)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out_features, in_features = weight.shape
        groups, half = self._groups(in_features), 1 << (self.num_bits - 1)
        if in_features % groups:
            raise FormatError(
                "The groups of a layer do not divide its input.",
                expected=f"a multiple of {groups} groups",
                found=f"{in_features} input channels",
                fix="Choose a group_size that divides the input.",
            )
        grouped = weight.detach().to(torch.float32).reshape(out_features, groups, -1)
        if self.is_symmetric:
            scale, zero = grouped.abs().amax(2) / (half - 0.5), torch.zeros(out_features, groups)
            scale = torch.where(scale == 0, 1, scale)
        else:
            low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
            scale = (high - low) / (2 * half - 1)
            scale = torch.where(scale == 0, 1, scale)
            zero = (-half - low / scale).round().clamp(-half, half - 1)
        codes = (
            (grouped / scale[:, :, None] + zero[:, :, None])
            .round()
            .clamp(-half, half - 1)
            .reshape(out_features, in_features)
        )
        pack = pack_stream if self.is_straddling else pack_words
        stored = {
            "weight_packed": pack((codes + half).to(torch.int32).t(), self.num_bits).t().contiguous(),
            "weight_scale": scale.reshape(
                self.scale_shape if self.scale_shape in ((), (1,)) else scale.shape
            ),
            "weight_shape": torch.tensor([out_features, in_features]),
        }
        if not self.is_symmetric:
            packed = pack_stream((zero + half).to(torch.int32), self.num_bits)
            stored["weight_zero_point"] = packed if self.zero_dtype == "I32" else zero.to(torch.int8)
        if self.has_g_idx:
            stored["weight_g_idx"] = torch.arange(in_features, dtype=torch.int32) // (in_features // groups)
        return stored

    def _groups(self, in_features: int) -> int:
        return self.scale_shape[1] if len(self.scale_shape) == 2 else 1

    def zero_points(self, tensors: Mapping[str, torch.Tensor], start: int, stop: int) -> torch.Tensor | None:
        """Returns the zero points of output rows [start, stop), float32 [rows, groups].

        Returns None if there are none.
        """
        if self.is_symmetric:
            return None
        stored = tensors["weight_zero_point"]
        if self.zero_dtype != "I32":
            return rows_of(stored, start, stop)
        first = start * self.num_bits // 32
        words = stored[first : -(-stop * self.num_bits // 32)]
        zeros = unpack_stream(words, self.num_bits, stop - first * 32 // self.num_bits)
        return (zeros - (1 << (self.num_bits - 1))).to(torch.float32)


def _words(in_features: int, num_bits: int, is_straddling: bool) -> int:
    return -(-in_features * num_bits // 32) if is_straddling else -(-in_features // (32 // num_bits))
