"""Tiny mixtures of experts under every naming scheme of their checkpoints, in hfq's formats."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfq.checkpoint import write_safetensors
from hfq.formats.base import Format
from hfq.formats.bitsandbytes import Bnb4Bit
from hfq.formats.compressed_tensors import PackQuantized
from hfq.formats.fp8 import Fp8
from hfq.formats.gpt_oss import GptOssMxfp4
from hfq.formats.gptq import Gptq
from hfq.formats.mlx.affine import Mlx
from hfq.formats.modelopt.experts import ModeloptExpert
from hfq.formats.nvfp4 import Nvfp4
from hfq.formats.unquantized import Unquantized
from tests.support import models, tiny_models

HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN, LAYERS, TOKENS = 64, 96, 4, 2, 2, 80
COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": TOKENS,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "num_experts_per_tok": CHOSEN,
    "dtype": "float32",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
QWEN = {**COMMON, "num_experts": EXPERTS, "moe_intermediate_size": INTERMEDIATE}
DEEPSEEK = {
    **COMMON,
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": INTERMEDIATE,
    "n_shared_experts": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MODELS = {
    "mixtral": {"model_type": "mixtral", **COMMON, "num_local_experts": EXPERTS},
    "qwen3": {"model_type": "qwen3_moe", **QWEN},
    "qwen2": {"model_type": "qwen2_moe", **QWEN, "shared_expert_intermediate_size": 32},
    "deepseek-v3": {"model_type": "deepseek_v3", **DEEPSEEK},
    "deepseek-v2": {"model_type": "deepseek_v2", **DEEPSEEK},
    "gpt-oss": {"model_type": "gpt_oss", **COMMON, "num_local_experts": EXPERTS},
    "granite": {"model_type": "granitemoe", **COMMON, "num_local_experts": EXPERTS},
    "llama4": {
        "model_type": "llama4_text",
        **COMMON,
        "num_local_experts": EXPERTS,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": INTERMEDIATE,
    },
    "nemotron": {
        "model_type": "nemotron_h",
        **COMMON,
        "layers_block_type": ["attention", "moe"],
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": INTERMEDIATE,
        "moe_shared_expert_intermediate_size": 32,
    },
}
FAMILIES = {
    "olmoe": QWEN,
    "phimoe": {**COMMON, "num_local_experts": EXPERTS},
    "glm4_moe": {**DEEPSEEK, "first_k_dense_replace": 0},
    "ernie4_5_moe": {**QWEN, "moe_num_experts": EXPERTS, "moe_k": CHOSEN, "moe_layer_start_index": 0},
}
"""Further model families, with the sizes in their configs."""
SPLIT = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Scheme:
    """Names in a checkpoint that differ from those in transformers.

    Attributes:
        id: Name in test ids.
        model: The model, a key of `MODELS`.
        weight_format: Format of its linear layers.
        config: Its quantization_config.
        renamed: Parts of names: in the model → in the checkpoint.
        projections: gate, up, and down of one expert; or gate_up and down. A name with a `*` is fused over
            all
            experts.
    """

    id: str
    model: str
    weight_format: Format
    config: dict
    renamed: dict[str, str] = field(default_factory=dict)
    projections: tuple[str, ...] = SPLIT


@dataclass(frozen=True)
class Written:
    """A checkpoint in memory: its tensors, and the state of a plain model with the same weights."""

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
    """Returns a float32 model without hfq, random or with this state."""
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
    """Returns (the tensors of a quantized weight, the weight that they represent)."""
    tensors = scheme.weight_format.quantize(weight)
    if isinstance(scheme.weight_format, Unquantized):
        return tensors, weight
    return tensors, tiny_models.settled(
        scheme.weight_format, tensors, scheme.config, tuple(weight.shape)
    ).dequantize(tensors)


def write(
    scheme: Scheme, is_quantized: Callable[[str], bool] = lambda name: name.endswith("_proj")
) -> Written:
    """Returns the checkpoint of a random model, with experts and the layers that `is_quantized` selects."""
    state = {name: tensor.detach().clone() for name, tensor in plain_model(scheme.model).state_dict().items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        module, _, local = name.rpartition(".")
        if module.endswith(".experts"):
            _write_experts(scheme, tensors, state, module, local)
        elif local == "weight" and tensor.dim() == 2 and is_quantized(module):
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
    """Stores one fused parameter as the scheme does, and puts the represented weight into the state."""
    path, fused = in_checkpoint(scheme, module), state[f"{module}.{local}"]
    if local.endswith("_bias"):  # only gpt-oss
        if "*" in scheme.projections[0]:
            tensors[f"{path}.{local}"] = fused.bfloat16()
            return
        for expert in range(EXPERTS):
            for projection, part in _parts(scheme, local.removesuffix("_bias"), fused[expert]):
                tensors[f"{path}.{expert}.{projection}.bias"] = part.bfloat16()
        return
    if isinstance(scheme.weight_format, ModeloptExpert):
        _write_together(scheme, tensors, path, local, fused)
        return
    is_transposed = scheme.model in ("gpt-oss", "llama4")
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


def _write_together(scheme: Scheme, tensors: dict, path: str, local: str, fused: torch.Tensor) -> None:
    """Stores a fused parameter as ModelOpt does: one wide layer with one scale for all experts."""
    packed, real = pack(scheme, fused.transpose(1, 2).flatten(0, 1))
    fused.copy_(real.unflatten(0, (EXPERTS, -1)).transpose(1, 2))
    for key, tensor in packed.items():
        dealt = tensor.unflatten(1, (EXPERTS, -1)).transpose(0, 1) if tensor.dim() == 2 else tensor
        tensors[f"{path}.{local}" if key == "transposed" else f"{path}.{local}_{key}"] = dealt


def _parts(scheme: Scheme, local: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if local in ("up_proj", "down_proj"):
        return [({"up_proj": scheme.projections[-2], "down_proj": scheme.projections[-1]}[local], weight)]
    if len(scheme.projections) == 2:
        return [(scheme.projections[0], weight)]
    return list(zip(scheme.projections[:2], weight.chunk(2), strict=True))


def pack_saved(family: str, weight_format: Format, config: dict, folder: Path) -> tuple[Path, Path]:
    """Returns (a quantized checkpoint under transformers' own names, the weights that it represents)."""
    torch.manual_seed(11)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family])).save_pretrained(
        folder / "saved"
    )
    tensors = tiny_models.stored_tensors(folder / "saved")
    packed, plain, scheme = {}, dict(tensors), Scheme(family, family, weight_format, config)
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if tensor.dim() == 2 and re.search(r"_proj$|experts\.\d+\.\w+$", stem):
            parts, plain[name] = pack(scheme, tensor)
            packed |= {f"{stem}.{local}": part for local, part in parts.items()}
        else:
            packed[name] = tensor
    written = json.loads((folder / "saved" / "config.json").read_text())
    paths = folder / "packed", folder / "plain"
    for path, state, more in zip(paths, (packed, plain), ({"quantization_config": config}, {}), strict=True):
        path.mkdir()
        widest_first = sorted(state.items(), key=lambda item: -item[1].dtype.itemsize)
        stored = {name: tiny_models.as_stored(tensor) for name, tensor in widest_first}
        write_safetensors(path / "model.safetensors", stored, {"format": "pt"})
        (path / "config.json").write_text(json.dumps(written | more))
    return paths


