"""Names of methods and weights in the records and tables of the kernel benchmark."""

__all__ = [
    "DENSE",
    "HALF",
    "HALVES",
    "IN_TURN",
    "OF_HALVES",
    "READ",
    "READ_IN_TURN",
    "ROUNDED",
    "SAME",
    "WIDE",
]

ROUNDED = "int8 channel, W8A8"
"""Weights whose kernel also rounds activations."""

READ = "read"
"""A plain read of memory."""

DENSE = "bf16 F.linear"
WIDE = "f32 F.linear"
HALF = "f16 F.linear"

IN_TURN = "cpp, layer after layer"
"""One row times layers that are not in the caches, without other work in between."""

READ_IN_TURN = ("fp8 128x128", "gptq4 g128")
"""Weights of those layers."""

SAME = "plain read of the same bytes"
"""A plain read of those layers."""

OF_HALVES = "cpp, of float16"
"""Products with float16 activations."""

HALVES = ("fp8 128x128", "gptq4 g128", "awq g128")
"""Weights of those products."""
