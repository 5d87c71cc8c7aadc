"""Maker of GGUF files: names and writer of the package gguf, and the quantizers of ggml.

    python make_gguf.py OUTPUT

One folder for each of seven architectures, with a mix of types as llama-quantize makes it, and one for each
of 25 types. `gguf.quants` dequantizes the stored bytes for the reference. What llama.cpp's
convert_hf_to_gguf.py changes in a tensor is done here again, since no package has it.
"""

import ctypes
import importlib.util
import re
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from writing import VOCABULARY, build, run_all, save_dense, save_tokenizer, stored, write_reference

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
HEADS = {**SIZES, "head_dim": 64}
EXPERTS = {**HEADS, "moe_intermediate_size": 256}
MODELS = {
    "llama": ("llama", "llama", SIZES, "Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}),
    "mistral": ("mistral", "llama", SIZES, "Q3_K", {"attn_v": "Q5_K", "ffn_down": "Q4_K", "output": "Q6_K"}),
    "qwen2": ("qwen2", "qwen2", SIZES, "Q5_K", {"attn_v": "Q6_K", "token_embd": "Q6_K"}),
    "qwen3": ("qwen3", "qwen3", HEADS, "IQ4_XS", {"attn_v": "Q5_K", "output": "Q6_K"}),
    "qwen3moe": ("qwen3_moe", "qwen3moe", EXPERTS, "Q2_K", {"attn_v": "Q4_K", "ffn_down_exps": "Q3_K"}),
    "gemma3": ("gemma3_text", "gemma3", {**HEADS, "query_pre_attn_scalar": 64}, "Q4_0", {"ffn_down": "Q4_1"}),
    "phi3": ("phi3", "phi3", SIZES, "Q8_0", {"attn_qkv": "Q5_1", "output": "BF16"}),
}
"""{folder: (type in transformers, architecture, sizes, type of most tensors, types of others)}."""

TYPES = (
    *(
        "F16",
        "BF16",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
    ),
    *("IQ4_XS", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"),
    *("MXFP4", "NVFP4"),
)


def library() -> ctypes.CDLL:
    root = Path(importlib.util.find_spec("libggml").submodule_search_locations[0])
    found = ctypes.CDLL(str(next(root.glob("lib*/libggml-base.so"))))
    found.ggml_quantize_chunk.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
        ctypes.c_void_p,
    ]
    return found


def quantize(values: np.ndarray, kind: Type) -> np.ndarray:
    """Returns the stored bytes of float32 values, whose rows hold whole blocks, uint8 [..., bytes of a row]."""
    if kind in (Type.F32, Type.F16, Type.BF16):
        return gguf.quants.quantize(values, kind)
    rows = np.ascontiguousarray(values.reshape(-1, values.shape[-1]), np.float32)
    raw = np.empty((len(rows), gguf.quant_shape_to_byte_shape(rows.shape, kind)[-1]), np.uint8)
    importance = np.ones(rows.shape[-1], np.float32)
    ggml = library()
    ggml.ggml_quantize_init(int(kind))
    ggml.ggml_quantize_chunk(
        int(kind), rows.ctypes.data, raw.ctypes.data, 0, *rows.shape, importance.ctypes.data
    )
    return raw.reshape(*values.shape[:-1], -1)


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Orders the rows of each head as llama.cpp's rotary embedding of llama expects them."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def by_file(tensors: dict[str, torch.Tensor], architecture: str, layers: int) -> dict[str, list[str]]:
    """Returns the names in the checkpoint of each tensor of the file, several for stacked experts."""
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), layers
    )
    found: dict[str, list[str]] = {}
    for name in tensors:
        stacked = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        found.setdefault(names.get_name(stacked, (".weight", ".bias")), []).append(name)
    return {
        name: sorted(parts, key=lambda part: int((*re.findall(r"experts\.(\d+)", part), 0)[0]))
        for name, parts in found.items()
    }


def write_keys(writer: gguf.GGUFWriter, config) -> None:
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_vocab_size(VOCABULARY)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{index}" for index in range(VOCABULARY)])


def make(kind: str, architecture: str, sizes: dict, most: str, others: dict[str, str], **changes):
    def maker(folder: Path) -> str:
        model = build(kind, **sizes, **changes)
        config = model.config
        with tempfile.TemporaryDirectory() as source:
            tensors = stored(save_dense(model, Path(source)))
        config.save_pretrained(folder)
        save_tokenizer(folder)
        writer = gguf.GGUFWriter(folder / f"{most.lower()}.gguf", architecture)
        write_keys(writer, config)
        dense, used = {}, set()
        for name, parts in by_file(tensors, architecture, config.num_hidden_layers).items():
            value = np.stack([tensors[part].float().numpy() for part in parts])
            value = value if "_exps" in name else value[0]
            local = name.split(".")[-2]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(local)
            heads = heads if architecture == "llama" else None
            is_sum = architecture == "gemma3" and local.endswith("norm")
            value = permute(value, heads) if heads else value + np.float32(is_sum)
            is_float = name.endswith("bias") or value.ndim == 1 or local == "ffn_gate_inp"
            stored_as = Type.F32 if is_float else Type[others.get(local, most)]
            raw = quantize(value, stored_as)
            writer.add_tensor(name, raw, raw_dtype=stored_as)
            meant = gguf.quants.dequantize(raw, stored_as)
            meant = unpermute(meant, heads) if heads else meant - np.float32(is_sum)
            meant = meant if "_exps" in name else meant[None]
            dense |= {part: torch.from_numpy(own.copy()) for part, own in zip(parts, meant, strict=True)}
            used.add(stored_as.name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        write_reference(folder, dense, "gguf.quants.dequantize")
        return ", ".join(sorted(used))

    return maker


MAKERS = {
    **{name: make(*model) for name, model in MODELS.items()},
    **{f"type-{kind.lower()}": make("llama", "llama", SIZES, kind, {}) for kind in TYPES},
}

if __name__ == "__main__":
    run_all("gguf", MAKERS)
