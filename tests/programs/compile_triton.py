"""Compiles Triton kernels for GPUs that are not there, down to machine code.

Prints a line for each kernel: ((format, architecture, kernel), counts).
"""

from benchmarks.gpu.compile_table import FORMATS, compile_variant

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


def main() -> None:
    found = [(variant, compile_variant(variant)) for variant in VARIANTS]
    found += [(variant, compile_variant(variant, experts=4)) for variant in OF_EXPERTS]
    for variant, records in found:
        for counts in records:
            print(((*variant[:2], counts["kernel"]), counts))


if __name__ == "__main__":
    main()
