"""What a method that rounds to nearest writes: a format, and a config group of compressed-tensors that tells
readers of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hfq.formats.base import Format

__all__ = ["Scheme", "absmax_codes", "group_config"]


@dataclass(frozen=True)
class Scheme:
    """One method.

    Attributes:
        description: What it does, in a few words.
        bits: The bits that it takes; the first where none are asked for.
        has_bits: Whether `bits` may be chosen.
        multiple: What must divide the (output, input) size of a layer.
        make: The format of so many bits.
        group: The config group of so many bits, without its targets.
    """

    description: str
    bits: tuple[int, ...]
    has_bits: bool
    multiple: tuple[int, int]
    make: Callable[[int], Format]
    group: Callable[[int], Mapping[str, Any]]

    @property
    def options(self) -> tuple[str, ...]:
        """The options of a recipe that mean something here."""
        return ("bits",) if self.has_bits else ()

    def quantization_config(self, num_bits: int, dense: Iterable[str]) -> dict[str, Any]:
        """What config.json says of a model whose linear layers are packed, but for those in `dense`."""
        return group_config(self.group(num_bits), dense)


def group_config(group: Mapping[str, Any], dense: Iterable[str]) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with one group for all linear layers.

    Args:
        group: Its `weights`, its `format`, and its `input_activations` if any.
        dense: The names of linear layers that stay floats.
    """
    return {
        "quant_method": "compressed-tensors",
        "format": group["format"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
        "ignore": sorted(dense),
    }


def absmax_codes(weight: torch.Tensor, num_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row-wise absmax quantization: codes of at most 2^(b-1) - 1 in magnitude, the scale of a row rounded to
    bfloat16 first.

    Args:
        weight: float32 [out, in].
        num_bits: b.

    Returns:
        The codes, float32 [out, in], and the scales, bfloat16 [out, 1].
    """
    top = (1 << (num_bits - 1)) - 1
    scale = weight.abs().amax(1, keepdim=True) / top
    scale = torch.where(scale == 0, 1, scale).to(torch.bfloat16)
    return (weight / scale.to(torch.float32)).round_().clamp_(-top, top), scale
