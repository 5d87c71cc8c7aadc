"""Types of the tensors in GGUF files, as ggml numbers them.

Source: `ggml.h` and `ggml-common.h` of ggml (MIT).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BLOCK_TYPES", "UNREADABLE_TYPES", "BlockType", "block_type"]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensor: a number type, or blocks of codes with their scales.

    Attributes:
        name: The name in ggml.
        size: Elements of a block; 1 for a number type.
        nbytes: Bytes of a block.
        dtype: The safetensors name of a number type; `U8` for blocks, which are stored as bytes.
    """

    name: str
    size: int
    nbytes: int
    dtype: str = "U8"

    @property
    def bits(self) -> float:
        """Bits of an element, including its share of the scales."""
        return self.nbytes * 8 / self.size


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, "F32"),
    1: BlockType("F16", 1, 2, "F16"),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1, "I8"),
    25: BlockType("I16", 1, 2, "I16"),
    26: BlockType("I32", 1, 4, "I32"),
    27: BlockType("I64", 1, 8, "I64"),
    28: BlockType("F64", 1, 8, "F64"),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2, "BF16"),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
    42: BlockType("Q2_0", 64, 18),
}
"""The types that hfq reads, by number."""

UNREADABLE_TYPES = {
    4: "Q4_2, which ggml has removed",
    5: "Q4_3, which ggml has removed",
    9: "Q8_1, which ggml uses for activations",
    15: "Q8_K, which ggml uses for activations",
    31: "Q4_0_4_4, which ggml has removed",
    32: "Q4_0_4_8, which ggml has removed",
    33: "Q4_0_8_8, which ggml has removed",
    36: "IQ4_NL_4_4, which ggml has removed",
    37: "IQ4_NL_4_8, which ggml has removed",
    38: "IQ4_NL_8_8, which ggml has removed",
}
"""The types that no file of a model has, by number."""

_BY_NAME = {found.name: found for found in BLOCK_TYPES.values()}


def block_type(name: str) -> BlockType:
    """Returns the type of a name."""
    return _BY_NAME[name]
