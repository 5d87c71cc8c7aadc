"""Checkpoints with the tensors of large models, in sparse files that use little of the disk.

Codes are holes, which read as zeros. Only what a load reads and checks is written.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hfq.tensor_spec import DTYPE_BITS

__all__ = ["LARGE_MODELS", "LargeModel", "make_large"]

_GROUP = 128


@dataclass(frozen=True)
class _Stored:
    """A stored tensor; without content it is a hole."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


_Tensors = Iterator[tuple[str, _Stored]]
_Linear = Callable[[str, int, int], _Tensors]


@dataclass(frozen=True)
class LargeModel:
    """A published architecture and the format of its linear layers.

    Attributes:
        config: Returns the config for a number of layers; None for the published number.
        tensors: Yields the stored tensors of a config, by name.
        shards: The number of files.
    """

    config: Callable[[int | None], Any]
    tensors: Callable[[Any], _Tensors]
    shards: int


def make_large(folder: Path, name: str, layers: int | None = None) -> Path:
    """Writes a checkpoint into its own folder within `folder`, unless a complete one exists.

    Args:
        folder: Folder of all checkpoints. It is created if missing.
        name: A name of `LARGE_MODELS`.
        layers: Number of layers; None for the published number.

    Returns:
        Folder of the checkpoint.
    """
    model = LARGE_MODELS[name]
    config = model.config(layers)
    path = folder / f"{name}-{config.num_hidden_layers}-layers"
    index = path / "model.safetensors.index.json"
    if index.exists():
        return path
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    tensors = dict(model.tensors(config))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_split(tensors, model.shards), 1):
        file = f"model-{number:05}-of-{model.shards:05}.safetensors"
        _write(path / file, {key: tensors[key] for key in shard})
        weight_map |= dict.fromkeys(shard, file)
    (path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return path


def _split(tensors: dict[str, _Stored], count: int) -> list[list[str]]:
    """Returns the names of each shard, in order; shards have about equal bytes."""
    total, end = sum(tensor.nbytes for tensor in tensors.values()), 0
    shards: list[list[str]] = [[] for _ in range(count)]
    for name, tensor in tensors.items():
        shards[min(count - 1, end * count // total)].append(name)
        end += tensor.nbytes
    return [shard for shard in shards if shard]


def _write(file: Path, tensors: dict[str, _Stored]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        offsets = [end, end + tensor.nbytes]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        end += tensor.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(head)) + head)
        for name, tensor in tensors.items():
            if tensor.content is not None:
                stream.seek(8 + len(head) + header[name]["data_offsets"][0])
                stream.write(tensor.content)
        stream.truncate(8 + len(head) + end)


def _qwen3_config(layers: int | None) -> Any:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=layers or 48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        norm_topk_prob=True,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": True, "desc_act": False}
    config.quantization_config = quantization
    return config


def _qwen3_tensors(config: Any) -> _Tensors:
    hidden, vocabulary, head = config.hidden_size, config.vocab_size, config.head_dim
    queries, keys = head * config.num_attention_heads, head * config.num_key_value_heads
    attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    yield "model.embed_tokens.weight", _Stored("BF16", (vocabulary, hidden))
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}"
        yield from _vectors(name, {"input_layernorm": hidden, "post_attention_layernorm": hidden})
        yield from _vectors(f"{name}.self_attn", {"q_norm": head, "k_norm": head})
        for local, (rows, columns) in attention.items():
            yield from _gptq4(f"{name}.self_attn.{local}_proj", rows, columns)
        yield f"{name}.mlp.gate.weight", _Stored("BF16", (config.num_experts, hidden))
        for expert in range(config.num_experts):
            yield from _mlp(f"{name}.mlp.experts.{expert}", hidden, config.moe_intermediate_size, _gptq4)
    yield from _vectors("model", {"norm": hidden})
    yield "lm_head.weight", _Stored("BF16", (vocabulary, hidden))


def _deepseek_config(layers: int | None) -> Any:
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        num_hidden_layers=layers or 61, architectures=["DeepseekV3ForCausalLM"], dtype="bfloat16"
    )
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    quantization["weight_block_size"] = [_GROUP, _GROUP]  # type: ignore[assignment]
    config.quantization_config = quantization
    return config


