"""Tiny mixtures of experts under every naming scheme that their checkpoints have, packed by hfq's own formats."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import tiny_models
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfq.checkpoint import write_safetensors
from hfq.formats.base import Format
from hfq.formats.dense import Dense

HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN, LAYERS, TOKENS = 64, 96, 4, 2, 2, 80
COMMON = {
    "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": TOKENS, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "num_experts_per_tok": CHOSEN, "dtype": "float32", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.1,
}  # fmt: skip
QWEN = {**COMMON, "num_experts": EXPERTS, "moe_intermediate_size": INTERMEDIATE}
DEEPSEEK = {
    **COMMON, "n_routed_experts": EXPERTS, "moe_intermediate_size": INTERMEDIATE, "n_shared_experts": 1, "kv_lora_rank": 32,
    "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4, "head_dim": 16,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MODELS = {
    "mixtral": {"model_type": "mixtral", **COMMON, "num_local_experts": EXPERTS},
    "qwen3": {"model_type": "qwen3_moe", **QWEN},
    "qwen2": {"model_type": "qwen2_moe", **QWEN, "shared_expert_intermediate_size": 32},
    "deepseek-v3": {"model_type": "deepseek_v3", **DEEPSEEK},
    "deepseek-v2": {"model_type": "deepseek_v2", **DEEPSEEK},
    "gpt-oss": {"model_type": "gpt_oss", **COMMON, "num_local_experts": EXPERTS},
    "granite": {"model_type": "granitemoe", **COMMON, "num_local_experts": EXPERTS},
}
SPLIT = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint names what transformers names otherwise.

    Attributes:
        id: What a test calls it.
        model: The model, a key of `MODELS`.
        weight_format: What its linear layers are packed as.
        config: Its quantization_config.
        renamed: Parts of names: in the model → in the checkpoint.
        projections: gate, up and down of one expert; or gate_up and down; a name with a `*` is fused over all experts.
    """

    id: str
    model: str
    weight_format: Format
    config: dict
    renamed: dict[str, str] = field(default_factory=dict)
    projections: tuple[str, ...] = SPLIT


@dataclass(frozen=True)
class Written:
    """A checkpoint in memory: its tensors, and the state of a plain model of the weights that they stand for."""

    scheme: Scheme
    tensors: dict[str, torch.Tensor]
    plain: dict[str, torch.Tensor]

    def save(self, folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = self.tensors if tensors is None else tensors
        widest_first = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
        stored = {name: tiny_models.as_stored(tensor) for name, tensor in widest_first}
        write_safetensors(folder / "model.safetensors", stored, {"format": "pt"})
        config = {**model_config(self.scheme.model).to_dict(), "quantization_config": self.scheme.config}
        (folder / "config.json").write_text(json.dumps(config))
        return folder


def model_config(model: str):
    values = dict(MODELS[model])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    cls = type(AutoModelForCausalLM.from_config(config)).__name__
    config.architectures = [cls]
    return config


def plain_model(model: str, state: dict[str, torch.Tensor] | None = None):
    """A float32 model without hfq: random, or of a state."""
    torch.manual_seed(11)
    plain = AutoModelForCausalLM.from_config(model_config(model)).eval()
    if state is None:
        for name, tensor in plain.state_dict().items():
            if name.endswith(("bias", "sinks")):
                tensor.copy_((torch.randn(tensor.shape) * 0.1).bfloat16())
        return plain
    plain.load_state_dict(state)
    return plain


def pack(scheme: Scheme, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(the tensors of a packed weight, the weight that they stand for)."""
    tensors = scheme.weight_format.quantize(weight)
    if isinstance(scheme.weight_format, Dense):
        return tensors, weight
    return tensors, tiny_models.settled(scheme.weight_format, tensors, scheme.config, tuple(weight.shape)).dequantize(tensors)


def write(scheme: Scheme, is_packed: Callable[[str], bool] = lambda name: name.endswith("_proj")) -> Written:
    """The checkpoint of a random model: all experts, and every other layer for whose name in the model `is_packed` holds."""
    state = {name: tensor.detach().clone() for name, tensor in plain_model(scheme.model).state_dict().items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        module, _, local = name.rpartition(".")
        if module.endswith(".experts"):
            _write_experts(scheme, tensors, state, module, local)
        elif local == "weight" and tensor.dim() == 2 and is_packed(module):
            packed, state[name] = pack(scheme, tensor)
            tensors |= {f"{in_checkpoint(scheme, module)}.{key}": value for key, value in packed.items()}
        else:
            tensors[in_checkpoint(scheme, name)] = tensor
    return Written(scheme, tensors, state)


def in_checkpoint(scheme: Scheme, name: str) -> str:
    for part, stored in scheme.renamed.items():
        name = name.replace(part, stored)
    return name


def _write_experts(scheme: Scheme, tensors: dict, state: dict, module: str, local: str) -> None:
    """Stores one fused parameter of the model as the scheme does, and puts what it then stands for into the state."""
    path, fused = in_checkpoint(scheme, module), state[f"{module}.{local}"]
    if local.endswith("_bias"):
        tensors[f"{path}.{local}"] = fused.bfloat16()  # gpt-oss alone
        return
    is_transposed = scheme.model == "gpt-oss"
    stacked: dict[str, list[torch.Tensor]] = {}
    for expert in range(EXPERTS):
        weight = fused[expert].t() if is_transposed else fused[expert]
        restored = []
        for projection, part in _parts(scheme, local, weight):
            packed, real = pack(scheme, part)
            restored.append(real)
            for key, tensor in packed.items():
                if "*" in projection:
                    stacked.setdefault(f"{projection.replace('*', '')}{key}", []).append(tensor)
                else:
                    tensors[f"{path}.{expert}.{projection}.{key}"] = tensor
        real = torch.cat(restored)
        fused[expert] = real.t() if is_transposed else real
    stem = path.removesuffix(".experts") if scheme.model == "granite" else path
    tensors |= {f"{stem}.{key}": torch.stack(parts) for key, parts in stacked.items()}


def _parts(scheme: Scheme, local: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if local == "down_proj":
        return [(scheme.projections[-1], weight)]
    if len(scheme.projections) == 2:
        return [(scheme.projections[0], weight)]
    return list(zip(scheme.projections[:2], weight.chunk(2), strict=True))
