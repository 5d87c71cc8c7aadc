"""The schemes of methods whose format has no options but `bits`."""

from __future__ import annotations

from hfq.recipes.int8_schemes import W8A8, W8A16
from hfq.recipes.mxfp4_scheme import MXFP4
from hfq.recipes.qmoe_scheme import QMOE, QMOE_GPTQ
from hfq.recipes.scheme import Scheme
from hfq.recipes.w4a16 import W4A16

__all__ = ["SCHEMES", "Scheme"]

SCHEMES: dict[str, Scheme] = {
    "mxfp4": MXFP4,
    "w8a8": W8A8,
    "w8a16": W8A16,
    "w4a16": W4A16,
    "qmoe": QMOE,
    "qmoe-gptq": QMOE_GPTQ,
}
"""Schemes by the name of the method in `Recipe`."""
