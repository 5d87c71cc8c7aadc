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

from benchmarks.real_sizes.shapes import EMBEDDING, Shape, make_config, router_weight
from hfq.machine_profile.probe_models import check_space

__all__ = ["BLOCKS", "random_rows", "write_gguf"]

_EMBEDDINGS = "embeddings"  # content of the embeddings' tensor
_LARGEST_CODE = 30  # of random embeddings; 127 is then seven standard deviations, see BIAS

_CHUNK = 1 << 26
_Blocks = Callable[[np.random.Generator, int, float], np.ndarray]
_Tensors = dict[str, tuple[Type, tuple[int, ...], Any]]
"""{name: (type, shape, content)}. Content is a standard deviation, an array of float32, or `_EMBEDDINGS`."""


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
    """Makes blocks of Q8_0 embeddings, in whose rows the code of channel 0 can be set."""
    blocks = rows.reshape(-1, 34)
    deviation = ((2 * _LARGEST_CODE + 1) ** 2 / 12) ** 0.5
    blocks[:, :2] = _float16(EMBEDDING / deviation)
    blocks[:, 2:] = random.integers(-_LARGEST_CODE, _LARGEST_CODE + 1, (len(blocks), 32), np.int8).view(
        np.uint8
    )


def write_gguf(folder: Path, shape: Shape, types: dict[str, Type]) -> Path:
    """Writes a GGUF file, then config.json.

    Args:
        folder: The new folder.
        shape: Shape of the model.
        types: Types of tensors by the end of their name in the file without `.weight`; `""` for all others.
            Embeddings are Q8_0.

    Returns:
        The GGUF file.

    Raises:
        SetupError: The disk has too little free space. Nothing was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, tensors, random = folder / "model.gguf", _tensors(shape, types), np.random.default_rng(0)
    nbytes = sum(
        int(np.prod(gguf.quant_shape_to_byte_shape(dims, kind))) for kind, dims, _ in tensors.values()
    )
    check_space(folder, nbytes)
    _write_header(file, shape, tensors)
    with open(file, "r+b") as stream:
        stream.seek(0, 2)
        for kind, dims, content in tensors.values():
            stream.write(b"\0" * (-stream.tell() % 32))
            if isinstance(content, np.ndarray):
                stream.write(gguf.quants.quantize(content, kind).tobytes())
                continue
            is_embedding = content == _EMBEDDINGS
            for rows in random_rows(random, kind, dims, 1.0 if is_embedding else content):
                if is_embedding:
                    _make_embeddings(random, rows)
                stream.write(rows)
        stream.write(b"\0" * (-stream.tell() % 32))
    make_config(shape).save_pretrained(folder)
    return file


def _write_header(file: Path, shape: Shape, tensors: _Tensors) -> None:
    writer = gguf.GGUFWriter(file, shape.architecture)
    writer.add_tokenizer_model("no_vocab")
    for key, value in _keys(shape).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{shape.architecture}.{key}", value)
    for name, (kind, dims, _) in tensors.items():
        stored = gguf.quant_shape_to_byte_shape(dims, kind)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _keys(shape: Shape) -> dict[str, float]:
    keys: dict[str, float] = {
        "block_count": shape.layers,
        "context_length": 8192,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads[0],
        "attention.head_count_kv": shape.heads[1],
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": shape.theta,
        "vocab_size": shape.vocabulary,
    }
    if shape.architecture == "llama":
        keys["rope.dimension_count"] = shape.head
    if shape.is_mixture:
        keys |= {"expert_count": shape.experts[0], "expert_used_count": shape.experts[1]}
        keys["expert_feed_forward_length"] = shape.inner
    return keys


def _tensors(shape: Shape, types: dict[str, Type]) -> _Tensors:
    random, hidden = np.random.default_rng(1), shape.hidden
    queries, keys = (count * shape.head for count in shape.heads)
    found: _Tensors = {}

    def matrix(name: str, *dims: int) -> None:
        found[f"{name}.weight"] = (types.get(name.rpartition(".")[2], types[""]), dims, dims[-1] ** -0.5)

    def vector(name: str, size: int) -> None:
        found[f"{name}.weight"] = (Type.F32, (size,), np.ones(size, np.float32))

    found["token_embd.weight"] = (Type.Q8_0, (shape.vocabulary, hidden), _EMBEDDINGS)
    for layer in (f"blk.{number}" for number in range(shape.layers)):
        vector(f"{layer}.attn_norm", hidden)
        for name, dims in {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}.items():
            matrix(f"{layer}.attn_{name}", *dims)
        matrix(f"{layer}.attn_output", hidden, queries)
        vector(f"{layer}.ffn_norm", hidden)
        if not shape.is_mixture:
            matrix(f"{layer}.ffn_gate", shape.inner, hidden)
            matrix(f"{layer}.ffn_up", shape.inner, hidden)
            matrix(f"{layer}.ffn_down", hidden, shape.inner)
            continue
        experts = shape.experts[0]
        vector(f"{layer}.attn_q_norm", shape.head)
        vector(f"{layer}.attn_k_norm", shape.head)
        router = router_weight(random, experts, hidden, False)
        found[f"{layer}.ffn_gate_inp.weight"] = (Type.F32, router.shape, router)
        matrix(f"{layer}.ffn_gate_exps", experts, shape.inner, hidden)
        matrix(f"{layer}.ffn_up_exps", experts, shape.inner, hidden)
        matrix(f"{layer}.ffn_down_exps", experts, hidden, shape.inner)
    vector("output_norm", hidden)
    matrix("output", shape.vocabulary, hidden)
    return found
