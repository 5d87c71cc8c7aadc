"""A random one-layer Llama written in any format: the smallest checkpoint that goes through `from_pretrained`."""

import hashlib
import json
from pathlib import Path

import torch

from hfq.checkpoint import Checkpoint, Reader, write_safetensors
from hfq.formats.dtypes import safetensors_dtype, torch_dtype
from hfq.modules.row import read_tensor

DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[2] / "shared" / "checkpoints"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 96,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "dtype": "bfloat16",
    "hidden_act": "silu", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_PROJECTIONS = {
    "self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128), "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128), "mlp.down_proj": (128, 256),
}  # fmt: skip
FIRST = "model.layers.0.self_attn.q_proj"


def packed_tensors(weight_format) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, each linear layer in a block packed."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int, scale: float = 0.08) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors = {"model.embed_tokens.weight": random(96, 128, scale=1.0).bfloat16()}
    for layer in range(2):
        for local, shape in _PROJECTIONS.items():
            for name, tensor in weight_format.quantize(random(*shape)).items():
                tensors[f"model.layers.{layer}.{local}.{name}"] = tensor
        for local in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{local}.weight"] = (1 + random(128)).bfloat16()
    tensors["model.norm.weight"] = (1 + random(128)).bfloat16()
    return tensors | {"lm_head.weight": random(96, 128).bfloat16()}


def write_model(folder: Path, tensors: dict[str, torch.Tensor], quantization_config: dict | None) -> Path:
    """Writes tensors and config.json into a folder that `from_pretrained` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: as_stored(tensor) for name, tensor in tensors.items()}
    write_safetensors(folder / "model.safetensors", stored, {"format": "pt"})
    config = CONFIG | ({"quantization_config": quantization_config} if quantization_config else {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_stored(tensor: torch.Tensor):
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return safetensors_dtype(tensor.dtype), tuple(tensor.shape), memoryview(flat.numpy())


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(folder)
    reader = Reader(checkpoint)
    return {name: read_tensor(reader, info) for name, info in checkpoint.tensors.items()}


def digests(folder: Path) -> dict[str, tuple]:
    """(dtype, shape, sha256 of the bytes) of every stored tensor."""
    found = {}
    for name, info in Checkpoint.open(folder).tensors.items():
        with open(info.range.file, "rb") as stream:
            stream.seek(info.range.offset)
            found[name] = (info.dtype, info.shape, hashlib.sha256(stream.read(info.nbytes)).hexdigest())
    return found


def dtypes_of(names) -> list[torch.dtype]:
    return [torch_dtype(name) for name in names]
