"""Small random Llamas, Granites, and Mistrals in the formats that FMS users have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hfq.checkpoint import write_safetensors
from hfq.formats import Format
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq

__all__ = [
    "ARCHITECTURES",
    "COMMON",
    "FORMATS",
    "HEADS",
    "HIDDEN",
    "INNER",
    "LAYERS",
    "PARITY",
    "write_fms_model",
]

HIDDEN, INNER, HEADS, VOCABULARY, LAYERS = 256, 384, 8, 128, 2
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "hidden_act": "silu",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 10000.0,
    "head_dim": HIDDEN // HEADS,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "granite": {"architectures": ["GraniteForCausalLM"], "model_type": "granite", **MULTIPLIERS},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def _gptq(symmetric: bool) -> tuple[Format, dict]:
    found = Gptq(zero_reading="word_plus_one", group_size=64, g_idx_length=HIDDEN, symmetric=symmetric)
    meta = {"quant_method": "gptq", "checkpoint_format": "gptq", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
    return found, {**meta, "bits": 4, "group_size": 64, "sym": symmetric}


def _compressed_tensors(strategy: str) -> dict:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }


FORMATS: dict[str, tuple[Format, dict]] = {
    "gptq-sym": _gptq(True),
    "gptq-asym": _gptq(False),
    "fp8-channel": (Fp8(strategy="channel"), _compressed_tensors("channel")),
    "fp8-tensor": (Fp8(strategy="tensor"), _compressed_tensors("tensor")),
    "fp8-block": (Fp8(strategy="block", block_structure=(128, 128), scale_name="weight_scale_inv"), BLOCKS),
}
PARITY = [
    (architecture, format, kv)
    for architecture in ("llama", "granite")
    for format in FORMATS
    for kv in ((8, 2) if format.startswith("gptq") else (2,))
]
"""Combinations whose logits must match transformers: GPTQ with 8 and 2 key heads, FP8 with 2."""


def write_fms_model(
    folder: Path, architecture: str, format: str, kv_heads: int, has_bias: bool = False, **options
) -> Path:
    """Writes a random model into a folder.

    Args:
        folder: The folder. It is created if missing.
        architecture: One of `ARCHITECTURES`.
        format: One of `FORMATS`. Any other name leaves everything unquantized.
        kv_heads: Number of key-value heads, out of 8 heads.
        has_bias: True if the attention layers have biases.
        options: Overrides of config.json.
    """
    weight_format, quantization = FORMATS.get(format, (None, None))
    tensors = _tensors(weight_format, kv_heads, has_bias)
    if options.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    widest_first = sorted(
        tensors.items(), key=lambda item: -item[1].dtype.itemsize
    )  # aligned, like the safetensors writer does it
    stored = {
        name: (safetensors_dtype(tensor.dtype), tuple(tensor.shape), memoryview(_bytes(tensor).numpy()))  # type: ignore[arg-type]
        for name, tensor in widest_first
    }
    write_safetensors(folder / "model.safetensors", stored, {"format": "pt"})
    config = (
        COMMON
        | ARCHITECTURES[architecture]
        | {"num_key_value_heads": kv_heads, "attention_bias": has_bias}
        | options
    )
    config |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _tensors(weight_format: Format | None, kv_heads: int, has_bias: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int, scale: float = 0.06) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    keys = HIDDEN // HEADS * kv_heads
    linears = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    tensors = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN, scale=1.0),
        "model.norm.weight": 1 + random(HIDDEN),
    }
    for layer in range(LAYERS):
        for local, size in linears.items():
            name, weight = f"model.layers.{layer}.{local}", random(*size)
            packed = {"weight": weight} if weight_format is None else weight_format.quantize(weight)
            packed |= {"bias": random(size[0], scale=0.5)} if has_bias and "self_attn" in local else {}
            if "g_idx" in packed:
                packed["g_idx"] = torch.arange(size[1], dtype=torch.int32) // 64
            tensors |= {f"{name}.{key}": tensor for key, tensor in packed.items()}
        for local in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{local}.weight"] = 1 + random(HIDDEN)
    return tensors | {"lm_head.weight": random(VOCABULARY, HIDDEN)}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
