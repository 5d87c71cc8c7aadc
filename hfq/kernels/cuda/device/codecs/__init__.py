"""Codecs: how the codes of whole words become floats.

A codec is one function, `decode(words, table, p, LAYOUT)`: the float of code `p` of a unit of words, which is
a constant. A format with codes of a new kind adds a module and an entry here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hfq.kernels.cuda.device.codecs import fp4, fp6, fp8, integers, lookup, planes

__all__ = ["CODECS", "Codec"]


@dataclass(frozen=True)
class Codec:
    """Functions that decode the codes of words.

    Attributes:
        decode: See the package's docstring.
        exponent: The power of two that decoded values lack.
        invalid: words → bits that are not zero where a code is not finite; None if all codes are finite.
    """

    decode: Any
    exponent: int = 0
    invalid: Any = None


CODECS = {
    "integers": Codec(integers.decode),
    "planes": Codec(planes.decode),
    "e4m3": Codec(fp8.decode_e4m3, 120, fp8.invalid_e4m3),
    "e5m2": Codec(fp8.decode_e5m2),
    "fp4": Codec(fp4.decode, 126),
    "fp4_twice": Codec(fp4.decode, 127),
    "e3m2": Codec(fp6.decode_e3m2, 124),
    "e2m3": Codec(fp6.decode_e2m3, 126),
    "table": Codec(lookup.decode),
}
