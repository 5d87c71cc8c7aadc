"""int8 with a scale for each block, as SGLang reads it (quant_method blockwise_int8).

    weight I8 [out, in], weight_scale_inv [ceil(out / b0), ceil(in / b1)]
    W[n, k] = weight[n, k] * weight_scale_inv[n // b0, k // b1]

The config states (b0, b1) as `weight_block_size`. Blocks at the ends of a weight may be smaller. The scale is
a multiplier in spite of its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hfq.formats.base import ActivationScheme, FormatVariant
from hfq.formats.configs.compressed_tensors_config import read_block, unusable
from hfq.formats.layouts.scaled import ScaledCodes
from hfq.tensor_spec import TensorInfo

__all__ = ["BlockwiseInt8"]


@dataclass(frozen=True)
class BlockwiseInt8(ScaledCodes):
    """int8 with a scale for each block; see the module docstring."""

    name = "blockwise-int8"
    codes, scale = "weight", "weight_scale_inv"
    variants = (
        FormatVariant(
            "blockwise_int8",
            "SGLang",
            "weight I8, weight_scale_inv",
            ("blockwise-int8", "blockwise-int8-ragged"),
        ),
    )
    scheme: ActivationScheme | None = None

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> BlockwiseInt8 | None:
        weight = tensors.get("weight")
        if config.get("quant_method") != "blockwise_int8" or weight is None or weight.dtype != "I8":
            return None
        block = read_block(config.get("weight_block_size"), "weight_block_size")
        if block is None:
            raise unusable("weight_block_size", None, "two positive sizes, such as [128, 128]")
        return cls(
            block=block, scheme=ActivationScheme("group", group_size=block[1], dtype="int8 of each group")
        )
