"""Tiny mixtures of experts with layers that predict further tokens (MTP), in FP8 and as plain float weights."""

import json
import re
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from hfq.checkpoint import write_safetensors
from tests.support import moe_models, tiny_models

LAYERS = moe_models.LAYERS
_QUANTIZED = re.compile(r"(_proj|_with_mqa|experts\.\d+\.\w+)$")


def write(
    folder: Path, family: str, count: int = 1, agrees: bool = False, is_float: bool = False
) -> tuple[Path, Path]:
    """Returns (an FP8 checkpoint, the float weights that it represents).

    Args:
        folder: Folder of both.
        family: `deepseek_v3` or `glm4_moe`.
        count: Number of layers that predict further tokens.
        agrees: True if a draft is always the token of the main model: no decoder layer adds anything, and a
            further layer passes its token on.
        is_float: True if the layers that predict further tokens are not quantized.
    """
    sizes = {**moe_models.DEEPSEEK, "eos_token_id": None, "num_mtp_layers": count}
    config = AutoConfig.for_model(family, **sizes)
    torch.manual_seed(3)
    main = AutoModelForCausalLM.from_config(config).eval()
    further = MtpModel(main, count)
    for parameter in further.layers.parameters():
        parameter.data.normal_(0, 0.1).add_(parameter.dim() == 1)
    if agrees:
        for name, parameter in [*main.named_parameters(), *further.layers.named_parameters()]:
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter.data.zero_()
            elif name.endswith("eh_proj.weight"):
                parameter.data.copy_(torch.eye(*parameter.shape))
            elif "norm" in name:
                parameter.data.fill_(1)
    main.save_pretrained(folder / "saved")
    tensors = tiny_models.stored_tensors(folder / "saved")
    for name, tensor in further.layers.state_dict().items():
        tensors |= _as_published(name, tensor)
    for index in range(LAYERS, LAYERS + count):
        tensors[f"model.layers.{index}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{index}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return _save(folder, family, tensors, LAYERS if is_float else LAYERS + count)


def _as_published(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns a tensor of `MtpModel.layers` under its names in published checkpoints, experts separately."""
    index, _, local = name.partition(".")
    local = re.sub(r"^post_norm", "shared_head.norm", local).removeprefix("mtp_block.")
    stem = f"model.layers.{LAYERS + int(index)}.{local}"
    if not local.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {stem: tensor.clone()}
    owner, _, projection = stem.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(projection, (projection,))
    return {
        f"{owner}.{expert}.{part}.weight": half.clone()
        for expert, weight in enumerate(tensor)
        for part, half in zip(parts, weight.chunk(len(parts)), strict=True)
    }


def _save(folder: Path, family: str, tensors: dict[str, torch.Tensor], quantized: int) -> tuple[Path, Path]:
    packed, plain = {}, {}
    kept = tuple(f"model.layers.{index}." for index in range(quantized, quantized + 2))
    scheme = moe_models.Scheme(family, family, moe_models.BLOCK, moe_models.BLOCK_CONFIG)
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        is_linear = tensor.dim() == 2 and _QUANTIZED.search(stem) and "eh_proj" not in stem
        if is_linear and not stem.startswith(kept):
            parts, plain[name] = moe_models.pack(scheme, tensor)
            packed |= {f"{stem}.{local}": part for local, part in parts.items()}
        else:
            packed[name] = plain[name] = tensor
    config = json.loads((folder / "saved" / "config.json").read_text())
    paths = folder / "packed", folder / "plain"
    more = ({"quantization_config": moe_models.BLOCK_CONFIG}, {})
    for path, state, added in zip(paths, (packed, plain), more, strict=True):
        path.mkdir()
        widest_first = sorted(state.items(), key=lambda item: -item[1].dtype.itemsize)
        stored = {name: tiny_models.as_stored(tensor) for name, tensor in widest_first}
        write_safetensors(path / "model.safetensors", stored, {"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | added))
    (folder / "packed" / "quantize_config.json").write_text(json.dumps(moe_models.BLOCK_CONFIG))
    return paths
