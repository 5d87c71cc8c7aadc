"""MXFP6 of AMD Quark: codes of 6 bits with power-of-two scales (E8M0) of 32 channels.

    weight U8 [out, in * 3 / 4], weight_scale U8 [out, in / 32]
    W[n, k] = code[n, k] * 2**(weight_scale[n, k // 32] - 127)

Four codes fill three bytes, the first in the lowest bits. A code is E3M2, with a bias of 3, or E2M3, with a
bias of 1. Neither has infinity or NaN.

Format: Quark's `Pack_fp6`, OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.formats.base import FLOATS, ActivationScheme, Format, FormatVariant
from hfq.formats.codecs.constants import constant
from hfq.formats.codecs.groups import apply_groups, check_divides
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.configs.quark_config import float_codes, read_inputs
from hfq.formats.layouts.fp4 import powers, store_powers
from hfq.formats.layouts.scaled import Others, other_specs, other_tensors
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["Mxfp6"]


def _values(mantissa_bits: int) -> tuple[float, ...]:
    """Returns the value of each code, with this number of bits in its mantissa."""
    ones, bias = 1 << mantissa_bits, 2 ** (4 - mantissa_bits) - 1
    magnitudes = [
        (code if code < ones else code % ones + ones) / ones * 2.0 ** (max(code // ones, 1) - bias)
        for code in range(32)
    ]
    return (*magnitudes, *(-value for value in magnitudes))


_VALUES = {bits: _values(bits) for bits in (2, 3)}


@dataclass(frozen=True)
class Mxfp6(Format):
    """MXFP6 of Quark; see the module docstring.

    Attributes:
        mantissa_bits: 2 (E3M2) or 3 (E2M3).
        scheme: The activation quantization that the checkpoint requests.
        others: Tensors that are saved unchanged and that no weight depends on: (name, dtype, shape).
    """

    name = "mxfp6"
    resolves_each_value = True
    variants = (
        FormatVariant(
            "MXFP6 (Quark mxfp6_e3m2, mxfp6_e2m3)",
            "amd-quark",
            "weight U8, weight_scale U8",
            ("mxfp6-e3m2", "mxfp6-e2m3"),
            ("quark-mxfp6-e3m2", "quark-mxfp6-e2m3"),
        ),
    )
    num_bits = 6
    mantissa_bits: int = 2
    scheme: ActivationScheme | None = None
    others: Others = ()

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Mxfp6 | None:
        codes = tensors.get("weight")
        if codes is None or codes.dtype != "U8" or len(codes.shape) != 2:
            return None
        kind = float_codes(module, config)
        if kind not in ("fp6_e3m2 e8m0", "fp6_e2m3 e8m0"):
            return None
        return cls(
            mantissa_bits=int(kind[7]),
            scheme=read_inputs(module, config),
            others=other_tensors(tensors, ("input_scale", "output_scale")),
        )

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        check_divides(in_features, 32, "MXFP6")
        return (
            TensorSpec("weight", ("U8",), (out_features, in_features // 4 * 3), "codes"),
            TensorSpec("weight_scale", ("U8",), (out_features, in_features // 32), "scale"),
            *other_specs(self.others),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "weight"

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        out_features, nbytes = tensors["weight"].shape
        return out_features, nbytes // 3 * 4

    def describe(self) -> str:
        return f"mxfp6 e{5 - self.mantissa_bits}m{self.mantissa_bits}"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Mxfp6:
        check_finite(module, "weight_scale", powers(tensors["weight_scale"]))
        return self

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        stop = start + panel.shape[0]
        first, second, third = tensors["weight"][start:stop].unflatten(1, (-1, 3)).to(torch.int32).unbind(2)
        word = first | second << 8 | third << 16
        values, four = constant(_VALUES[self.mantissa_bits], panel.device), panel.unflatten(1, (-1, 4))
        for place in range(4):
            four[:, :, place] = values[word >> 6 * place & 63]
        apply_groups(panel, torch.Tensor.mul_, powers(tensors["weight_scale"][start:stop]), 32)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        check_divides(weight.shape[1], 32, "MXFP6")
        grouped = weight.detach().to(torch.float32).unflatten(1, (-1, 32))
        scale = store_powers(grouped.abs().amax(2), emax=4 if self.mantissa_bits == 2 else 2)
        scaled = (grouped / powers(scale)[:, :, None]).flatten(1)
        values = torch.tensor(_VALUES[self.mantissa_bits][:32])
        codes = torch.bucketize(scaled.abs(), (values[1:] + values[:-1]) / 2, out_int32=True)
        four = codes.add_(scaled < 0, alpha=32).unflatten(1, (-1, 4))
        word = four[:, :, 0] | four[:, :, 1] << 6 | four[:, :, 2] << 12 | four[:, :, 3] << 18
        packed = torch.stack([word & 255, word >> 8 & 255, word >> 16], 2).flatten(1).to(torch.uint8)
        return {"weight": packed, "weight_scale": scale}
