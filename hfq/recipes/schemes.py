"""Further dialects that a float model is rounded into, one file each: what `HfqConfig(method=…)` may name beside GPTQ and FP8."""

from __future__ import annotations

from hfq.recipes.int8_schemes import W8A8, W8A16
from hfq.recipes.mxfp4_scheme import MXFP4
from hfq.recipes.scheme import Output
from hfq.recipes.w4a16 import GLM

__all__ = ["OUTPUTS", "Output"]

OUTPUTS: dict[str, Output] = {"mxfp4": MXFP4, "w8a8": W8A8, "w8a16": W8A16, "glm": GLM}
"""By the name of the method."""
