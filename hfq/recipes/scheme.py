"""Schemes of methods: a format and a group of a config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hfq.formats.base import Format

__all__ = ["Scheme", "absmax_codes", "group_config"]


@dataclass(frozen=True)
class Scheme:
    """The scheme of one method.

    Attributes:
        description: A short description of the method.
        bits: The supported bits; the first is the default.
        has_bits: True if users can choose `bits`.
        multiple: The required divisors of a layer's (output, input) size.
        make: Returns the format for a number of bits.
        group: Returns the config group for a number of bits, without its targets; None if `config` is given.
        config: The whole config of a format that is not of compressed-tensors.
        is_for_experts: True if all layers but routed experts stay unquantized.
        measures: True if GPTQ chooses the codes.
    """

    description: str
    bits: tuple[int, ...]
    has_bits: bool
    multiple: tuple[int, int]
    make: Callable[[int], Format]
    group: Callable[[int], Mapping[str, Any]] | None
    config: Mapping[str, Any] | None = None
    is_for_experts: bool = False
    measures: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """The options of a recipe that the method uses."""
        return (*(("bits",) if self.has_bits else ()), *(("damp_percent",) if self.measures else ()))

    def quantization_config(self, num_bits: int, dense: Iterable[str]) -> dict[str, Any]:
        """Returns the config of a model with all linear layers quantized, except those in `dense`."""
        return dict(self.config or {}) if self.group is None else group_config(self.group(num_bits), dense)


def group_config(group: Mapping[str, Any], dense: Iterable[str]) -> dict[str, Any]:
    """Returns a config of compressed-tensors with one group for all linear layers.

    Args:
        group: The group's `weights`, `format`, and, if activations are quantized, `input_activations`.
        dense: The names of linear layers that stay unquantized.
    """
    return {
        "quant_method": "compressed-tensors",
        "format": group["format"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        "ignore": sorted(dense),
    }


def absmax_codes(weight: torch.Tensor, num_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes each row by its largest magnitude (absmax).

    Codes have a magnitude of at most 2^(b-1) - 1. The scale of a row is rounded to bfloat16 first.

    Args:
        weight: float32 [out, in].
        num_bits: The bits b of a code.

    Returns:
        The codes, float32 [out, in], and the scales, bfloat16 [out, 1].
    """
    top = (1 << (num_bits - 1)) - 1
    scale = weight.abs().amax(1, keepdim=True) / top
    scale = torch.where(scale == 0, 1, scale).to(torch.bfloat16)
    return (weight / scale.to(torch.float32)).round_().clamp_(-top, top), scale
