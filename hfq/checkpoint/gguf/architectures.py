"""Names and layouts of tensors in GGUF files and in transformers' models, by architecture.

A module has the tensors `.weight`, `.bias`, `.scale`, and `.input_scale`. `N` is the number of a layer. How
to add an architecture: docs/contributing/add_a_gguf_architecture.md.

Sources: `gguf-py/gguf/tensor_mapping.py` and `conversion/` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["ARCHITECTURES", "CHECKED_TENSORS", "Architecture", "Layout"]

Layout = Literal[
    "query heads",
    "key heads",
    "value heads",
    "columns of value heads",
    "queries, keys, and value heads",
    "transposed layer",
    "plus one",
    "minus exponential",
    "matrix of one row",
    "convolution",
]
"""How a file stores a tensor differently than the model; `layouts.py` has the functions.

- query heads, key heads: the rows of each head alternate between its halves
- value heads, …: value heads of a linear attention are numbered across key heads, not within them
- transposed layer: the weight is stored [out, in], and the model has it [in, out]
- plus one: the model adds one to a norm's weight, and the file stores the sum
- minus exponential: the model has a, and the file -exp(a)
- matrix of one row, convolution: a dimension of one is left out
"""

CHECKED_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that repeat what config.json says, and that a load compares with it."""


@dataclass(frozen=True)
class Architecture:
    """The tensors of one architecture.

    Attributes:
        modules: Module in the model, by name in the file.
        model_types: Values of `model_type` in config.json of models with these files.
        tensors: Tensor in the model, by name in the file, of tensors with other names than those of a module.
        layouts: Layouts of a module or tensor that the file stores differently, by name in the file.
        other_keys: Keys of the metadata that mean something else than config.json, and are not compared.
        builds_config: True if transformers' config of the metadata is tested, for files without config.json.
        omits_rows: True if files may lack the last rows of the embedding, to which no token belongs.
    """

    modules: Mapping[str, str]
    model_types: tuple[str, ...]
    tensors: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict)
    other_keys: frozenset[str] = frozenset()
    builds_config: bool = False
    omits_rows: bool = False


_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "blk.N.attn_q": "model.layers.N.self_attn.q_proj",
    "blk.N.attn_k": "model.layers.N.self_attn.k_proj",
    "blk.N.attn_v": "model.layers.N.self_attn.v_proj",
    "blk.N.attn_output": "model.layers.N.self_attn.o_proj",
    "blk.N.attn_norm": "model.layers.N.input_layernorm",
}
_HEAD_NORMS = {
    "blk.N.attn_q_norm": "model.layers.N.self_attn.q_norm",
    "blk.N.attn_k_norm": "model.layers.N.self_attn.k_norm",
}
_DENSE = {
    "blk.N.ffn_gate": "model.layers.N.mlp.gate_proj",
    "blk.N.ffn_up": "model.layers.N.mlp.up_proj",
    "blk.N.ffn_down": "model.layers.N.mlp.down_proj",
}
_SECOND_NORM = {"blk.N.ffn_norm": "model.layers.N.post_attention_layernorm"}
_EXPERTS = {
    "blk.N.ffn_gate_inp": "model.layers.N.mlp.gate",
    "blk.N.ffn_gate_exps": "model.layers.N.mlp.experts.gate_proj",
    "blk.N.ffn_up_exps": "model.layers.N.mlp.experts.up_proj",
    "blk.N.ffn_down_exps": "model.layers.N.mlp.experts.down_proj",
}
_FUSED = {"blk.N.ffn_gate_up_exps": "model.layers.N.mlp.experts.gate_up_proj"}
"""All gate channels before all up channels, so not for models whose channels alternate, as gpt-oss."""
_SHARED_EXPERTS = {
    "blk.N.ffn_gate_shexp": "model.layers.N.mlp.shared_experts.gate_proj",
    "blk.N.ffn_up_shexp": "model.layers.N.mlp.shared_experts.up_proj",
    "blk.N.ffn_down_shexp": "model.layers.N.mlp.shared_experts.down_proj",
}
_CORRECTION = {"blk.N.exp_probs_b.bias": "model.layers.N.mlp.gate.e_score_correction_bias"}
_LLAMA = _OUTER | _ATTENTION | _SECOND_NORM | _DENSE
_QWEN2_MOE = _OUTER | _ATTENTION | _SECOND_NORM | _EXPERTS | _FUSED
_GEMMA2_NORMS = {
    "blk.N.post_attention_norm": "model.layers.N.post_attention_layernorm",
    "blk.N.ffn_norm": "model.layers.N.pre_feedforward_layernorm",
    "blk.N.post_ffw_norm": "model.layers.N.post_feedforward_layernorm",
}
_GEMMA_NORMS = (
    "output_norm",
    "blk.N.attn_norm",
    "blk.N.ffn_norm",
    "blk.N.post_attention_norm",
    "blk.N.post_ffw_norm",
    "blk.N.attn_q_norm",
    "blk.N.attn_k_norm",
)
_GEMMA_LAYOUTS: dict[str, tuple[Layout, ...]] = dict.fromkeys(_GEMMA_NORMS, ("plus one",))

