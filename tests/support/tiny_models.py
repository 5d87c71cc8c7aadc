"""A random one-layer Llama in any format: the smallest checkpoint for `from_pretrained`."""

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from hfq.checkpoint import Checkpoint, Reader, write_safetensors
from hfq.formats.codecs.dtypes import safetensors_dtype, torch_dtype
from hfq.modules.flat_buffer import read_tensor
from hfq.tensor_spec import ByteRange, TensorInfo

DATA = Path(__file__).parents[1] / "data"
SHARED = Path(__file__).parents[3] / "shared" / "checkpoints"
SHARED_2026 = SHARED.with_name("checkpoints_2026")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PROJECTIONS = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (256, 128),
    "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
}
FIRST = "model.layers.0.self_attn.q_proj"


def shared_checkpoints() -> list[Path]:
    """Returns the folders of `SHARED` and `SHARED_2026`."""
    folders = [path for root in (SHARED, SHARED_2026) if root.is_dir() for path in sorted(root.iterdir())]
    return [path for path in folders if path.is_dir()]


def marked_by_needs(path: Path, *marks: pytest.MarkDecorator):
    """Returns a folder as a parameter of a test, skipped without the package that makes its config."""
    is_missing = "noconfig" in path.name and importlib.util.find_spec("gguf") is None
    reason = "transformers makes a config of GGUF metadata with the package gguf"
    return pytest.param(path, id=path.name, marks=[pytest.mark.skipif(is_missing, reason=reason), *marks])


def size_of(module: str) -> tuple[int, int]:
    """Returns (out, in) of a quantized module."""
    return next(size for local, size in _PROJECTIONS.items() if module.endswith(local))


def model_tensors(weight_format) -> dict[str, torch.Tensor]:
    """Returns the tensors of the checkpoint, with every linear layer of a decoder layer quantized."""
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


def write_model(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    quantization_config: dict | None,
    metadata: dict | None = None,
    kind: str | None = None,
) -> Path:
    """Writes tensors, config.json, and optimum-quanto's side file into a folder for `from_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind is not None:
        modules = {name.partition(".weight._data")[0] for name in tensors if ".weight._data" in name}
        qmap = {module: {"weights": kind, "quantize_activations": False} for module in sorted(modules)}
        (folder / "quanto_qmap.json").write_text(json.dumps(qmap))
    widest_first = sorted(
        tensors.items(), key=lambda item: -item[1].dtype.itemsize
    )  # aligned, as by safetensors' own writer
    stored = {name: as_stored(tensor) for name, tensor in widest_first}
    write_safetensors(folder / "model.safetensors", stored, {"format": "pt", **(metadata or {})})
    config = CONFIG | ({"quantization_config": quantization_config} if quantization_config else {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def schemas(tensors: dict[str, torch.Tensor], schema) -> dict[str, str]:
    """Returns the metadata of a format that describes modules there: {"<module>.weight": schema(tensors)}."""
    if schema is None:
        return {}
    modules: dict[str, dict] = {}
    for name, tensor in tensors.items():
        module, _, local = name.rpartition(".")
        modules.setdefault(module, {})[local] = tensor
    return {f"{module}.weight": schema(local) for module, local in modules.items() if "weight" not in local}


def described(module: str, tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """Returns the tensors of one module as a header describes them, by local name."""
    return {
        name: TensorInfo(
            f"{module}.{name}",
            safetensors_dtype(t.dtype),
            tuple(t.shape),
            ByteRange("x.safetensors", 0, t.nbytes),
        )
        for name, t in tensors.items()
    }


def settled(
    weight_format, tensors: dict[str, torch.Tensor], config: dict | None, size: tuple[int, int], schema=None
):
    """Returns the format of tensors from `quantize` as after detection, with the layer's size [out, in]."""
    hints = {
        **(config or {}),
        "__metadata__": schemas({f"m.{name}": t for name, t in tensors.items()}, schema),
    }
    found = type(weight_format).detect("m", described("m", tensors), hints)
    return found.sized(size[1], size[0]).resolve("m", tensors)


def as_stored(tensor: torch.Tensor):
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return safetensors_dtype(tensor.dtype), tuple(tensor.shape), memoryview(flat.numpy())


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.open(folder)
    reader = Reader(checkpoint)
    return {name: read_tensor(reader, info) for name, info in checkpoint.tensors.items()}


def gguf_bytes(folder: Path) -> dict[str, bytes]:
    """Returns the GGUF files of a folder by name."""
    return {file.name: file.read_bytes() for file in folder.glob("*.gguf")}


def digests(folder: Path) -> dict[str, tuple]:
    """Returns (dtype, shape, SHA-256 of the bytes) of every stored tensor."""
    found = {}
    for name, info in Checkpoint.open(folder).tensors.items():
        with open(info.range.file, "rb") as stream:
            stream.seek(info.range.offset)
            found[name] = (info.dtype, info.shape, hashlib.sha256(stream.read(info.nbytes)).hexdigest())
    return found


def dtypes_of(names) -> list[torch.dtype]:
    return [torch_dtype(name) for name in names]


def poison(scales: torch.Tensor, index: int) -> None:
    """Sets one scale to NaN, in its own dtype."""
    scales.view(torch.uint8)[index] = 255 if scales.dtype in (torch.uint8, torch.float8_e8m0fnu) else 127
    if scales.dtype.itemsize > 1:
        scales[index] = float("nan")
