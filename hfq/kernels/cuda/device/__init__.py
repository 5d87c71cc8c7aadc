"""Device code of the Triton kernels, imported only if Triton is installed.

Triton's interpreter computes wrong products of bfloat16, truncates where it should round to bfloat16, and
reports neither (triton-lang/triton#4972, #11584). Kernels therefore receive the dtype of their factors, which
is float32 in the interpreter, and round to bfloat16 by integers there. With numpy 2.4 the interpreter cannot
loop to a bound that is not a constant, so all bounds are constants.
"""

from hfq.kernels.cuda.device.across import few_across, some_across
from hfq.kernels.cuda.device.along import few, prepare, some
from hfq.kernels.cuda.device.codecs import CODECS
from hfq.kernels.cuda.device.expand import expand
from hfq.kernels.cuda.device.experts import (
    combine,
    few_across_of_expert,
    few_of_expert,
    some_across_of_expert,
    some_of_expert,
)
from hfq.kernels.cuda.device.rounding import round_e4m3

__all__ = [
    "CODECS",
    "combine",
    "expand",
    "few",
    "few_across",
    "few_across_of_expert",
    "few_of_expert",
    "prepare",
    "round_e4m3",
    "some",
    "some_across",
    "some_across_of_expert",
    "some_of_expert",
]
