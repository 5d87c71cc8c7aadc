"""Safetensors checkpoints with random weights of real shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.real_sizes.other_mixtures import deepseek_tensors, gpt_oss_config, gpt_oss_tensors
from benchmarks.real_sizes.random_tensors import Tensors, floats, linear, mlp, router
from benchmarks.real_sizes.rounded_layouts import find_layout
from benchmarks.real_sizes.shapes import EMBEDDING, Shape, make_config
from hfq.machine_profile.probe_models import WeightLayout, norm, write_planned

__all__ = ["write_safetensors"]


def write_safetensors(folder: Path, shape: Shape, name: str) -> None:
    """Writes a checkpoint.

    Args:
        folder: The new folder.
        shape: Shape of the model.
        name: A format, see `find_layout`; `mxfp4` for gpt-oss.

    Raises:
        SetupError: The disk has too little free space. Nothing was written.
    """
    weights, config = find_layout(name), make_config(shape)
    is_gpt_oss = shape.config == "GptOssConfig"
    config.quantization_config = gpt_oss_config() if is_gpt_oss else weights.quantization
    layers = _LAYERS.get(shape.config, _llama_tensors)
    planned = {
        "model.embed_tokens.weight": floats(shape.vocabulary, shape.hidden, deviation=EMBEDDING),
        **dict(layers(shape, weights)),
        "model.norm.weight": norm(shape.hidden),
        "lm_head.weight": floats(shape.vocabulary, shape.hidden, deviation=shape.hidden**-0.5),
    }
    write_planned(folder, planned, config.to_dict())


def _llama_tensors(shape: Shape, weights: WeightLayout) -> Tensors:
    """Yields the layers of Llama, or of Qwen3's mixtures."""
    hidden, routers = shape.hidden, np.random.default_rng(1)
    queries, keys = (count * shape.head for count in shape.heads)
    attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    for layer in (f"model.layers.{number}" for number in range(shape.layers)):
        yield f"{layer}.input_layernorm.weight", norm(hidden)
        yield f"{layer}.post_attention_layernorm.weight", norm(hidden)
        for local, (rows, columns) in attention.items():
            yield from linear(f"{layer}.self_attn.{local}_proj", rows, columns, weights)
        if not shape.is_mixture:
            yield from mlp(f"{layer}.mlp", shape.inner, hidden, weights)
            continue
        yield f"{layer}.self_attn.q_norm.weight", norm(shape.head)
        yield f"{layer}.self_attn.k_norm.weight", norm(shape.head)
        yield f"{layer}.mlp.gate.weight", router(routers, shape.experts[0], hidden)
        for expert in range(shape.experts[0]):
            yield from mlp(f"{layer}.mlp.experts.{expert}", shape.inner, hidden, weights)


_LAYERS: dict[str, Callable[[Shape, WeightLayout], Tensors]] = {
    "GptOssConfig": gpt_oss_tensors,
    "DeepseekV3Config": deepseek_tensors,
}
"""Layers of mixtures other than Qwen3's, by the class of their config."""
