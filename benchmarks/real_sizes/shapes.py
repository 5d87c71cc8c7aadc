"""Shapes of published models, and the routing of their random checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hfq.checkpoint.header import TensorInfo
from hfq.checkpoint.index import Checkpoint

__all__ = ["EMBEDDING", "SHAPES", "Shape", "make_config", "router_weight", "set_routing", "to_bfloat16"]

EMBEDDING = 32.0
"""Standard deviation of embeddings.

Random attention averages all tokens. Among smaller embeddings its outputs would make tokens the same from
layer to layer, and they would share their experts.
"""

BIAS = 7.0
"""Channel 0 of every embedding in standard deviations, if routing is skewed.

A router's column 0 is then a bias.
"""


@dataclass(frozen=True)
class Shape:
    """The shape of a model.

    Attributes:
        architecture: Name in GGUF files.
        config: Class of the config in transformers.
        layers: Number of layers.
        hidden: Width.
        inner: Width of a dense layer's MLP, or of one expert.
        heads: Numbers of query heads, and of key and value heads.
        head: Width of a head.
        vocabulary: Number of tokens.
        experts: Numbers of experts, and of those that a token uses. (0, 0) for a dense model.
        theta: Base of the rotary embedding.
        others: Further values of the config.
    """

    architecture: str
    config: str
    layers: int
    hidden: int
    inner: int
    heads: tuple[int, int]
    head: int
    vocabulary: int
    experts: tuple[int, int] = (0, 0)
    theta: float = 1e6
    others: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def shortened(self) -> Shape:
        """Returns the same shape with two layers and few tokens, for a check."""
        return replace(self, layers=2, vocabulary=4096)

    def within(self, nbytes: float) -> Shape:
        """Returns a dense shape with as many layers as fit in bytes of bfloat16, at least one."""
        queries, keys = (count * self.head for count in self.heads)
        layer = 2 * self.hidden * (2 * queries + 2 * keys + 3 * self.inner)
        ends = 2 * 2 * self.vocabulary * self.hidden
        return replace(self, layers=max(1, min(self.layers, int((nbytes - ends) / layer))))

    @property
    def is_mixture(self) -> bool:
        """True for a mixture of experts."""
        return self.experts[0] > 0

    @property
    def can_be_skewed(self) -> bool:
        """True if `set_routing` knows its routers."""
        return self.config == "Qwen3MoeConfig"


_LLAMA_8B = Shape("llama", "LlamaConfig", 32, 4096, 14_336, (32, 8), 128, 128_256, theta=5e5)
_DEEPSEEK = {
    "intermediate_size": 18_432,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
    "rope_theta": 150_000.0,
}

SHAPES = {
    "qwen3-30b-a3b": Shape("qwen3moe", "Qwen3MoeConfig", 48, 2048, 768, (32, 4), 128, 151_936, (128, 8)),
    "llama-3-8b": _LLAMA_8B,
    "llama-3-8b-short": replace(_LLAMA_8B, layers=8),
    "llama-2-13b": Shape("llama", "LlamaConfig", 40, 5120, 13_824, (40, 40), 128, 32_000, theta=1e4),
    "llama-3-70b-short": Shape("llama", "LlamaConfig", 24, 8192, 28_672, (64, 8), 128, 128_256, theta=5e5),
    "gpt-oss-20b": Shape(
        "gpt-oss",
        "GptOssConfig",
        24,
        2880,
        2880,
        (64, 8),
        64,
        201_088,
        (32, 4),
        others={"sliding_window": 128, "max_position_embeddings": 131_072, "rope_parameters": _YARN},
    ),
    "deepseek-v3-short": Shape(
        "deepseek2",
        "DeepseekV3Config",
        4,
        7168,
        2048,
        (128, 128),
        64,
        129_280,
        (256, 8),
        1e4,
        others=_DEEPSEEK,
    ),
}
"""Published shapes, by name. Those that end in `-short` have fewer layers.

The short DeepSeek-V3 has one dense layer, of three.
"""

_EXPERTS = {
    "Qwen3MoeConfig": "num_experts",
    "GptOssConfig": "num_local_experts",
    "DeepseekV3Config": "n_routed_experts",
}
"""Number of experts in the config of each mixture."""


def make_config(shape: Shape) -> Any:
    """Returns the config of transformers for a shape."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads[0],
        "num_key_value_heads": shape.heads[1],
        "head_dim": shape.head,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "dtype": "bfloat16",
    }
    if shape.is_mixture:
        sizes |= {_EXPERTS[shape.config]: shape.experts[0], "num_experts_per_tok": shape.experts[1]}
        sizes |= {"moe_intermediate_size": shape.inner, "norm_topk_prob": True}
    sizes |= shape.others
    kind = getattr(transformers, shape.config)
    return kind(architectures=[shape.config.replace("Config", "ForCausalLM")], **sizes)


def router_weight(random: np.random.Generator, experts: int, hidden: int, is_skewed: bool) -> np.ndarray:
    """Returns the weight of a router, float32 [experts, hidden].

    Args:
        random: Source of the numbers.
        experts: Number of experts.
        hidden: Width of the model.
        is_skewed: True if the experts' frequencies follow Zipf's law, in a random order.
    """
    weight = random.standard_normal((experts, hidden), np.float32) * np.float32(0.9 / np.sqrt(hidden))
    weight[:, 0] = 0
    if is_skewed:
        weight[:, 0] = -np.log(1 + random.permutation(experts)) / BIAS
    return weight


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Returns float32 values as bfloat16, rounded towards zero, uint16."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def set_routing(folder: Path, shape: Shape, is_skewed: bool) -> None:
    """Writes other routers, and their channel of the embeddings, into a checkpoint with random weights.

    Args:
        folder: The checkpoint.
        shape: Shape of the model.
        is_skewed: True if the experts' frequencies follow Zipf's law.
    """
    random = np.random.default_rng(1)
    if not shape.can_be_skewed:
        return
    tensors = Checkpoint.open(folder).tensors
    _set_channel(tensors["model.embed_tokens.weight"], shape, is_skewed)
    for layer in range(shape.layers):
        weight = router_weight(random, shape.experts[0], shape.hidden, is_skewed)
        info = tensors[f"model.layers.{layer}.mlp.gate.weight"]
        raw = weight if info.dtype == "F32" else to_bfloat16(weight)
        with open(info.range.file, "r+b") as stream:
            stream.seek(info.range.offset)
            stream.write(raw.tobytes())


def _set_channel(info: TensorInfo, shape: Shape, is_skewed: bool) -> None:
    """Writes channel 0 of embeddings of bfloat16 or Q8_0."""
    is_short = info.nbytes == 2 * shape.vocabulary * shape.hidden
    value = to_bfloat16(np.array([BIAS * EMBEDDING], np.float32))[0] if is_short else 127
    rows = np.memmap(
        info.range.file,
        np.uint16 if is_short else np.uint8,
        "r+",
        info.range.offset,
        (shape.vocabulary, info.nbytes // shape.vocabulary // (2 if is_short else 1)),
    )
    rows[:, 0 if is_short else 2] = value if is_skewed else 0
    rows.flush()
