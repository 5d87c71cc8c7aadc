"""Further dialects that a float model is rounded into, one file each: what `HfqConfig(method=…)` may name beside GPTQ and FP8."""

from __future__ import annotations

from hfq.formats.outputs.base import Output
from hfq.formats.outputs.glm import GLM
from hfq.formats.outputs.int8 import W8A8, W8A16
from hfq.formats.outputs.mxfp4 import MXFP4

__all__ = ["OUTPUTS", "Output"]

OUTPUTS: dict[str, Output] = {"mxfp4": MXFP4, "w8a8": W8A8, "w8a16": W8A16, "glm": GLM}
"""By the name of the method."""
