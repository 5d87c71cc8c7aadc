"""Small Llamas, Granites and Mistrals with random weights, packed in the dialects that FMS's users have."""

import json
import re
from pathlib import Path

import tiny_models
import torch
import transformers
from contract.cases import GPTQMODEL, compressed_tensors

from hfq.checkpoint import write_safetensors
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq

HIDDEN, INNER, HEADS, VOCABULARY, LAYERS = 256, 384, 8, 128, 2
COMMON = {
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "float32",
    "hidden_act": "silu", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10000.0, "head_dim": HIDDEN // HEADS,
}  # fmt: skip
MULTIPLIERS = {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22, "logits_scaling": 8.0}
ARCHITECTURES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "granite": {"architectures": ["GraniteForCausalLM"], "model_type": "granite", **MULTIPLIERS},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def gptq(symmetric: bool) -> tuple[Gptq, dict]:
    found = Gptq(zero_reading="word_plus_one", group_size=64, g_idx_length=HIDDEN, symmetric=symmetric)
    return found, {**GPTQMODEL, "bits": 4, "group_size": 64, "sym": symmetric}


FORMATS = {
    "gptq-sym": gptq(True),
    "gptq-asym": gptq(False),
    "fp8-channel": (Fp8(strategy="channel"), compressed_tensors("channel")),
    "fp8-tensor": (Fp8(strategy="tensor"), compressed_tensors("tensor")),
    "fp8-block": (Fp8(strategy="block", block_structure=(128, 128), scale_name="weight_scale_inv"), BLOCKS),
}
PARITY = [(architecture, format, kv) for architecture in ("llama", "granite") for format in FORMATS
          for kv in ((8, 2) if format.startswith("gptq") else (2,))]  # fmt: skip
"""The combinations whose logits must be those of transformers: GPTQ with 8 and 2 key heads, FP8 with 2."""


def write(folder: Path, architecture: str, format: str, kv_heads: int, has_bias: bool = False, **options) -> Path:
    """Writes a model into a folder; `options` edit its config. Without a format ("dense") nothing is packed."""
    weight_format, quantization = FORMATS.get(format, (None, None))
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int, scale: float = 0.06) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    keys = HIDDEN // HEADS * kv_heads
    linears = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (keys, HIDDEN), "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": random(VOCABULARY, HIDDEN, scale=1.0), "model.norm.weight": 1 + random(HIDDEN)}
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
    if not options.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = random(VOCABULARY, HIDDEN)
    tiny_models.write_model(folder, tensors, quantization)
    config = COMMON | ARCHITECTURES[architecture] | {"num_key_value_heads": kv_heads, "attention_bias": has_bias} | options
    config |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


OTHERS = {
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32, "rope_theta": 5000.0}),
    "gpt_bigcode": (
        "GPTBigCodeForCausalLM",
        {"n_embd": HIDDEN, "n_inner": INNER, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64, "multi_query": True},
    ),
    "granite_moe_hybrid": (
        "GraniteMoeHybridForCausalLM",
        {"layers_block_type": ["attention"] * LAYERS, "num_local_experts": 0, "shared_intermediate_size": INNER,
         "num_experts_per_tok": 0, "position_embedding_type": "rope", "rope_theta": 10000.0},
    ),
    "bamba": (
        "BambaForCausalLM",
        {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 12, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    ),
    "scaled RoPE": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
    ),
}  # fmt: skip
"""Further architectures: transformers' class, and the options of its config."""


def write_other(folder: Path, name: str, format: str) -> Path:
    """Writes a random model of one of `OTHERS`, its 2-D weights packed but for embeddings and the head."""
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
        is_packed = (
            weight_format is not None and is_weight and tensor.dim() == 2 and not re.search("embed|wte|wpe|lm_head", key)
        )
        if is_packed and tensor.shape[0] % 32 == tensor.shape[1] % 64 == 0:
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
