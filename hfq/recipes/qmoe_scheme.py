"""QMoE: three values for each row of a routed expert, in codes below one bit per weight.

A weight becomes the nearest of 0, the row's minimum, and its maximum. Other layers stay unquantized, as in
the models of QMoE.

Source: Frantar and Alistarh 2023, arXiv 2310.16795. They choose the values by GPTQ, which leaves more zeros.
"""

from __future__ import annotations

from hfq.formats.qmoe import DICTIONARY, Qmoe
from hfq.recipes.scheme import Scheme

__all__ = ["QMOE"]

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