def _deepseek_tensors(config: Any) -> _Tensors:
    hidden, heads, experts = (
        getattr(config, key) for key in ("hidden_size", "num_attention_heads", "n_routed_experts")
    )
    yield "model.embed_tokens.weight", _Stored("BF16", (config.vocab_size, hidden))
    for layer in range(config.num_hidden_layers):
        name = f"model.layers.{layer}"
        yield from _vectors(name, {"input_layernorm": hidden, "post_attention_layernorm": hidden})
        yield from _latent_attention(f"{name}.self_attn", config, heads)
        if layer < config.first_k_dense_replace:
            yield from _mlp(f"{name}.mlp", hidden, config.intermediate_size, _fp8)
            continue
        yield f"{name}.mlp.gate.weight", _Stored("BF16", (experts, hidden))
        yield f"{name}.mlp.gate.e_score_correction_bias", _Stored("F32", (experts,))
        for part in (*(f"experts.{expert}" for expert in range(experts)), "shared_experts"):
            yield from _mlp(f"{name}.mlp.{part}", hidden, config.moe_intermediate_size, _fp8)
    yield from _vectors("model", {"norm": hidden})
    yield "lm_head.weight", _Stored("BF16", (config.vocab_size, hidden))


def _latent_attention(name: str, config: Any, heads: int) -> _Tensors:
    hidden, query, latent = (getattr(config, key) for key in ("hidden_size", "q_lora_rank", "kv_lora_rank"))
    rotary, plain, value = (
        getattr(config, key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    yield from _fp8(f"{name}.q_a_proj", query, hidden)
    yield from _fp8(f"{name}.q_b_proj", heads * (plain + rotary), query)
    yield from _fp8(f"{name}.kv_a_proj_with_mqa", latent + rotary, hidden)
    yield from _fp8(f"{name}.kv_b_proj", heads * (plain + value), latent)
    yield from _fp8(f"{name}.o_proj", hidden, heads * value)
    yield from _vectors(name, {"q_a_layernorm": query, "kv_a_layernorm": latent})


def _mlp(name: str, hidden: int, inner: int, linear: _Linear) -> _Tensors:
    yield from linear(f"{name}.gate_proj", inner, hidden)
    yield from linear(f"{name}.up_proj", inner, hidden)
    yield from linear(f"{name}.down_proj", hidden, inner)


def _vectors(name: str, sizes: dict[str, int]) -> _Tensors:
    for local, size in sizes.items():
        yield f"{name}.{local}.weight", _Stored("BF16", (size,))


def _gptq4(name: str, rows: int, columns: int) -> _Tensors:
    groups = columns // _GROUP
    indices = (np.arange(columns, dtype=np.int32) // _GROUP).tobytes()
    scales = np.full(groups * rows, 0.01, np.float16).tobytes()
    yield f"{name}.qweight", _Stored("I32", (columns // 8, rows))
    yield f"{name}.qzeros", _Stored("I32", (groups, rows // 8), b"\x77" * (groups * rows // 2))
    yield f"{name}.scales", _Stored("F16", (groups, rows), scales)
    yield f"{name}.g_idx", _Stored("I32", (columns,), indices)


def _fp8(name: str, rows: int, columns: int) -> _Tensors:
    yield f"{name}.weight", _Stored("F8_E4M3", (rows, columns))
    yield f"{name}.weight_scale_inv", _Stored("F32", (-(-rows // _GROUP), -(-columns // _GROUP)))


LARGE_MODELS = {
    "qwen3-30b-gptq4": LargeModel(_qwen3_config, _qwen3_tensors, 4),
    "deepseek-v3-fp8": LargeModel(_deepseek_config, _deepseek_tensors, 163),
}
