"""Affine codes of MLX (mlx-lm), which `MetalConfig` of transformers also writes.

    <m>.weight U32 [out, in * bits / 32]
        the codes of a row in sequence, from the lowest bit of its first word on
    <m>.scales, <m>.biases [out, in / g]
        floats of one dtype; `qbiases` in files of transformers
    W[n, k] = codes[n, k] * scales[n, k // g] + biases[n, k // g]

config.json stores `bits` and `group_size` of all layers under `quantization`. Entries for single layers are
there under the layer's name. The shapes also determine both values, and they decide. MLX dequantizes float16
and bfloat16 with a rounded product and a rounded sum. hfq computes both in float32.

Format: `mlx.core.quantize` with mode "affine"; transformers' `MetalLinear`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, Format, FormatVariant, bounded_int
from hfq.formats.codecs.bit_packing import pack_stream, unpack_rows
from hfq.formats.codecs.groups import apply_groups, check_divides
from hfq.formats.codecs.value_checks import check_finite
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["Mlx", "MlxWords", "layer_options"]

_EXPERT = re.compile(r"\.experts\.\d+\.")
_BITS = (1, 2, 3, 4, 5, 6, 8)


class MlxWords(Format):
    """Base class of MLX's modes, in which words hold the codes of a row in sequence."""

    @property
    def codes_name(self) -> str:
        return "weight"

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        out_features, words = tensors["weight"].shape
        return out_features, int(words * 32 // self.bits_per_code)

    def _specs(self, in_features: int, out_features: int, *scales: TensorSpec) -> tuple[TensorSpec, ...]:
        words = int(in_features * self.bits_per_code // 32)
        bias = TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True)
        return TensorSpec("weight", ("U32",), (out_features, words), "codes"), *scales, bias


@dataclass(frozen=True)
class Mlx(MlxWords):
    """Affine codes with the parameters of one module; see the module docstring.

    Attributes:
        num_bits: The bits of a code; 0 if they are not known yet.
        group_size: Channels of a group; 0 if it is not known yet.
        words: Words of a row.
        groups: Groups of a row; -1 if no scales are stored.
        biases_name: `biases` or `qbiases`.
    """

    name = "mlx"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "MLX affine (8, 6, 5, 4, 3, 2, 1 bits)",
            "mlx-lm, transformers (metal)",
            "weight U32, scales, biases or qbiases",
            ("mlx-4bit", "mlx-6bit", "mlx-8bit", "mlx-3bit-metal"),
            ("mlx-4bit-g64", "mlx-3bit-g32"),
        ),
    )
    num_bits: int = 4
    group_size: int = 64
    words: int = 0
    groups: int = 0
    biases_name: str = "biases"

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Mlx | None:
        weight, scales = tensors.get("weight"), tensors.get("scales")
        options = layer_options(module, config)
        if (
            weight is None
            or weight.dtype != "U32"
            or len(weight.shape) != 2
            or options.get("mode") not in (None, "affine")
        ):
            return None
        is_metal = "qbiases" in tensors or ("biases" not in tensors and config.get("quant_method") == "metal")
        return cls(
            num_bits=bounded_int(
                options, "bits", lambda bits: bits in _BITS, f"one of {_BITS}", module, default=0
            )
            or 0,
            group_size=bounded_int(
                options, "group_size", lambda size: 0 < size < 1 << 24, "a size", module, default=0
            )
            or 0,
            words=weight.shape[1],
            groups=scales.shape[-1] if scales is not None and scales.shape else -1,
            biases_name="qbiases" if is_metal else "biases",
        )

    def sized(self, in_features: int, out_features: int) -> Mlx:
        bits = next((bits for bits in _BITS if self.words * 32 == in_features * bits), 0)
        groups = self.groups if self.groups >= 0 else in_features // (self.group_size or in_features)
        size = in_features // groups if groups and in_features % groups == 0 else 0
        if not bits or not size or self.num_bits not in (0, bits) or self.group_size not in (0, size):
            raise FormatError(
                "The quantized codes of a layer do not fit its input, or contradict the config.",
                expected=f"{in_features} codes of {self.num_bits or 'some'} bits, in groups of "
                f"{self.group_size or 'one size'}",
                found=f"{self.words} words of 32 bits and {self.groups} groups in a row",
                fix="Restore the original config.json of the checkpoint.",
            )
        return dataclasses.replace(self, num_bits=bits, group_size=size)

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        check_divides(in_features, self.group_size, "MLX")
        size = out_features, in_features // self.group_size
        scales = TensorSpec("scales", FLOATS, size, "scale")
        biases = TensorSpec(self.biases_name, FLOATS, size, "zero_point")
        return self._specs(in_features, out_features, scales, biases)

    def describe(self) -> str:
        return f"mlx int{self.num_bits or '?'} g{self.group_size or '?'}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Mlx:
        check_finite(module, "scales", tensors["scales"])
        check_finite(module, self.biases_name, tensors[self.biases_name])
        return self

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        rows = slice(start, start + panel.shape[0])
        unpack_rows(
            panel, tensors["weight"][rows].view(torch.int32), self.num_bits, is_straddling=True, offset=0
        )
        apply_groups(panel, torch.Tensor.mul_, tensors["scales"][rows].to(torch.float32), self.group_size)
        apply_groups(
            panel, torch.Tensor.add_, tensors[self.biases_name][rows].to(torch.float32), self.group_size
        )

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        check_divides(weight.shape[1], self.group_size, "MLX")
        check_divides(weight.shape[1] * self.num_bits, 32, "MLX", "a word")
        grouped = weight.detach().to(torch.float32).unflatten(1, (-1, self.group_size))
        low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
        top = (1 << self.num_bits) - 1
        scale = torch.where(high == low, 1, (high - low) / top).to(weight.dtype)
        bias = low.to(weight.dtype)
        codes = ((grouped - bias.float()) / scale.float()).round().clamp(0, top).to(torch.int32).flatten(1)
        words = pack_stream(codes.t(), self.num_bits).t().contiguous().view(torch.uint32)
        return {"weight": words, "scales": scale[:, :, 0], self.biases_name: bias[:, :, 0]}


def layer_options(module: str, config: Mapping) -> Mapping:
    """Returns the config's options for one layer.

    They are the layer's entry, the common entry of the experts of a layer, or the options of all layers.
    """
    names = (module, *(_EXPERT.sub(rf".{name}.", module) for name in ("experts", "switch_mlp")))
    return next((config[name] for name in names if isinstance(config.get(name), Mapping)), config)
