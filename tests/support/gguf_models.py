"""Tiny models of every architecture, and their GGUF files as the converter of llama.cpp lays them out.

The layouts are written down from `conversion/` of llama.cpp, as functions from the model to the file, and act
on numbers of elements. So each weight is known in both orders without a table of hfq.
"""

import functools
import re

import numpy as np
import torch
import transformers

from hfq.checkpoint.gguf.block_types import block_type
from hfq.formats.codecs.ggml.blocks import decode_into
from tests.support.gguf_files import random_blocks, write_gguf

__all__ = ["MODELS", "make_model", "write_model", "write_random_llama"]

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "routed_scaling_factor": 1.5,
}
GROUPS = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
}
MODELS = {
    "llama": ("llama", "Llama", {}),
    "llama-tied": ("llama", "Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", "Llama", {"attention_bias": True}),
    "mistral": ("llama", "Mistral", {"sliding_window": None}),
    "mixtral": ("llama", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen3": ("qwen3", "Qwen3", {}),
    "qwen2moe": ("qwen2moe", "Qwen2Moe", {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 32}),
    "qwen3moe": ("qwen3moe", "Qwen3Moe", {**MOE, "num_experts": 4}),
    "qwen35": ("qwen35", "Qwen3_5", {**LINEAR, "tie_word_embeddings": True}),
    "gemma": ("gemma", "Gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", "Gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3", "Gemma3", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}),
    "phi3": ("phi3", "Phi3", {"head_dim": None}),
    "gpt-oss": ("gpt-oss", "GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4moe": (
        "glm4moe",
        "Glm4Moe",
        {**MOE, **GROUPS, "n_routed_experts": 4, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True},
    ),
    "deepseek2": ("deepseek2", "DeepseekV2", {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek3": ("deepseek2", "DeepseekV3", {**DEEPSEEK, **GROUPS, "q_lora_rank": 32}),
    "glm4moelite": ("deepseek2", "Glm4MoeLite", {**DEEPSEEK, **GROUPS, "q_lora_rank": 32}),
    "gpt2": ("gpt2", "GPT2", {}),
}  # fmt: skip
"""{name: (architecture of the file, class in transformers, config)}."""

_NAMES = [
    (r"model\.embed_tokens", "token_embd"),
    (r"model\.norm", "output_norm"),
    (r"lm_head", "output"),
    (r"model\.layers\.(\d+)\.(.*)", r"blk.\1.\2"),
    (r"self_attn\.(q|k|v|qkv)_proj", r"attn_\1"),
    (r"self_attn\.o_proj", "attn_output"),
    (r"self_attn\.(q|k)_norm", r"attn_\1_norm"),
    (r"input_layernorm", "attn_norm"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
    (r"mlp\.shared_experts?\.(gate|up|down)_proj", r"ffn_\1_shexp"),
    (r"mlp\.shared_expert_gate", "ffn_gate_inp_shexp"),
    (r"mlp\.(gate|router)\.weight", "ffn_gate_inp.weight"),
    (r"mlp\.router\.bias", "ffn_gate_inp.bias"),
    (r"mlp\.gate\.e_score_correction_bias", "exp_probs_b.bias"),
    (r"self_attn\.sinks", "attn_sinks.weight"),
    (r"self_attn\.q_a_proj", "attn_q_a"),
    (r"self_attn\.q_b_proj", "attn_q_b"),
    (r"self_attn\.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    (r"self_attn\.q_a_layernorm", "attn_q_a_norm"),
    (r"self_attn\.kv_a_layernorm", "attn_kv_a_norm"),
    (r"linear_attn\.in_proj_qkv", "attn_qkv"),
    (r"linear_attn\.in_proj_z", "attn_gate"),
    (r"linear_attn\.in_proj_a", "ssm_alpha"),
    (r"linear_attn\.in_proj_b", "ssm_beta"),
    (r"linear_attn\.conv1d", "ssm_conv1d"),
    (r"linear_attn\.norm", "ssm_norm"),
    (r"linear_attn\.out_proj", "ssm_out"),
    (r"linear_attn\.A_log", "ssm_a"),
    (r"linear_attn\.dt_bias", "ssm_dt.bias"),
    (r"transformer\.wte", "token_embd"),
    (r"transformer\.wpe", "position_embd"),
    (r"transformer\.ln_f", "output_norm"),
    (r"transformer\.h\.(\d+)\.(.*)", r"blk.\1.\2"),
    (r"ln_1", "attn_norm"),
    (r"ln_2", "ffn_norm"),
    (r"attn\.c_attn", "attn_qkv"),
    (r"attn\.c_proj", "attn_output"),
    (r"mlp\.c_fc", "ffn_up"),
    (r"mlp\.c_proj", "ffn_down"),
]  # fmt: skip
_OWN = {
    "phi3": [(r"mlp\.gate_up_proj", "ffn_up")],
    **{
        name: [
            (r"post_attention_layernorm", "post_attention_norm"),
            (r"pre_feedforward_layernorm", "ffn_norm"),
            (r"post_feedforward_layernorm", "post_ffw_norm"),
        ]
        for name in ("gemma2", "gemma3", "glm4moe", "qwen35", "gpt-oss")
    },
}
_SECOND = [(r"post_attention_layernorm", "ffn_norm")]


def make_model(name, **options):
    """Returns a model with random weights, also in its norms and biases."""
    _, cls, own = MODELS[name]
    torch.manual_seed(0)
    if cls == "GPT2":
        config = transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=2, vocab_size=40, n_positions=64, **options
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        kind = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}.get(cls, f"{cls}Config")
        sizes = {key: value for key, value in {**BASE, **own, **options}.items() if value is not None}
        config = getattr(transformers, kind)(**sizes)
        model = getattr(transformers, f"{cls}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.state_dict().items():
            if parameter.is_floating_point() and parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "experts" in key or "router" in key or "mlp.gate" in key:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    config.dtype = torch.float32
    return model.eval()


def _file_name(name, architecture):
    """Returns the name of a tensor in the file."""
    for pattern, target in [*_OWN.get(architecture, []), *_SECOND, *_NAMES]:
        name = re.sub(rf"(?:(?<=^)|(?<=\d\.)){pattern}(?=\.|$)", target, name)
    return name


def _tiled(index, config, start=0, rows=True):
    """Returns an index whose value heads are numbered across key heads (`_reorder_v_heads`)."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    index = index if rows else index.T
    head, rest = index[:start], index[start:]
    rest = rest.reshape(keys, values // keys, -1, *rest.shape[1:]).swapaxes(0, 1).reshape(rest.shape)
    found = np.concatenate([head, rest])
    return found if rows else found.T


def _parts(name, index, model, architecture):
    """Yields (name in the file, numbers of the model's elements in the order of the file)."""
    config, target = model.config, _file_name(name, architecture)
    if architecture == "llama" and re.search(r"attn_[qk]\.", target):
        heads = config.num_attention_heads if "attn_q" in target else config.num_key_value_heads
        shape = (heads, 2, index.shape[0] // heads // 2, *index.shape[1:])
        yield target, index.reshape(shape).swapaxes(1, 2).reshape(index.shape)
    elif found := re.fullmatch(r"(.*)mlp\.experts\.(gate_up|down)_proj(_bias)?", name):
        layer, suffix = _file_name(found[1], architecture), "bias" if found[3] else "weight"
        if architecture == "gpt-oss" and not found[3]:
            index = index.swapaxes(1, 2)
        if found[2] == "down":
            yield f"{layer}ffn_down_exps.{suffix}", index
        else:
            half = index.shape[1] // 2
            is_interleaved = architecture == "gpt-oss"
            gate, up = (
                (index[:, ::2], index[:, 1::2]) if is_interleaved else (index[:, :half], index[:, half:])
            )
            yield f"{layer}ffn_gate_exps.{suffix}", gate
            yield f"{layer}ffn_up_exps.{suffix}", up
    elif "kv_b_proj" in name:
        layer = name.split(".")[2]
        heads = index.reshape(config.num_attention_heads, -1, index.shape[1])
        keys, values = np.split(heads, [config.qk_nope_head_dim], 1)
        yield f"blk.{layer}.attn_k_b.weight", keys.swapaxes(1, 2)
        yield f"blk.{layer}.attn_v_b.weight", values
    elif architecture == "gpt2" and re.search(r"\.c_\w+\.weight", name):
        yield target, index.T
    elif "shared_expert_gate" in name:
        yield target, index[0]
    elif "linear_attn" in name:
        start = index.shape[0] - config.linear_num_value_heads * config.linear_value_head_dim
        if "conv1d" in name:
            yield target, _tiled(index[:, 0], config, start)
        elif "in_proj_qkv" in name:
            yield target, _tiled(index, config, start)
        elif "out_proj" in name:
            yield target, _tiled(index, config, rows=False)
        else:
            yield target, index if ".norm" in name else _tiled(index, config)
    else:
        yield target, index


def _encoded(values, kind):
    """Returns the bytes of float32 values in rows of a type, and the values that these mean."""
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        stored = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
        return stored.contiguous().view(torch.uint8).numpy().tobytes(), stored.float().numpy()
    grouped = values.reshape(-1, 32)
    if kind == "MXFP4":
        return _encoded_mxfp4(grouped, values.shape)
    top = np.abs(grouped).max(1, keepdims=True)
    scales = (top / {"Q8_0": 127, "Q4_0": 8}[kind]).astype(np.float16)
    codes = np.rint(grouped / np.maximum(scales.astype(np.float32), 1e-9)).astype(np.int32)
    means = np.clip(codes, *{"Q8_0": (-127, 127), "Q4_0": (-8, 7)}[kind])
    if kind == "Q8_0":
        packed = means.astype(np.int8).view(np.uint8)
    else:
        nibbles = (means + 8).astype(np.uint8)
        packed = nibbles[:, :16] | nibbles[:, 16:] << 4
    raw = np.concatenate([scales.view(np.uint8), packed], 1).tobytes()
    return raw, (scales.astype(np.float32) * means.astype(np.float32)).reshape(values.shape)


def _encoded_mxfp4(grouped, shape):
    exponents = np.floor(np.log2(np.maximum(np.abs(grouped).max(1, keepdims=True), 1e-30))) - 2
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    scaled = grouped / 2.0**exponents
    codes = np.abs(np.abs(scaled)[:, :, None] - magnitudes).argmin(2).astype(np.uint8)
    is_negative = (scaled < 0) & (codes > 0)  # ggml has no negative zero
    meant = np.where(is_negative, -1, 1) * magnitudes[codes] * 2.0**exponents
    codes += 8 * is_negative.astype(np.uint8)
    stored = [(exponents + 127).astype(np.uint8), codes[:, :16] | codes[:, 16:] << 4]
    return np.concatenate(stored, 1).tobytes(), meant.astype(np.float32).reshape(shape)


def _keys(model, architecture):
    """Returns the metadata that hfq reads."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    theta = next(
        (part["rope_theta"] for part in (rope.get("full_attention"), rope) if part and "rope_theta" in part),
        None,
    )
    head_dim = getattr(config, "head_dim", None)
    scaling = rope["rope_type"] if rope.get("rope_type") in ("linear", "yarn") else None
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim and int(head_dim * rope.get("partial_rotary_factor", 1)),
        "rope.scaling.type": scaling,
        "rope.scaling.factor": scaling and float(rope["factor"]),
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        "rope.freq_base": None if theta is None else float(theta),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_epsilon", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
    }
    if architecture == "deepseek2":
        found |= {"attention.head_count_kv": 1, "expert_weights_scale": config.routed_scaling_factor}
    if architecture == "qwen35":
        found |= {
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "full_attention_interval": 2,
            "rope.dimension_sections": [3, 3, 2, 0],
        }
    keys = {f"{architecture}.{key}": value for key, value in found.items() if value is not None}
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(config.vocab_size)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
    }
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": "tiny",
        **keys,
        **tokenizer,
    }


def write_model(folder, name, model, kinds=("Q8_0", "Q4_0"), extra=None, metadata=None):
    """Writes config.json and the GGUF file of a model, whose weights become those of the file.

    Args:
        folder: The folder, which is created.
        name: One of `MODELS`.
        model: The model.
        kinds: Types of tensors with rows of whole blocks and at least two dimensions, in turn; or a function
            from the name in the file to the type.
        extra: Further tensors {name: (type, shape, bytes)}.
        metadata: Further keys, or other values of keys.
    """
    folder.mkdir(parents=True, exist_ok=True)
    architecture = MODELS[name][0]
    ties = model.all_tied_weights_keys
    tensors = {}
    for key, parameter in model.state_dict().items():
        if key in ties:
            continue
        value = parameter.detach().float().numpy().copy()
        index = np.arange(value.size).reshape(value.shape)
        for target, places in _parts(key, index, model, architecture):
            is_sum = architecture in ("gemma", "gemma2", "gemma3") or (
                architecture == "qwen35" and "ssm" not in target
            )
            is_sum = is_sum and "norm" in target
            stored = value.reshape(-1)[places]
            stored = (
                stored + np.float32(1) if is_sum else -np.exp(stored) if target.endswith("ssm_a") else stored
            )
            is_weight = places.ndim > 1 and "conv1d" not in target and "_inp" not in target
            chosen = kinds(target) if callable(kinds) else kinds[len(tensors) % len(kinds)]
            kind = chosen if is_weight and not target.endswith("bias") else "F32"
            is_whole = kind in ("F32", "F16", "BF16") or places.shape[-1] % 32 == 0
            raw, meant = _encoded(stored, kind if is_whole else "F32")
            tensors[target] = (kind if is_whole else "F32", places.shape, raw)
            meant = meant - np.float32(1) if is_sum else meant
            if not target.endswith("ssm_a"):
                value.reshape(-1)[places] = meant
        parameter.data.copy_(torch.from_numpy(value))
    write_gguf(
        folder / "model.gguf",
        {**_keys(model, architecture), **(metadata or {})},
        {**tensors, **(extra or {})},
    )
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


def write_random_llama(folder, kind, layers=2, **options):
    """Writes a Llama whose weights are random blocks of a type, with config.json; returns the folder."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 64}
    config = transformers.LlamaConfig(**{**BASE, **sizes, "num_hidden_layers": layers, **options})
    shapes = {"token_embd": (64, 256), "output": (64, 256)}
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.attn_q": (256, 256),
            f"blk.{layer}.attn_k": (128, 256),
            f"blk.{layer}.attn_v": (128, 256),
            f"blk.{layer}.attn_output": (256, 256),
            f"blk.{layer}.ffn_gate": (512, 256),
            f"blk.{layer}.ffn_up": (512, 256),
            f"blk.{layer}.ffn_down": (256, 512),
        }
    random, found = np.random.default_rng(0), block_type(kind)
    tensors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        count = shape[0] * shape[1] // found.size
        raw = random_blocks(kind, count, seed, scale=_scale_of(kind))
        tensors[f"{name}.weight"] = (kind, shape, raw.tobytes())
    for name in (
        "output_norm",
        *(f"blk.{layer}.{local}_norm" for layer in range(layers) for local in ("attn", "ffn")),
    ):
        norm = (1 + 0.1 * random.standard_normal(256)).astype(np.float32)
        tensors[f"{name}.weight"] = ("F32", (256,), norm.tobytes())
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.embedding_length": 256,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(64)],
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
    }
    write_gguf(folder / "model.gguf", metadata, tensors)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.float32
    config.save_pretrained(folder)
    return folder


@functools.cache
def _scale_of(kind):
    """Returns the amplitude of scales with which random weights deviate by 0.06."""
    found, blocks = block_type(kind), random_blocks(kind, 64, scale=1.0)
    panel = torch.empty(64, found.size)
    decode_into(panel, torch.from_numpy(blocks), kind, found.nbytes)
    return 0.06 / float(panel.std())
