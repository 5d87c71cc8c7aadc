"""GGUF files with random weights of real shapes, written tensor by tensor.

The numbers of a weight have a mean of zero. With another mean, each layer would amplify one direction, and all
tokens would be routed to the same experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

__all__ = ["BLOCKS", "EMBEDDINGS", "EMBEDDING_DEVIATION", "random_rows", "write_random_gguf"]

EMBEDDINGS = "embeddings"
"""Content of embeddings of type Q8_0: a standard deviation of 1, and channel 0 as large as possible."""

EMBEDDING_DEVIATION = 17.6
"""Standard deviation of the codes of embeddings; their largest code is 127."""

_CHUNK = 1 << 26
_Blocks = Callable[[np.random.Generator, int, float], np.ndarray]


def _float16(value: float) -> np.ndarray:
    return np.array([value], np.float16).view(np.uint8)


def _bytes(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.integers(0, 256, shape, np.uint8)


def _q4_0(random: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    blocks = np.empty((count, 18), np.uint8)
    blocks[:, :2] = _float16(deviation / 4.36)
    blocks[:, 2:] = _without_zeros(_bytes(random, count, 16))
    return blocks


def _without_zeros(codes: np.ndarray) -> np.ndarray:
    """Replaces codes of 0 by 8, since 1 to 15 around a zero point of 8 have a mean of zero."""
    codes |= ((codes & 0x0F) == 0).astype(np.uint8) << 3
    codes |= ((codes & 0xF0) == 0).astype(np.uint8) << 7
    return codes


def _q8_0(random: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    blocks = np.empty((count, 34), np.uint8)
    blocks[:, :2] = _float16(deviation / 73.3)
    blocks[:, 2:] = random.integers(-127, 128, (count, 32), np.int8).view(np.uint8)
    return blocks


def _mxfp4(random: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    blocks = np.empty((count, 17), np.uint8)
    blocks[:, 0] = 127 + round(np.log2(deviation / 2.9))
    blocks[:, 1:] = _bytes(random, count, 16)
    return blocks


def _q4_k(random: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    """Blocks whose scales equal their minimums, so that codes of 7.5 would be zeros."""
    scale = deviation / (4.61 * 36.4)
    blocks = np.empty((count, 144), np.uint8)
    blocks[:, :2], blocks[:, 2:4] = _float16(scale), _float16(7.5 * scale)
    blocks[:, 4:8] = blocks[:, 8:12] = _bytes(random, count, 4)
    blocks[:, 12:16] = random.integers(0, 16, (count, 4), np.uint8) * 0x11
    blocks[:, 16:] = _bytes(random, count, 128)
    return blocks


def _q6_k(random: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    blocks = np.empty((count, 210), np.uint8)
    blocks[:, :208] = _bytes(random, count, 208)
    blocks[:, 208:] = _float16(deviation / (18.5 * 73.9))
    return blocks


BLOCKS: dict[Type, _Blocks] = {
    Type.Q4_0: _q4_0,
    Type.Q8_0: _q8_0,
    Type.MXFP4: _mxfp4,
    Type.Q4_K: _q4_k,
    Type.Q6_K: _q6_k,
}
"""Makers of random blocks, uint8 [count, bytes of a block], by type."""


def random_rows(
    random: np.random.Generator, kind: Type, shape: tuple[int, ...], deviation: float
) -> Iterator[np.ndarray]:
    """Yields the stored bytes of a random tensor, in chunks of whole rows.

    Args:
        random: Source of the numbers.
        kind: A type of `BLOCKS`, or a float type.
        shape: Shape of the tensor; the last dimension is that of a row.
        deviation: Standard deviation of the numbers.
    """
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    if kind not in BLOCKS:
        values = random.standard_normal((rows, columns), np.float32) * np.float32(deviation)
        yield gguf.quants.quantize(values, kind).view(np.uint8).reshape(rows, -1)
        return
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    step = max(1, _CHUNK // (columns // size * nbytes))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        yield BLOCKS[kind](random, count * columns // size, deviation).reshape(count, -1)


def _make_embeddings(random: np.random.Generator, rows: np.ndarray) -> None:
    blocks = rows.reshape(-1, 34)
    blocks[:, :2] = _float16(1 / EMBEDDING_DEVIATION)
    blocks[:, 2:] = random.integers(-30, 31, (len(blocks), 32), np.int8).view(np.uint8)
    rows[:, 2] = 127


def write_random_gguf(
    file: Path,
    architecture: str,
    keys: dict[str, Any],
    tensors: dict[str, tuple[Type, tuple[int, ...], Any]],
    seed: int = 0,
) -> None:
    """Writes a GGUF file with random weights.

    Args:
        file: The new file.
        architecture: Name of the architecture.
        keys: Metadata. Keys that do not start with `tokenizer.` are those of the architecture.
        tensors: {name: (type, shape, content)}. Content is a standard deviation, an array of float32, or
            `EMBEDDINGS`.
        seed: Seed of the random numbers.
    """
    random = np.random.default_rng(seed)
    _write_header(file, architecture, keys, tensors)
    with open(file, "r+b") as stream:
        stream.seek(0, 2)
        for kind, shape, content in tensors.values():
            stream.write(b"\0" * (-stream.tell() % 32))
            if isinstance(content, np.ndarray):
                stream.write(gguf.quants.quantize(content, kind).tobytes())
                continue
            is_embedding = content == EMBEDDINGS
            for rows in random_rows(random, kind, shape, 1.0 if is_embedding else content):
                if is_embedding:
                    _make_embeddings(random, rows)
                stream.write(rows)
        stream.write(b"\0" * (-stream.tell() % 32))


def _write_header(
    file: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, tuple[Type, tuple[int, ...], Any]]
) -> None:
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in keys.items():
        name = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_string if isinstance(value, str) else add)(name, value)
    for name, (kind, shape, _) in tensors.items():
        stored = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
