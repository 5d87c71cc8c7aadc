"""FP4 E2M1 codes, two per byte, as in NVFP4, MXFP4, and gpt-oss.

The even channel is in the low nibble.

    W[n, k] = e2m1(code[n, k]) * multiplier[n, k // group_size]

Format: OCP Microscaling Formats 1.0 for E2M1 and E8M0.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from hfq.formats.base import FLOATS, ActivationScheme, Format
from hfq.formats.codecs.constants import constant
from hfq.formats.codecs.groups import apply_groups, check_divides
from hfq.formats.codecs.nibbles import look_up_nibbles
from hfq.formats.layouts.scaled import Others, other_specs
from hfq.tensor_spec import TensorSpec

__all__ = ["E2M1", "OTHERS", "Fp4Format", "powers", "store_powers"]

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
"""The value of each 4-bit code."""

OTHERS = ("input_scale", "input_global_scale", "output_scale")


@dataclass(frozen=True)
class Fp4Format(Format):
    """Base class of the FP4 formats, which define their own tensor names.

    Attributes:
        scale_name: The local name of the scales of groups.
        scheme: The activation quantization that the checkpoint requests.
        others: Tensors that are saved unchanged and that no weight depends on: (name, dtype, shape).
    """

    num_bits: ClassVar[int] = 4
    scale_name: ClassVar[str] = "weight_scale"
    scheme: ActivationScheme | None = None
    others: Others = ()

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        out_features, *others = tensors[self.codes_name].shape
        return out_features, 2 * math.prod(others)

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        stop = start + panel.shape[0]
        packed = tensors[self.codes_name][start:stop].flatten(1)
        look_up_nibbles(panel, packed, constant(self.values, panel.device))
        apply_groups(panel, torch.Tensor.mul_, self._multiplier(tensors, start, stop), self._span)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        out_features, in_features = weight.shape
        check_divides(in_features, self._span, self.name)
        grouped = weight.detach().to(torch.float32).unflatten(1, (-1, self._span))
        stored = self._quantize_scales(grouped.abs().amax(2))
        steps = self._multiplier(stored, 0, out_features)
        scaled = (grouped / torch.where(steps == 0, 1, steps)[:, :, None]).flatten(1)
        values = self.values[:8]
        bounds = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(values)])
        codes = torch.bucketize(scaled.abs(), bounds, out_int32=True).add_(scaled < 0, alpha=8)
        packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
        return {self.codes_name: self._shape_codes(packed), **stored}

    @property
    def values(self) -> tuple[float, ...]:
        """The value of each 4-bit code."""
        return E2M1

    @property
    def _span(self) -> int:
        """The number of channels that share a scale."""
        return getattr(self, "group_size", 32)

    def _shape_codes(self, packed: torch.Tensor) -> torch.Tensor:
        return packed

    def _other_specs(self, out_features: int) -> tuple[TensorSpec, ...]:
        return (*other_specs(self.others), TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True))

    @abstractmethod
    def _multiplier(self, tensors: Mapping[str, torch.Tensor], start: int, stop: int) -> torch.Tensor:
        """Returns the multiplier of each group of output rows [start, stop): float32 [rows, groups]."""

    @abstractmethod
    def _quantize_scales(self, amax: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the stored scales for groups with these amplitudes, float32 [rows, groups]."""


def powers(scale: torch.Tensor) -> torch.Tensor:
    """Returns powers of two stored as E8M0 in float32; 255 is NaN."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).to(torch.float32)


def store_powers(amax: torch.Tensor, emax: int = 2) -> torch.Tensor:
    """Returns the shared exponents of MX groups as U8.

    The exponent is floor(log2(amax)) minus the largest exponent of a code (OCP MX 1.0, 6.3).
    """
    exponent = torch.floor(torch.log2(amax.clamp(min=2.0**-120))) - emax
    return (exponent + 127).clamp(0, 254).to(torch.uint8)
