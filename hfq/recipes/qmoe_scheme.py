"""QMoE: three values for each row of a routed expert, in codes below one bit per weight.

A weight becomes the nearest of 0, the row's minimum, and its maximum, or the one of them that GPTQ chooses.
Other layers stay unquantized, as in the models of QMoE.

Source: Frantar and Alistarh 2023, arXiv 2310.16795.
"""

from __future__ import annotations

import dataclasses

from hfq.formats.qmoe import DICTIONARY, Qmoe
from hfq.recipes.scheme import Scheme

__all__ = ["QMOE", "QMOE_GPTQ"]

QMOE = Scheme(
    "QMoE: three values per row of routed experts, in codes of a dictionary; other layers stay unquantized",
    (2,),
    False,
    (1, 1),
    lambda _: Qmoe(),
    None,
    {"quant_method": "qmoe", "dictionary": DICTIONARY},
    is_for_experts=True,
)

QMOE_GPTQ = dataclasses.replace(
    QMOE,
    description="QMoE with the values that GPTQ chooses by the activations' second moments",
    measures=True,
)
