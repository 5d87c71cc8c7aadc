"""Shared code of the makers: tiny models with random weights, and reference logits.

A reference holds the logits of a plain transformers model in float32 with the exactly dequantized weights.
Its tensors have the names of an unquantized checkpoint on disk. A mixture of experts therefore lists each
expert, as checkpoints on the Hub do.
"""

import argparse
import json
import shutil
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
VOCABULARY = 256
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    **_IDS,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
_OWN = {
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128, "init_std": 0.06, "dropout": 0.0},
    "qwen2": {"tie_word_embeddings": True, "use_sliding_window": False},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True, "head_dim": 64},
    "qwen2_moe": {
        **_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 256,
        "use_sliding_window": False,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64},
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 256,
        "interleave_moe_layer_step": 1,
        "head_dim": 32,
        "no_rope_layers": [1, 1],
    },
    "deepseek_v3": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
}


def build(kind: str = "llama", **overrides) -> torch.nn.Module:
    """Returns a bfloat16 model of this type, with random biases and norms too."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **{**_SIZES, **_OWN.get(kind, {}), **overrides})
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.config.architectures = [type(model).__name__]  # models that were not loaded have none
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def save_dense(model, folder: Path) -> Path:
    """Saves the unquantized checkpoint, with a tokenizer, that peers quantize."""
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def tokens() -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(7))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of the checkpoint in a folder, from all shards."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        if not file.name.startswith("reference"):
            found |= load_file(file)
    return found


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], quantization_config: dict) -> None:
    """Writes a hand-made checkpoint into the folder of an unquantized one."""
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": quantization_config}, indent=1)
    )


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits.float()


def dense_logits(folder: Path, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the float32 logits of the plain model in `folder` with these unquantized tensors."""
    with tempfile.TemporaryDirectory() as temporary:
        config = json.loads((folder / "config.json").read_text())
        config.pop("quantization_config", None)
        (Path(temporary) / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
        wide = {
            name: (t.float() if t.is_floating_point() else t).contiguous().clone()
            for name, t in tensors.items()
        }
        save_file(wide, Path(temporary) / "model.safetensors", {"format": "pt"})
        options = {"dtype": torch.float32, "output_loading_info": True}
        model, loading = AutoModelForCausalLM.from_pretrained(temporary, **options)
    wrong = {key: value for key, value in loading.items() if value}
    assert not wrong, f"the dense tensors do not fit the model: {wrong}"
    assert all(p.dtype == torch.float32 for p in model.parameters())
    found = logits(model)
    model.set_attn_implementation("eager")
    # Near a tie, a router's choice depends on the order of sums, so the logits are no reference.
    assert (logits(model) - found).norm() <= 1e-5 * found.norm()
    return found


def write_reference(folder: Path, tensors: dict[str, torch.Tensor], method: str) -> torch.Tensor:
    """Writes reference_weightonly.safetensors. `method` names the dequantizing tool and function."""
    expected = dense_logits(folder, tensors)
    assert torch.isfinite(expected).all()
    result = {"input_ids": tokens(), "logits_fp32_weightonly": expected}
    save_file(result, folder / "reference_weightonly.safetensors", {"method": method})
    return expected


def stock_error(folder: Path, expected: torch.Tensor) -> str:
    """Describes how far the logits of plain transformers are from the reference. Never raises."""
    try:
        found = logits(AutoModelForCausalLM.from_pretrained(folder))
    except Exception as error:
        return f"a stock load fails: {type(error).__name__}: {str(error)[:160]}"
    return f"a stock load's logits are {(found - expected).norm() / expected.norm():.3f} away"


def run_all(peer: str, makers: dict[str, Callable[[Path], object]]) -> None:
    """Makes each requested checkpoint. Failures are printed and skipped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", help="part of the names of the checkpoints to make")
    options = parser.parse_args()
    for variant, make in makers.items():
        name = f"{peer}-{variant}"
        if options.only and options.only not in name:
            continue
        folder = options.output / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            note = make(folder)
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            print(
                f"SKIPPED {name}: {type(error).__name__}: "
                f"{str(error)[:600]}\n{traceback.format_exc(limit=-3)}",
                flush=True,
            )
        else:
            size = sum(file.stat().st_size for file in folder.iterdir())
            print(f"MADE {name}: {size // 1024} KiB; {note or ''}", flush=True)
