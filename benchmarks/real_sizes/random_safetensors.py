"""Safetensors checkpoints with random weights of real shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.checkpoints import LAYOUTS
from benchmarks.real_sizes.shapes import EMBEDDING, Shape, make_config, router_weight, to_bfloat16
from hfq.machine_profile.probe_models import Planned, WeightLayout, norm, write_planned

__all__ = ["write_safetensors"]

_Tensors = Iterator[tuple[str, Planned]]


def write_safetensors(folder: Path, shape: Shape, name: str) -> None:
    """Writes a checkpoint.

    Args:
        folder: The new folder.
        shape: Shape of the model.
        name: A name of `LAYOUTS`.

    Raises:
        SetupError: The disk has too little free space. Nothing was written.
    """
    weights, config = LAYOUTS[name], make_config(shape)
    config.quantization_config = weights.quantization
    write_planned(folder, dict(_tensors(shape, weights)), config.to_dict())


def _tensors(shape: Shape, weights: WeightLayout) -> _Tensors:
    hidden, routers = shape.hidden, np.random.default_rng(1)
    queries, keys = (count * shape.head for count in shape.heads)
    attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    yield "model.embed_tokens.weight", _floats(shape.vocabulary, hidden, EMBEDDING)
    for layer in (f"model.layers.{number}" for number in range(shape.layers)):
        yield f"{layer}.input_layernorm.weight", norm(hidden)
        yield f"{layer}.post_attention_layernorm.weight", norm(hidden)
        for local, (rows, columns) in attention.items():
            yield from _linear(f"{layer}.self_attn.{local}_proj", rows, columns, weights)
        if not shape.is_mixture:
            yield from _mlp(f"{layer}.mlp", shape, weights)
            continue
        yield f"{layer}.self_attn.q_norm.weight", norm(shape.head)
        yield f"{layer}.self_attn.k_norm.weight", norm(shape.head)
        router = to_bfloat16(router_weight(routers, shape.experts[0], hidden, False))
        yield f"{layer}.mlp.gate.weight", Planned("BF16", router.shape, lambda *_, own=router: own)
        for expert in range(shape.experts[0]):
            yield from _mlp(f"{layer}.mlp.experts.{expert}", shape, weights)
    yield "model.norm.weight", norm(hidden)
    yield "lm_head.weight", _floats(shape.vocabulary, hidden, hidden**-0.5)


def _linear(name: str, rows: int, columns: int, weights: WeightLayout) -> _Tensors:
    for local, planned in weights.tensors(rows, columns).items():
        yield f"{name}.{local}", planned


def _mlp(name: str, shape: Shape, weights: WeightLayout) -> _Tensors:
    yield from _linear(f"{name}.gate_proj", shape.inner, shape.hidden, weights)
    yield from _linear(f"{name}.up_proj", shape.inner, shape.hidden, weights)
    yield from _linear(f"{name}.down_proj", shape.hidden, shape.inner, weights)


def _floats(rows: int, columns: int, deviation: float) -> Planned:
    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return to_bfloat16(random.standard_normal(shape, np.float32) * np.float32(deviation))

    return Planned("BF16", (rows, columns), draw)
