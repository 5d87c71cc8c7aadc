"""Safetensors checkpoints with random weights of real shapes, written tensor by tensor."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real_sizes.shapes import ATTENTION, Shape, make_config, router_weight
from hfq.tensor_spec import DTYPE_BITS

__all__ = ["FORMATS", "write_safetensors"]

_GROUP = 128
_SHARD = 5 * 10**9

_Content = Callable[[np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class _Stored:
    """A stored tensor: its dtype, its shape, and the function that makes its bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: _Content

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


_Tensors = Iterator[tuple[str, _Stored]]


@dataclass(frozen=True)
class Format:
    """A format of quantized linear layers.

    Attributes:
        config: `quantization_config` of config.json.
        linear: Yields the stored tensors of a linear layer, of its name, rows, columns, and standard deviation.
    """

    config: dict[str, Any]
    linear: Callable[[str, int, int, float], _Tensors]


def _constant(value: float, dtype: str, *shape: int) -> _Stored:
    kinds = {"F16": np.float16, "F32": np.float32}
    if dtype == "BF16":
        raw = np.frombuffer(struct.pack("<f", value)[2:], np.uint16)
    else:
        raw = np.array([value], kinds[dtype])
    return _Stored(dtype, shape, lambda random: np.full(shape, raw))


def _codes(dtype: str, *shape: int, zero: bool = True) -> _Stored:
    """Random bytes; without `zero`, no four bits of them are zero."""

    def content(random: np.random.Generator) -> np.ndarray:
        codes = random.integers(0, 256, math.prod(shape) * DTYPE_BITS[dtype] // 8, np.uint8)
        if not zero:
            codes |= ((codes & 0x0F) == 0).astype(np.uint8) << 3
            codes |= ((codes & 0xF0) == 0).astype(np.uint8) << 7
        return codes

    return _Stored(dtype, shape, content)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _gptq4(name: str, rows: int, columns: int, deviation: float) -> _Tensors:
    groups = columns // _GROUP
    indices = np.arange(columns, dtype=np.int32) // _GROUP
    yield f"{name}.qweight", _codes("I32", columns // 8, rows, zero=False)
    yield (
        f"{name}.qzeros",
        _Stored("I32", (groups, rows // 8), lambda random: np.full(groups * rows // 2, 0x77, np.uint8)),
    )
    yield f"{name}.scales", _constant(deviation / 4.36, "F16", groups, rows)
    yield f"{name}.g_idx", _Stored("I32", (columns,), lambda random: indices)


FORMATS = {
    "gptq4": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": True, "desc_act": False}, _gptq4
    ),
}
"""Formats, by name."""


def write_safetensors(folder: Path, shape: Shape, name: str) -> None:
    """Writes a checkpoint, config.json last.

    Args:
        folder: The new folder.
        shape: Shape of the model.
        name: A name of `FORMATS`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind, random = FORMATS[name], np.random.default_rng(0)
    config = make_config(shape)
    config.quantization_config = kind.config
    tensors = dict(_tensors(shape, kind))
    weight_map: dict[str, str] = {}
    shards: list[dict[str, _Stored]] = [{}]
    for key, tensor in tensors.items():
        if sum(own.nbytes for own in shards[-1].values()) + tensor.nbytes > _SHARD:
            shards.append({})
        shards[-1][key] = tensor
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(folder / file, shard, random)
        weight_map |= dict.fromkeys(shard, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")


def _write(file: Path, tensors: dict[str, _Stored], random: np.random.Generator) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(head)) + head)
        for tensor in tensors.values():
            stream.write(np.ascontiguousarray(tensor.content(random)))


def _tensors(shape: Shape, kind: Format) -> _Tensors:
    hidden, routers = shape.hidden, np.random.default_rng(1)
    queries, keys = (count * shape.head for count in shape.heads)
    attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    yield "model.embed_tokens.weight", _embeddings(shape.vocabulary, hidden, 1.0)
    for layer in (f"model.layers.{number}" for number in range(shape.layers)):
        yield from _norms(layer, {"input_layernorm": hidden, "post_attention_layernorm": hidden})
        for local, (rows, columns) in attention.items():
            deviation = (ATTENTION if local == "o" else 1.0) * columns**-0.5
            yield from kind.linear(f"{layer}.self_attn.{local}_proj", rows, columns, deviation)
        if not shape.is_mixture:
            yield from _mlp(f"{layer}.mlp", shape, kind)
            continue
        yield from _norms(f"{layer}.self_attn", {"q_norm": shape.head, "k_norm": shape.head})
        weight = _bfloat16(router_weight(routers, shape.experts[0], hidden, False))
        yield f"{layer}.mlp.gate.weight", _Stored("BF16", weight.shape, lambda random, own=weight: own)
        for expert in range(shape.experts[0]):
            yield from _mlp(f"{layer}.mlp.experts.{expert}", shape, kind)
    yield from _norms("model", {"norm": hidden})
    yield "lm_head.weight", _embeddings(shape.vocabulary, hidden, hidden**-0.5)


def _embeddings(rows: int, columns: int, deviation: float) -> _Stored:
    def content(random: np.random.Generator) -> np.ndarray:
        values = random.standard_normal((rows, columns), np.float32) * np.float32(deviation)
        return _bfloat16(values)

    return _Stored("BF16", (rows, columns), content)


def _mlp(name: str, shape: Shape, kind: Format) -> _Tensors:
    yield from kind.linear(f"{name}.gate_proj", shape.inner, shape.hidden, shape.hidden**-0.5)
    yield from kind.linear(f"{name}.up_proj", shape.inner, shape.hidden, shape.hidden**-0.5)
    yield from kind.linear(f"{name}.down_proj", shape.hidden, shape.inner, shape.inner**-0.5)


def _norms(name: str, sizes: dict[str, int]) -> _Tensors:
    for local, size in sizes.items():
        yield f"{name}.{local}.weight", _constant(1.0, "BF16", size)
