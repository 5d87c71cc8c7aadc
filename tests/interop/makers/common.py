"""Shared code of the makers: random models, a tokenizer, and reference logits."""

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 256
_BASE = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "initializer_range": 0.06,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = {
    **_BASE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
CONFIGS = {
    "llama": {**_LLAMA, "model_type": "llama"},
    "qwen2-tied": {**_LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "opt": {
        **_BASE,
        "model_type": "opt",
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "ffn_dim": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "init_std": 0.06,
    },
    "gpt2": {**_BASE, "model_type": "gpt2", "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mixtral": {
        **_LLAMA,
        "model_type": "mixtral",
        "intermediate_size": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen2moe": {
        **_LLAMA,
        **_EXPERTS,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 128,
        "decoder_sparse_step": 1,
    },
    "qwen3moe": {**_LLAMA, **_EXPERTS, "model_type": "qwen3_moe", "decoder_sparse_step": 1},
    "gptoss": {
        **_LLAMA,
        "model_type": "gpt_oss",
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
    "olmoe": {**_LLAMA, **_EXPERTS, "model_type": "olmoe", "intermediate_size": 64},
    "glm4moe": {
        **_LLAMA,
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek-v3": {
        **_LLAMA,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
    },
}
_MIXTRAL_NAMES = {"1": "gate_proj", "2": "down_proj", "3": "up_proj"}

Edit = Callable[[torch.nn.Module], None]


def build(kind: str, edit: Edit | None = None, **changes):
    """Returns a random bfloat16 model. Random biases and norms reveal lost ones."""
    config = AutoConfig.for_model(**{**CONFIGS[kind], **changes})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if edit is not None:
            edit(model)
    return model.to(torch.bfloat16)


def some_rows_positive(model) -> None:
    """Makes every eighth row of some projections positive, so that zero points of 0 occur."""
    for name, parameter in model.named_parameters():
        if re.search(r"[qk]_proj\.weight$|down_proj(\.weight)?$", name):
            parameter[..., ::8, :] = parameter[..., ::8, :].abs() + 0.01


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>"])}
    words.update({f"w{index}": index for index in range(4, VOCABULARY)})
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)
    return fast


def save_dense(folder: Path, kind: str, edit: Edit | None = None, **changes) -> Path:
    """Saves an unquantized model as a peer's quantizer loads it, and returns the folder."""
    build(kind, edit, **changes).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def calibration(rows: int = 8, length: int = 48) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(4, VOCABULARY, (rows, length), generator=generator).tolist()
    return [{"input_ids": row, "attention_mask": [1] * length} for row in tokens]


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of all shards."""
    paths = (path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith("reference"))
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def by_module(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the stored tensors as {module: {local name: tensor}}."""
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, local = name.rpartition(".")
        modules.setdefault(module, {})[local] = tensor
    return modules


def quantization_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def is_gpt2(folder: Path) -> bool:
    """True if the linear layers of the unquantized model are [in, out]."""
    return json.loads((folder / "config.json").read_text())["model_type"] == "gpt2"


def _plain_name(name: str) -> str:
    """Returns Mixtral's expert names in the form of the other models."""
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return re.sub(r"\.w([123])\.weight$", lambda match: f".{_MIXTRAL_NAMES[match[1]]}.weight", name)


def _parameter(name: str, weights: dict[str, torch.Tensor], interleaved: bool) -> torch.Tensor:
    """Returns the value of a parameter of the plain model, whose experts are fused.

    Experts have shape [experts, out, in], with gates before ups. Only gpt-oss has [experts, in, out],
    alternating gates and ups, and biases.
    """
    if name in weights:
        return weights.pop(name)
    experts, _, fused = name.rpartition(".")
    local = "bias" if fused.endswith("_bias") else "weight"
    fused = fused.removesuffix("_bias")
    parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else (fused,)
    found = []
    for expert in range(len({key.split(".")[-3] for key in weights if key.startswith(f"{experts}.")})):
        values = [weights.pop(f"{experts}.{expert}.{part}.{local}") for part in parts]
        found.append(torch.stack(values, dim=1).flatten(0, 1) if interleaved else torch.cat(values))
    return torch.stack(found).transpose(1, -1) if interleaved and local == "weight" else torch.stack(found)


def write_reference(folder: Path, weights: dict[str, torch.Tensor], tolerance: str | None = None) -> None:
    """Writes the float32 logits of a plain transformers model with exactly these `weights`."""
    config = json.loads((folder / "config.json").read_text())
    config = AutoConfig.for_model(
        **{key: value for key, value in config.items() if key != "quantization_config"}
    )
    weights = {_plain_name(name): tensor.detach().float() for name, tensor in weights.items()}
    if config.tie_word_embeddings and "lm_head.weight" not in weights:
        weights["lm_head.weight"] = next(
            tensor for name, tensor in weights.items() if re.search(r"embed_tokens|wte", name)
        )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    interleaved = config.model_type == "gpt_oss"
    model.load_state_dict({name: _parameter(name, weights, interleaved) for name in model.state_dict()})
    tokens = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits = model(tokens).logits
    if weights or not logits.isfinite().all():
        raise RuntimeError(
            f"{folder.name}: the plain model has no place for {sorted(weights)}, or its logits are not finite"
        )
    metadata = {"format": "pt", **({"tolerance": tolerance} if tolerance else {})}
    reference = {"input_ids": tokens, "logits_fp32_weightonly": logits.contiguous()}
    save_file(reference, folder / "reference_weightonly.safetensors", metadata)


def run(output: Path, makers: dict[str, Callable[[Path], None]]) -> None:
    """Makes each checkpoint and prints failures. The peers' logs stay out of the current folder."""
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    for name, make in makers.items():
        with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
            try:
                make(Path(temporary) / name)
            except (
                Exception
            ) as error:  # a peer may raise any error, which must not stop the other checkpoints
                print(f"\nSKIPPED {name}: {type(error).__name__}: {error}", flush=True)
                continue
            shutil.rmtree(output / name, ignore_errors=True)
            shutil.move(Path(temporary) / name, output / name)
            print(f"\nmade {name}", flush=True)
