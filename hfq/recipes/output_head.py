"""Formats to which an output head is rounded while it is loaded.

Each has one scale per output channel, in bfloat16, from the largest magnitude of the channel.
"""

from __future__ import annotations

from hfq.formats.base import Format
from hfq.formats.fp8 import Fp8
from hfq.recipes.int8_schemes import Int8Rows

__all__ = ["OUTPUT_HEAD_FORMATS"]

OUTPUT_HEAD_FORMATS: dict[str, Format] = {
    "fp8": Fp8(strategy="channel", scale_dtype="BF16"),
    "int8": Int8Rows(),
}
"""Formats by the value of `HfqConfig.quantize_output_head`."""
