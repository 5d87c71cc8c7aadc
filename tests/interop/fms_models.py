"""Small models of the FMS benchmark, and further architectures written by transformers."""

import json
import re
from pathlib import Path

import torch
import transformers

from benchmarks.fms.fms_models import COMMON, FORMATS, HEADS, HIDDEN, INNER, LAYERS, PARITY
from benchmarks.fms.fms_models import write_fms_model as write
from hfq.checkpoint import write_safetensors
from tests.support import tiny_models

__all__ = ["OTHERS", "PARITY", "write", "write_other"]

OTHERS = {
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32, "rope_theta": 5000.0}),
    "gpt_bigcode": (
        "GPTBigCodeForCausalLM",
        {
            "n_embd": HIDDEN,
            "n_inner": INNER,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": 64,
            "multi_query": True,
        },
    ),
    "granite_moe_hybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            "layers_block_type": ["attention"] * LAYERS,
            "num_local_experts": 0,
            "shared_intermediate_size": INNER,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "rope_theta": 10000.0,
        },
    ),
    "granite_moe_hybrid with Mamba": (
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 2,
            "shared_intermediate_size": INNER,
            "num_experts_per_tok": 1,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 12,
            "position_embedding_type": "rope",
            "rope_theta": 10000.0,
        },
    ),
    "bamba": (
        "BambaForCausalLM",
        {
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 12,
            "mamba_n_groups": 1,
            "attn_layer_indices": [1],
        },
    ),
    "scaled RoPE": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
}
"""Further architectures: transformers' class, and the options of its config."""


def write_other(folder: Path, name: str, format: str) -> Path:
    """Writes a random model of `OTHERS`. 2-D weights except embeddings and the head are quantized."""
    architecture, options = OTHERS[name]
    weight_format, quantization = FORMATS.get(format, (None, None))
    cls = getattr(transformers, architecture)
    common = {key: value for key, value in COMMON.items() if key not in ("head_dim", "rope_theta", "dtype")}
    config = cls.config_class(**common | {"num_key_value_heads": 2} | options)
    torch.manual_seed(3)
    cls(config).save_pretrained(folder)
    tensors = {}
    for key, tensor in tiny_models.stored_tensors(folder).items():
        stem, is_weight = key.removesuffix("weight"), key.endswith(".weight")
        is_quantized = (
            weight_format is not None
            and is_weight
            and tensor.dim() == 2
            and not re.search("embed|wte|wpe|lm_head", key)
        )
        if is_quantized and tensor.shape[0] % 32 == tensor.shape[1] % 64 == 0:
            packed = weight_format.quantize(3 * tensor)
            if "g_idx" in packed:
                packed["g_idx"] = torch.arange(tensor.shape[1], dtype=torch.int32) // 64
            tensors |= {stem + local: value for local, value in packed.items()}
        elif re.search("bias|norm", key) and tensor.is_floating_point():
            tensors[key] = torch.randn(tensor.shape) * 0.1 + ("norm" in key.lower() and is_weight)
        else:
            tensors[key] = tensor
    widest_first = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    stored = {key: tiny_models.as_stored(tensor) for key, tensor in widest_first}
    write_safetensors(folder / "model.safetensors", stored, {"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    written |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(written))
    return folder
