"""Random models of true shapes: written to a folder in memory by threads, with codes drawn on the device."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints import LAYOUTS
from benchmarks.gpu.bench import Bench
from hfq.checkpoint import write_safetensors
from hfq.formats.awq import Awq
from hfq.formats.base import Format
from hfq.formats.bitsandbytes import Bnb4Bit
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.formats.mxfp4 import Mxfp4

__all__ = ["MODELS", "Shape", "make_model", "make_plain_model", "shape_of"]

THREADS = 8
BLOCK = 32 << 20
"""Elements of the random block that fills an unquantized model."""


@dataclass(frozen=True)
class Shape:
    """The architecture of a model.

    Attributes:
        config: Content of `config.json`, without the quantization.
        experts: Number of experts of a layer; 0 for a dense model.
    """

    config: dict[str, Any]
    experts: int = 0

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]

    def linears(self) -> dict[str, tuple[int, int]]:
        """Returns (out, in) of each quantized linear layer of a decoder layer, by local name."""
        config = self.config
        hidden, head = config["hidden_size"], config["head_dim"]
        rows, columns = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        found = {
            "self_attn.q_proj": (rows, hidden),
            "self_attn.k_proj": (columns, hidden),
            "self_attn.v_proj": (columns, hidden),
            "self_attn.o_proj": (hidden, rows),
        }
        wide = config["moe_intermediate_size" if self.experts else "intermediate_size"]
        stems = [f"mlp.experts.{index}" for index in range(self.experts)] or ["mlp"]
        for stem in stems:
            found |= {
                f"{stem}.gate_proj": (wide, hidden),
                f"{stem}.up_proj": (wide, hidden),
                f"{stem}.down_proj": (hidden, wide),
            }
        return found

    def others(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the unquantized tensors of a decoder layer, by local name."""
        hidden, head = self.config["hidden_size"], self.config["head_dim"]
        found: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if self.experts:
            norms = {f"self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
            found |= norms | {"mlp.gate.weight": (self.experts, hidden)}
        return found


@dataclass(frozen=True)
class Model:
    """A model in one format: its kind of shape, its format, and its quantization_config."""

    shape: str
    format: Format
    config: dict[str, Any]


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
_NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "bfloat16",
}
_MXFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
            },
        }
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}
FP8 = Fp8(strategy="block", block_structure=(128, 128), scale_name="weight_scale_inv")
MODELS = {
    "8b-fp8": Model("dense", FP8, LAYOUTS["fp8"].quantization or {}),
    "8b-gptq4": Model("dense", Gptq(4, 128, True, "field_plus_one"), LAYOUTS["gptq4"].quantization or {}),
    "8b-awq": Model("dense", Awq(version="gemm", group_size=128), _AWQ),
    "8b-nf4": Model("dense", Bnb4Bit(), _NF4),
    "moe-mxfp4": Model("moe", Mxfp4(), _MXFP4),
}
"""The models by the names of their folders."""

