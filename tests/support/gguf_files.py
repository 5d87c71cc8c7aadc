"""GGUF files with any content, valid or not."""

import hashlib
import math
import struct

import numpy as np

from hfq.checkpoint.gguf.block_types import BLOCK_TYPES, block_type

__all__ = [
    "IDS",
    "U32",
    "STRING",
    "ARRAY",
    "entry",
    "exact_blocks",
    "key",
    "nbytes_of",
    "pack",
    "random_blocks",
    "write_gguf",
]

IDS = {found.name: number for number, found in BLOCK_TYPES.items()}
"""ggml's number of each type."""

U32, STRING, ARRAY = 4, 8, 9
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


def text(value):
    """Returns a string as GGUF stores it."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(kind, value):
    """Returns a value as GGUF stores it; an array is (type of its elements, elements)."""
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(value_bytes(inner, item) for item in items)
    return struct.pack(f"<{_CODES[kind]}", value)


def key(name, kind, value):
    """Returns one entry of the metadata."""
    return text(name) + struct.pack("<I", kind) + value_bytes(kind, value)


def guessed(name, value):
    """Returns one entry of the metadata, of the type that writers choose for a value."""
    if isinstance(value, list):
        inner = STRING if value and isinstance(value[0], str) else 5
        return key(name, ARRAY, (inner, value))
    kinds = {bool: 7, int: U32, float: 6, str: STRING, bytes: STRING}
    return key(name, 2 if name in ("split.no", "split.count") else kinds[type(value)], value)


def entry(name, kind, shape, offset, rank=None):
    """Returns the header entry of one tensor; `kind` is a name or a number, `shape` as in torch."""
    number = IDS[kind] if isinstance(kind, str) else kind
    rank = len(shape) if rank is None else rank
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", rank, *reversed(shape), number, offset)


def nbytes_of(kind, shape):
    """Returns the bytes of a tensor of a type and shape."""
    found = block_type(kind)
    return math.prod(shape) // found.size * found.nbytes


def pack(keys, tensors, data=b"", *, version=3, counts=None, magic=b"GGUF", alignment=32):
    """Returns a file of entries of the metadata, entries of tensors, and data after the padding."""
    counts = counts or (len(tensors), len(keys))
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def write_gguf(path, metadata, tensors, alignment=32):
    """Writes a valid file.

    Args:
        path: The file.
        metadata: {key: value}.
        tensors: {name: (type, shape, bytes)}.
        alignment: The alignment of tensors.
    """
    entries, data = [], b""
    for name, (kind, shape, raw) in tensors.items():
        assert len(raw) == nbytes_of(kind, shape), name
        entries.append(entry(name, kind, shape, len(data)))
        data += raw + bytes(-len(raw) % alignment)
    keys = [guessed(name, value) for name, value in metadata.items()]
    if alignment != 32:
        keys.append(key("general.alignment", U32, alignment))
    path.write_bytes(pack(keys, entries, data, alignment=alignment))
    return path


_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "Q1_0": (0,), "Q2_0": (0,),
}  # fmt: skip
"""Where the float16 scales of each type are in a block."""


def random_blocks(name, count, seed=0, scale=None):
    """Returns random blocks of a type, uint8 [count, bytes], with finite scales.

    Args:
        name: The type.
        count: The number of blocks.
        seed: The seed.
        scale: The most amplitude of a scale; None for any that is finite.
    """
    kind = block_type(name)
    stream = b"".join(
        hashlib.sha256(f"{name} {seed} {part}".encode()).digest()
        for part in range(count * kind.nbytes // 32 + 1)
    )
    blocks = np.frombuffer(stream, np.uint8)[: count * kind.nbytes].reshape(count, kind.nbytes).copy()
    for place in _HALVES.get(name, ()):
        blocks[:, place + 1] &= 0xBF  # an exponent of at most 15
        if scale is not None:
            halves = (blocks[:, place].astype(np.float32) / 128 - 1) * scale
            blocks[:, place : place + 2] = halves.astype(np.float16).view(np.uint8).reshape(count, 2)
    if name == "IQ1_M":  # the highest bits of a scale that four words share
        blocks[:, 55] &= 0xBF if scale is None else 0x1F
    if name == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 100 + 50 if scale is None else 120 + blocks[:, 0] % 4
    if name == "NVFP4" and scale is not None:
        blocks[:, :4] = 24 + blocks[:, :4] % 8
    return blocks


def exact_blocks(name, count, seed=0):
    """Returns random blocks of a type whose scales are 1, so that their values are integers."""
    blocks = random_blocks(name, count, seed)
    for place in _HALVES.get(name, ()):
        blocks[:, place : place + 2] = np.ones(1, np.float16).view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = 128
    return blocks
