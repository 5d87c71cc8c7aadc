"""Random layers of gpt-oss and DeepSeek-V3."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.real_sizes.random_tensors import Tensors, floats, linear, mlp, router
from benchmarks.real_sizes.shapes import Shape
from hfq.machine_profile.probe_models import Planned, WeightLayout, norm

__all__ = ["deepseek_tensors", "gpt_oss_config", "gpt_oss_tensors"]

_DEVIATION, _SMALL = 0.02, 0.1
_POWER = 120  # 2**-7: with codes of E2M1, a deviation of 0.023


def gpt_oss_config() -> dict[str, Any]:
    """Returns the `quantization_config` of gpt-oss, whose experts alone are quantized."""
    others = ["self_attn", "mlp.router", "embed_tokens", "lm_head"]
    return {"quant_method": "mxfp4", "modules_to_not_convert": others}


def gpt_oss_tensors(shape: Shape, weights: WeightLayout) -> Tensors:
    """Yields the layers of gpt-oss: MXFP4 experts in fused tensors, and the rest in bfloat16.

    Args:
        shape: Shape of the model.
        weights: Unused, since gpt-oss has a layout of its own.
    """
    hidden, experts, routers = shape.hidden, shape.experts[0], np.random.default_rng(1)
    queries, keys = (count * shape.head for count in shape.heads)
    attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    for layer in (f"model.layers.{number}" for number in range(shape.layers)):
        yield f"{layer}.input_layernorm.weight", norm(hidden)
        yield f"{layer}.post_attention_layernorm.weight", norm(hidden)
        for local, (rows, columns) in attention.items():
            yield f"{layer}.self_attn.{local}_proj.weight", floats(rows, columns, deviation=_DEVIATION)
            yield f"{layer}.self_attn.{local}_proj.bias", floats(rows, deviation=_SMALL)
        yield f"{layer}.self_attn.sinks", floats(shape.heads[0], deviation=_SMALL)
        yield f"{layer}.mlp.router.weight", router(routers, experts, hidden)
        yield f"{layer}.mlp.router.bias", floats(experts, deviation=_SMALL)
        for local, rows, columns in (
            ("gate_up_proj", 2 * shape.inner, hidden),
            ("down_proj", hidden, shape.inner),
        ):
            name, groups = f"{layer}.mlp.experts.{local}", columns // 32
            yield f"{name}_blocks", Planned("U8", (experts, rows, groups, 16), _draw_bytes)
            yield f"{name}_scales", Planned("U8", (experts, rows, groups), _draw_powers)
            yield f"{name}_bias", floats(experts, rows, deviation=_SMALL)


def deepseek_tensors(shape: Shape, weights: WeightLayout) -> Tensors:
    """Yields the layers of DeepSeek-V3.

    Args:
        shape: Shape of the model.
        weights: Layout of all linear layers but routers.
    """
    sizes, hidden, routers = shape.others, shape.hidden, np.random.default_rng(1)
    low_q, low_kv, rope = sizes["q_lora_rank"], sizes["kv_lora_rank"], sizes["qk_rope_head_dim"]
    head, value, count = sizes["qk_nope_head_dim"], sizes["v_head_dim"], shape.heads[0]
    attention = {
        "q_a_proj": (low_q, hidden),
        "q_b_proj": (count * (head + rope), low_q),
        "kv_a_proj_with_mqa": (low_kv + rope, hidden),
        "kv_b_proj": (count * (head + value), low_kv),
        "o_proj": (hidden, count * value),
    }
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", norm(hidden)
        yield f"{layer}.post_attention_layernorm.weight", norm(hidden)
        yield f"{layer}.self_attn.q_a_layernorm.weight", norm(low_q)
        yield f"{layer}.self_attn.kv_a_layernorm.weight", norm(low_kv)
        for local, (rows, columns) in attention.items():
            yield from linear(f"{layer}.self_attn.{local}", rows, columns, weights)
        if number < sizes["first_k_dense_replace"]:
            yield from mlp(f"{layer}.mlp", sizes["intermediate_size"], hidden, weights)
            continue
        yield f"{layer}.mlp.gate.weight", router(routers, shape.experts[0], hidden)
        yield f"{layer}.mlp.gate.e_score_correction_bias", Planned("F32", shape.experts[:1], _draw_zeros)
        yield from mlp(f"{layer}.mlp.shared_experts", shape.inner, hidden, weights)
        for expert in range(shape.experts[0]):
            yield from mlp(f"{layer}.mlp.experts.{expert}", shape.inner, hidden, weights)


def _draw_bytes(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.integers(0, 256, shape, np.uint8)


def _draw_powers(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, _POWER, np.uint8)


def _draw_zeros(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.float32)
