"""Weight-only quantization of GLM-130B in INT4 or INT8.

Weights are symmetric, with a scale from the largest magnitude of each output row:

    W[n, k] = code[n, k] * scale[n]    scale[n] = max_k |W[n, k]| / (2^(b-1) - 1)

Source: Zeng et al. 2023, arXiv 2210.02414, section 3.3. Written as compressed-tensors' pack-quantized by
channel, with bfloat16 scales. No other library reads the file format of GLM-130B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hfq.formats.codecs.bit_packing import pack_stream
from hfq.formats.compressed_tensors import PackQuantized
from hfq.recipes.scheme import Scheme, absmax_codes

__all__ = ["W4A16", "PackedRows", "channel_weights", "packed_group"]


@dataclass(frozen=True)
class PackedRows(PackQuantized):
    """pack-quantized by channel, with absmax rounding; its files are read as `PackQuantized`."""

    scale_shape: tuple[int, ...] = (0, 1)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, scale = absmax_codes(weight.detach().to(torch.float32), self.num_bits)
        codes += 1 << (self.num_bits - 1)
        packed = pack_stream(codes.to(torch.int32).t(), self.num_bits).t().contiguous()
        return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def channel_weights(num_bits: int) -> dict[str, Any]:
    """Returns the weights of a config group: symmetric integers, one scale per output channel."""
    return {
        "num_bits": num_bits,
        "type": "int",
        "strategy": "channel",
        "symmetric": True,
        "dynamic": False,
    }


def packed_group(num_bits: int) -> dict[str, Any]:
    """Returns the config group of weights packed by channel, with unquantized activations."""
    return {"weights": channel_weights(num_bits), "format": "pack-quantized"}


W4A16 = Scheme(
    "GLM-130B's recipe: 4 bits, absmax by row, unquantized activations, written as compressed-tensors "
    "(pack-quantized)",
    (4,),
    False,
    (32, 32),
    lambda bits: PackedRows(num_bits=bits),
    packed_group,
)