ARCHITECTURES = {
    "llama": Architecture(
        _LLAMA | _EXPERTS | _FUSED,
        ("llama", "mistral", "mixtral"),
        layouts={"blk.N.attn_q": ("query heads",), "blk.N.attn_k": ("key heads",)},
        builds_config=True,
    ),
    "qwen2": Architecture(_LLAMA, ("qwen2",), builds_config=True),
    "qwen3": Architecture(_LLAMA | _HEAD_NORMS, ("qwen3",), builds_config=True),
    "qwen2moe": Architecture(
        _QWEN2_MOE
        | {
            "blk.N.ffn_gate_inp_shexp": "model.layers.N.mlp.shared_expert_gate",
            "blk.N.ffn_gate_shexp": "model.layers.N.mlp.shared_expert.gate_proj",
            "blk.N.ffn_up_shexp": "model.layers.N.mlp.shared_expert.up_proj",
            "blk.N.ffn_down_shexp": "model.layers.N.mlp.shared_expert.down_proj",
        },
        ("qwen2_moe",),
        layouts={"blk.N.ffn_gate_inp_shexp": ("matrix of one row",)},
    ),
    "qwen3moe": Architecture(_QWEN2_MOE | _HEAD_NORMS | _DENSE, ("qwen3_moe",)),
    "qwen35": Architecture(
        _OUTER
        | _ATTENTION
        | _HEAD_NORMS
        | _DENSE
        | {
            "blk.N.post_attention_norm": "model.layers.N.post_attention_layernorm",
            "blk.N.attn_qkv": "model.layers.N.linear_attn.in_proj_qkv",
            "blk.N.attn_gate": "model.layers.N.linear_attn.in_proj_z",
            "blk.N.ssm_alpha": "model.layers.N.linear_attn.in_proj_a",
            "blk.N.ssm_beta": "model.layers.N.linear_attn.in_proj_b",
            "blk.N.ssm_conv1d": "model.layers.N.linear_attn.conv1d",
            "blk.N.ssm_norm": "model.layers.N.linear_attn.norm",
            "blk.N.ssm_out": "model.layers.N.linear_attn.out_proj",
        },
        ("qwen3_5_text",),
        {
            "blk.N.ssm_a": "model.layers.N.linear_attn.A_log",
            "blk.N.ssm_dt.bias": "model.layers.N.linear_attn.dt_bias",
        },
        {
            "output_norm": ("plus one",),
            "blk.N.attn_norm": ("plus one",),
            "blk.N.post_attention_norm": ("plus one",),
            "blk.N.attn_q_norm": ("plus one",),
            "blk.N.attn_k_norm": ("plus one",),
            "blk.N.attn_qkv": ("queries, keys, and value heads",),
            "blk.N.attn_gate": ("value heads",),
            "blk.N.ssm_alpha": ("value heads",),
            "blk.N.ssm_beta": ("value heads",),
            "blk.N.ssm_conv1d": ("convolution", "queries, keys, and value heads"),
            "blk.N.ssm_out": ("columns of value heads",),
            "blk.N.ssm_a": ("value heads", "minus exponential"),
            "blk.N.ssm_dt.bias": ("value heads",),
        },
        builds_config=True,
    ),
    "gemma": Architecture(_LLAMA, ("gemma",), layouts=_GEMMA_LAYOUTS),
    "gemma2": Architecture(_LLAMA | _GEMMA2_NORMS, ("gemma2",), layouts=_GEMMA_LAYOUTS, builds_config=True),
    "gemma3": Architecture(
        _LLAMA | _GEMMA2_NORMS | _HEAD_NORMS,
        ("gemma3_text",),
        layouts=_GEMMA_LAYOUTS,
        builds_config=True,
        omits_rows=True,
    ),
    "phi3": Architecture(
        _OUTER
        | _SECOND_NORM
        | {
            "blk.N.attn_qkv": "model.layers.N.self_attn.qkv_proj",
            "blk.N.attn_output": "model.layers.N.self_attn.o_proj",
            "blk.N.attn_norm": "model.layers.N.input_layernorm",
            "blk.N.ffn_up": "model.layers.N.mlp.gate_up_proj",
            "blk.N.ffn_down": "model.layers.N.mlp.down_proj",
        },
        ("phi3",),
        builds_config=True,
    ),
    "gpt-oss": Architecture(
        _OUTER
        | _ATTENTION
        | _EXPERTS
        | {
            "blk.N.post_attention_norm": "model.layers.N.post_attention_layernorm",
            "blk.N.ffn_gate_inp": "model.layers.N.mlp.router",
        },
        ("gpt_oss",),
        {"blk.N.attn_sinks.weight": "model.layers.N.self_attn.sinks"},
    ),
    "glm4moe": Architecture(
        _OUTER
        | _ATTENTION
        | _HEAD_NORMS
        | _DENSE
        | _EXPERTS
        | _FUSED
        | _SHARED_EXPERTS
        | {"blk.N.post_attention_norm": "model.layers.N.post_attention_layernorm"},
        ("glm4_moe",),
        _CORRECTION,
    ),
    "deepseek2": Architecture(
        _LLAMA
        | _EXPERTS
        | _FUSED
        | _SHARED_EXPERTS
        | {
            "blk.N.attn_q_a": "model.layers.N.self_attn.q_a_proj",
            "blk.N.attn_q_a_norm": "model.layers.N.self_attn.q_a_layernorm",
            "blk.N.attn_q_b": "model.layers.N.self_attn.q_b_proj",
            "blk.N.attn_kv_a_mqa": "model.layers.N.self_attn.kv_a_proj_with_mqa",
            "blk.N.attn_kv_a_norm": "model.layers.N.self_attn.kv_a_layernorm",
            "blk.N.attn_kv_b": "model.layers.N.self_attn.kv_b_proj",
        },
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
        _CORRECTION
        | {
            "blk.N.attn_k_b.weight": "model.layers.N.self_attn.kv_b_proj.k_b",
            "blk.N.attn_v_b.weight": "model.layers.N.self_attn.kv_b_proj.v_b",
        },
        other_keys=frozenset({"attention.head_count_kv", "attention.scale"}),
    ),
    "gpt2": Architecture(
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
            "blk.N.attn_norm": "transformer.h.N.ln_1",
            "blk.N.attn_qkv": "transformer.h.N.attn.c_attn",
            "blk.N.attn_output": "transformer.h.N.attn.c_proj",
            "blk.N.ffn_norm": "transformer.h.N.ln_2",
            "blk.N.ffn_up": "transformer.h.N.mlp.c_fc",
            "blk.N.ffn_down": "transformer.h.N.mlp.c_proj",
        },
        ("gpt2",),
        layouts={
            f"blk.N.{name}.weight": ("transposed layer",)
            for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
        },
    ),
}
"""The architectures that hfq reads, by `general.architecture`."""
