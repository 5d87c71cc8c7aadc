"""INT8 schemes W8A8 and W8A16, in the formats of llmcompressor.

Weights are symmetric, with a scale from the largest magnitude of each output row. W8A8 is compressed-tensors'
int-quantized: readers that have the kernels also round each token's activations to INT8. W8A16 is
pack-quantized with 8 bits, and its activations stay floats.

Source: Dettmers et al. 2022, arXiv 2208.07339, section 2 (absmax, vector-wise).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hfq.formats.base import ActivationScheme
from hfq.formats.compressed_tensors import IntQuantized
from hfq.recipes.scheme import Scheme, absmax_codes
from hfq.recipes.w4a16 import PackedRows, channel_weights, packed_group

__all__ = ["W8A8", "W8A16"]


@dataclass(frozen=True)
class Int8Rows(IntQuantized):
    """int-quantized by channel, with absmax rounding; its files are read as `IntQuantized`."""

    scale_shape: tuple[int, ...] = (0, 1)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scale = absmax_codes(weight.detach().to(torch.float32), 8)
        return {"weight": codes.to(torch.int8), "weight_scale": scale}


def _group(num_bits: int) -> dict[str, Any]:
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    return {"weights": channel_weights(num_bits), "input_activations": activations, "format": "int-quantized"}


W8A8 = Scheme(
    "INT8 weights by channel, activations by token if the reader rounds them, written as "
    "compressed-tensors (int-quantized)",
    (8,),
    False,
    (1, 1),
    lambda _: Int8Rows(scheme=ActivationScheme("token", dtype="int8")),
    _group,
)
W8A16 = Scheme(
    "INT8 weights by channel, unquantized activations, written as compressed-tensors (pack-quantized)",
    (8,),
    False,
    (1, 4),
    lambda _: PackedRows(num_bits=8),
    packed_group,
)