_COMMON = {
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = {**_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
_QWEN = {
    **_COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rms_norm_eps": 1e-6,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


def _sized(hidden: int, layers: int, heads: int, pairs: int, head: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pairs,
        "head_dim": head,
        "vocab_size": vocabulary,
    }


_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_FEW_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SHAPES = {
    ("dense", False): Shape({**_LLAMA, **_sized(4096, 32, 32, 8, 128, 128_256), "intermediate_size": 14_336}),
    ("dense", True): Shape({**_LLAMA, **_sized(128, 4, 4, 2, 32, 128), "intermediate_size": 256}),
    ("moe", False): Shape(
        {**_QWEN, **_sized(2048, 24, 32, 4, 128, 151_936), "intermediate_size": 6144, **_EXPERTS}, 128
    ),
    ("moe", True): Shape(
        {**_QWEN, **_sized(128, 3, 4, 2, 32, 128), "intermediate_size": 256, **_FEW_EXPERTS}, 8
    ),
}


def shape_of(kind: str, is_dry: bool) -> Shape:
    """Returns the architecture of 8 billion weights (`dense`) or of half of 30B-A3B (`moe`), or a small one."""
    return _SHAPES[kind, is_dry]


def make_model(bench: Bench, name: str, folder: Path | None = None) -> Path:
    """Writes a model of `MODELS` into its own folder, unless a complete one exists.

    Args:
        bench: The device that draws, and the default folder.
        name: Name of the model.
        folder: Folder of all models; None for the scratch folder.

    Returns:
        Folder of the checkpoint.
    """
    path, model = (folder or bench.scratch) / name, MODELS[name]
    if (path / "config.json").exists():
        return path
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    shape, draw = shape_of(model.shape, bench.is_dry), _Drawing(model.format, bench.device)
    draw.prepare(set(shape.linears().values()))
    with ThreadPoolExecutor(THREADS) as pool:
        names = list(pool.map(lambda index: _write_shard(path, shape, draw, index), range(-1, shape.layers)))
    index = {"metadata": {}, "weight_map": {name: file for file, held in names for name in held}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config = {**shape.config, "quantization_config": model.config}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")  # last: marks it complete
    return path


def make_plain_model(shape: Shape, device: torch.device) -> Any:
    """Returns an unquantized model on a device, filled with one random block again and again."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(shape.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device=device)
    size = min(BLOCK, max(parameter.numel() for parameter in model.parameters()))
    block = torch.randn(size, device=device).mul_(0.02).bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
                continue
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), size):
                part = flat[start : start + size]
                part.copy_(block[: part.numel()])
    with torch.device(device):  # its buffers are computed, not stored
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    return model.eval()


class _Drawing:
    """Draws layers of one format on the device.

    A layer of a size is quantized once. Further ones have its codes in another order.
    """

    def __init__(self, weight_format: Format, device: torch.device) -> None:
        self._format, self._device = weight_format, device
        self._made: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def prepare(self, sizes: set[tuple[int, int]]) -> None:
        """Quantizes one layer of each size."""
        for size in sorted(sizes - self._made.keys()):
            with torch.device(self._device):
                weight = torch.randn(*size, device=self._device).mul_(0.02)
                self._made[size] = self._format.quantize(weight)

    def layer(self, size: tuple[int, int], number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of the layer with this number, in CPU memory."""
        for name, tensor in self._made[size].items():
            if name == self._format.codes_name:
                flat = tensor.reshape(-1).view(torch.uint8) if tensor.itemsize == 1 else tensor.reshape(-1)
                tensor = flat.roll(7 * number + 1).view(tensor.dtype).view(tensor.shape)
            yield name, tensor.cpu()

    def plain(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns an unquantized tensor in CPU memory: ones for a norm, else random values."""
        if "norm" in name:
            return torch.ones(shape, dtype=torch.bfloat16)
        return torch.randn(shape, device=self._device).mul_(0.02).bfloat16().cpu()


def _write_shard(path: Path, shape: Shape, draw: _Drawing, index: int) -> tuple[str, list[str]]:
    """Writes one decoder layer, or with index -1 all that is outside of them.

    Returns the file's name and the names of its tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    if index < 0:
        table = (shape.config["vocab_size"], shape.config["hidden_size"])
        for name, size in (("model.embed_tokens", table), ("model.norm", table[1:]), ("lm_head", table)):
            tensors[f"{name}.weight"] = draw.plain(name, size)
    else:
        stem = f"model.layers.{index}"
        for name, size in shape.others().items():
            tensors[f"{stem}.{name}"] = draw.plain(name, size)
        for number, (local, size) in enumerate(shape.linears().items()):
            for name, tensor in draw.layer(size, index * len(shape.linears()) + number):
                tensors[f"{stem}.{local}.{name}"] = tensor
    file = f"model-{index + 2:05}-of-{shape.layers + 1:05}.safetensors"
    widest_first = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    write_safetensors(path / file, {name: _stored(tensor) for name, tensor in widest_first}, {"format": "pt"})
    return file, list(tensors)


def _stored(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], memoryview]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return safetensors_dtype(tensor.dtype), tuple(tensor.shape), memoryview(flat.numpy())