IDS = torch.tensor([[1, 5, 9, 60, 33, 2, 7], [1, 70, 4, 4, 17, 79, 3]])
GPTQ = Gptq(4, 32, True, "stored", g_idx_length=64)
GPTQ_CONFIG = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "checkpoint_format": "gptq_v2",
}
GPTQMODEL_CONFIG = {**GPTQ_CONFIG, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
FP8 = Fp8(strategy="channel")
FP8_CONFIG = {"quant_method": "fbgemm_fp8"}
BLOCK = Fp8(strategy="block", block_structure=(32, 32), scale_name="weight_scale_inv")
BLOCK_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}
PACKED_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}
BNB_CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MODELOPT_FP8 = ModeloptExpert(Fp8(strategy="tensor", scale_shape=(), input_scale_name="input_scale"))
MODELOPT_NVFP4 = ModeloptExpert(
    Nvfp4(stored_codes_name="weight", global_shape=(), others=(("input_scale", "F32", ()),))
)
MODELOPT_CONFIG = {"quant_method": "modelopt"}
OLD_MIXTRAL = {".mlp.": ".block_sparse_moe."}
MLX_NAMES = ("gate_proj.*", "up_proj.*", "down_proj.*")
GRANITE = {".router.weight": ".router.layer.weight"}
SCHEMES = [
    Scheme("mixtral w1 w2 w3, gptq", "mixtral", GPTQ, GPTQ_CONFIG, OLD_MIXTRAL, ("w1", "w3", "w2")),
    Scheme("mixtral of gptqmodel, gptq", "mixtral", GPTQ, GPTQ_CONFIG),
    Scheme("mixtral of llmcompressor, fp8", "mixtral", FP8, FP8_CONFIG, OLD_MIXTRAL),
    Scheme(
        "mixtral fused gate_up, fp8", "mixtral", FP8, FP8_CONFIG, OLD_MIXTRAL, ("gate_up_proj", "down_proj")
    ),
    Scheme("qwen3 by expert, pack-quantized", "qwen3", PackQuantized(scale_shape=(1, 1)), PACKED_CONFIG),
    Scheme("qwen3 by expert, bitsandbytes", "qwen3", Bnb4Bit(), BNB_CONFIG),
    Scheme("qwen3 fused, fp8", "qwen3", FP8, FP8_CONFIG, {}, ("gate_up_proj.*", "down_proj.*")),
    Scheme("qwen2 with a shared expert, fp8 blocks", "qwen2", BLOCK, BLOCK_CONFIG),
    Scheme("deepseek v3, fp8 blocks", "deepseek-v3", BLOCK, BLOCK_CONFIG),
    Scheme("deepseek v2, gptq", "deepseek-v2", GPTQ, GPTQ_CONFIG),
    Scheme(
        "gpt-oss blocks",
        "gpt-oss",
        GptOssMxfp4(),
        {"quant_method": "mxfp4"},
        {},
        ("gate_up_proj_*", "down_proj_*"),
    ),
    Scheme("llama 4 by expert, pack-quantized", "llama4", PackQuantized(scale_shape=(1, 1)), PACKED_CONFIG),
    Scheme("nemotron by expert, fp8", "nemotron", FP8, FP8_CONFIG, {"model.": "backbone."}),
    Scheme(
        "gpt-oss of ModelOpt, fp8",
        "gpt-oss",
        MODELOPT_FP8,
        MODELOPT_CONFIG,
        {},
        ("gate_up_proj*", "down_proj*"),
    ),
    Scheme(
        "gpt-oss of ModelOpt, nvfp4",
        "gpt-oss",
        MODELOPT_NVFP4,
        MODELOPT_CONFIG,
        {},
        ("gate_up_proj*", "down_proj*"),
    ),
    Scheme(
        "llama 4 of ModelOpt, fp8",
        "llama4",
        MODELOPT_FP8,
        MODELOPT_CONFIG,
        {},
        ("gate_up_proj*", "down_proj*"),
    ),
    Scheme(
        "llama 4 of ModelOpt, nvfp4",
        "llama4",
        MODELOPT_NVFP4,
        MODELOPT_CONFIG,
        {},
        ("gate_up_proj*", "down_proj*"),
    ),
    Scheme("gpt-oss in gptqmodel's halves, gptq", "gpt-oss", GPTQ, GPTQMODEL_CONFIG),
    Scheme(
        "qwen3 of mlx", "qwen3", Mlx(4, 32), {"quant_method": "mlx"}, {".experts": ".switch_mlp"}, MLX_NAMES
    ),
    Scheme("granite fused, fp8", "granite", FP8, FP8_CONFIG, GRANITE, ("input_linear.*", "output_linear.*")),
]
PLACEMENTS = {
    "none": None,
    "cpu": {"": "cpu"},
    "half": {"": "cpu", "model.layers.1": "disk", "lm_head": "disk"},
    "disk": {"": "disk"},
}
BY_EXPERT = next(scheme for scheme in SCHEMES if scheme.id.startswith("qwen3 by expert, pack"))
ONE = "model.layers.1.mlp.experts.2"


load = models.load


def logits(model, tokens=IDS) -> torch.Tensor:
    return models.logits(model, tokens)


def save_wide(folder: Path, scheme: Scheme = BY_EXPERT, **sizes: int) -> Path:
    """Saves a checkpoint with other sizes, and returns its folder.

    In the others, the places of a few experts, in whole pages, take more bytes than all of them.
    """
    models = {**MODELS, scheme.model: {**MODELS[scheme.model], **sizes}}
    with mock.patch.multiple(__name__, EXPERTS=sizes["num_experts"], MODELS=models):
        return write(scheme, is_quantized(scheme)).save(folder)


def is_quantized(scheme: Scheme):
    """Returns True if a layer is quantized; for gpt-oss only experts are, as in its own checkpoints."""
    return (
        (lambda name: False)
        if scheme.model == "gpt-oss"
        else (lambda name: name.endswith(("_proj", "_with_mqa")))
    )


def without(tensors, *prefixes):
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}
