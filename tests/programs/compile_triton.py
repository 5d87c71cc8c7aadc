"""Compiles Triton kernels for GPUs that are not there, down to machine code.

Prints a line for each kernel: ((format, architecture, kernel), counts). With `blocks`, formats are all types
of ggml's blocks that the kernels read.
"""

import sys

from benchmarks.gpu.compile_table import FORMATS, compile_variant
from hfq.formats.gguf.block_rows import Gguf
from hfq.tensor_spec import Blocks, StoredOrder

VARIANTS = [
    *((name, 90, 1) for name in FORMATS),
    *((name, 90, 16) for name in FORMATS),
    ("gptq4", 86, 64),
    ("nf4", 86, 16),
    ("mxfp4", 80, 16),
    ("fp8", 120, 16),
    ("int4 in rows", 120, 64),
    ("mxfp4", "gfx942", 16),
]
OF_EXPERTS = [("int4 in rows", 90, 1), ("nf4", 90, 1), ("awq", 90, 1), ("mxfp4", 90, 16), ("awq", 90, 16)]
BLOCKS = ("Q4_0", "Q4_1", "Q8_0", "IQ4_NL", "MXFP4", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


def main() -> None:
    if "blocks" in sys.argv:
        rows = StoredOrder(0, 32, 2, 64, 1)
        FORMATS.update({name: Gguf(Blocks(name, is_layer=True)) for name in BLOCKS})
        FORMATS["Q4_K, rows in another order"] = Gguf(Blocks("Q4_K", is_layer=True, rows=rows))
        variants = [
            (name, 90, count) for name in (*BLOCKS, "Q4_K, rows in another order") for count in (1, 16)
        ]
        found = [(variant, compile_variant(variant)) for variant in variants]
    else:
        found = [(variant, compile_variant(variant)) for variant in VARIANTS]
        found += [(variant, compile_variant(variant, experts=4)) for variant in OF_EXPERTS]
    for variant, records in found:
        for counts in records:
            print(((*variant[:2], counts["kernel"]), counts))


if __name__ == "__main__":
    main()
