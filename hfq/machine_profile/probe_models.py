"""Checkpoints of Llama-like models with random quantized weights, for measurements.

Codes are drawn at random, so no float weight of the model ever exists. Scales make the weights resemble N(0,
0.02), which keeps activations finite. The content depends only on the architecture and the layout. A complete
checkpoint is reused.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hfq.checkpoint import Checkpoint, write_safetensors
from hfq.errors import CheckpointError, SetupError
from hfq.tensor_spec import DTYPE_BITS

__all__ = [
    "FP8",
    "GPTQ4",
    "GROUP",
    "Architecture",
    "Draw",
    "Planned",
    "WeightLayout",
    "architecture_of_size",
    "check_space",
    "draw_bf16",
    "draw_scales",
    "make_checkpoint",
    "norm",
    "write_planned",
]

GROUP = 128
_LARGEST_SHARD = 1_000_000_000

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Planned:
    """A tensor to write: its stored dtype and shape, and the function that draws its bytes."""

    dtype: str
    shape: tuple[int, ...]
    draw: Draw

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class WeightLayout:
    """Storage of linear layers.

    Attributes:
        name: Name of the layout, and suffix of a checkpoint's folder name.
        quantization: The `quantization_config` of the checkpoint. None for unquantized weights.
        tensors: Returns the tensors of a layer by local name, given its number of rows and columns.
    """

    name: str
    quantization: dict[str, Any] | None
    tensors: Callable[[int, int], dict[str, Planned]]


@dataclass(frozen=True)
class Architecture:
    """A Llama with 16 heads, 4 key-value heads, and an MLP of four times the hidden size."""

    hidden: int
    layers: int

    @property
    def vocabulary(self) -> int:
        return min(32_000, 16 * self.hidden)

    def config(self, weights: WeightLayout) -> dict:
        """Returns the content of the checkpoint's `config.json`."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": self.hidden // 16,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        return config | ({"quantization_config": weights.quantization} if weights.quantization else {})

    def tensors(self, weights: WeightLayout) -> dict[str, Planned]:
        """Returns every tensor by name, in model order.

        Args:
            weights: Layout of the linear layers.
        """
        size, wide = self.hidden, 4 * self.hidden
        linears = {
            "self_attn.q_proj": (size, size),
            "self_attn.k_proj": (size // 4, size),
            "self_attn.v_proj": (size // 4, size),
            "self_attn.o_proj": (size, size),
            "mlp.gate_proj": (wide, size),
            "mlp.up_proj": (wide, size),
            "mlp.down_proj": (size, wide),
        }
        table = Planned("BF16", (self.vocabulary, size), draw_bf16)
        tensors = {"model.embed_tokens.weight": table}
        for layer in range(self.layers):
            for local, shape in linears.items():
                for name, planned in weights.tensors(*shape).items():
                    tensors[f"model.layers.{layer}.{local}.{name}"] = planned
            for local in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{layer}.{local}.weight"] = norm(size)
        return tensors | {"model.norm.weight": norm(size), "lm_head.weight": table}


def architecture_of_size(nbytes: float, weights: WeightLayout) -> Architecture:
    """Returns the widest architecture with at least 8 layers in `nbytes` of a layout.

    The hidden size is at most 2048.

    Raises:
        SetupError: `nbytes` is too small for such a model.
    """
    for hidden in (2048, 1024, 512, 256, 128):
        empty, one = (
            sum(t.nbytes for t in Architecture(hidden, layers).tensors(weights).values()) for layers in (0, 1)
        )
        layers = round((nbytes - empty) / (one - empty))
        if layers >= 8:
            return Architecture(hidden, layers)
    raise SetupError(
        "The size is too small for a model to measure with.",
        expected=f"at least {empty + 8 * (one - empty):,} bytes",
        found=f"{nbytes:,.0f} bytes",
        fix="Pass a larger --size.",
    )


def make_checkpoint(folder: Path, architecture: Architecture, weights: WeightLayout) -> Path:
    """Writes a checkpoint of several shards into its own folder, unless a complete one exists.

    Args:
        folder: Folder of all checkpoints. It is created if missing.
        architecture: The model.
        weights: Layout of the linear layers.

    Returns:
        Folder of the checkpoint.

    Raises:
        SetupError: The disk has too little free space. Nothing was written.
        CheckpointError: A file cannot be written.
    """
    path = folder / f"llama-{architecture.hidden}x{architecture.layers}-{weights.name}"
    planned = architecture.tensors(weights)
    if _is_complete(path, planned):
        return path
    shutil.rmtree(path, ignore_errors=True)
    write_planned(path, planned, architecture.config(weights))
    return path


def write_planned(path: Path, planned: dict[str, Planned], config: Mapping[str, Any]) -> None:
    """Writes a checkpoint of several shards.

    Args:
        path: The new folder.
        planned: {name: tensor}.
        config: Content of config.json.

    Raises:
        SetupError: The disk has too little free space. Nothing was written.
        CheckpointError: A file cannot be written.
    """
    path.mkdir(parents=True)
    needed = sum(tensor.nbytes for tensor in planned.values())
    check_space(path, needed)
    shards = list(_shards(planned, min(_LARGEST_SHARD, -(-needed // 3))))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(path / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    index = {"metadata": {"total_size": needed}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(
        json.dumps(index), encoding="utf-8"
    )  # last, because its presence marks the checkpoint as complete


def check_space(path: Path, needed: int) -> None:
    """Raises SetupError if the disk of a folder has too little free space for a checkpoint."""
    free = shutil.disk_usage(path).free
    if free < 1.05 * needed:
        raise SetupError(
            "The disk has too little free space for the checkpoint to measure with. Nothing was written.",
            file=path,
            expected=f"{1.05 * needed:,.0f} bytes",
            found=f"{free:,} bytes free",
            fix="Pass another --folder, or free disk space.",
        )


def _is_complete(path: Path, planned: dict[str, Planned]) -> bool:
    try:
        found = Checkpoint.open(path).tensors
    except CheckpointError:
        return False
    return {name: (info.dtype, info.shape) for name, info in found.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in planned.items()
    }


def _shards(planned: dict[str, Planned], most: int) -> Iterator[dict[str, Planned]]:
    shard: dict[str, Planned] = {}
    nbytes = 0
    for name, tensor in planned.items():
        if shard and nbytes + tensor.nbytes > most:
            yield shard
            shard, nbytes = {}, 0
        shard[name] = tensor
        nbytes += tensor.nbytes
    yield shard


def _write_shard(file: Path, shard: dict[str, Planned]) -> None:
    stored = {}
    for name in sorted(
        shard, key=lambda name: (-DTYPE_BITS[shard[name].dtype], name)
    ):  # the order of the safetensors writer
        tensor = shard[name]
        values = tensor.draw(np.random.default_rng(zlib.crc32(name.encode())), tensor.shape)
        stored[name] = (tensor.dtype, tensor.shape, np.ascontiguousarray(values).data.cast("B"))
    write_safetensors(file, stored, {"format": "pt"})


def norm(size: int) -> Planned:
    """Returns the weight of a norm: ones."""
    return Planned("BF16", (size,), lambda _, shape: np.full(shape, 0x3F80, np.uint16))  # 1.0


def draw_bf16(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draws random signs and mantissas, with exponents from 2**-12 to 2**-5."""
    bits = generator.integers(0, 1 << 16, shape, np.uint16)
    bits &= 0x83FF
    bits += 115 << 7
    return bits


def _nibbles(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draws words of 4-bit codes from 1 to 15, whose mean is the zero point of 8.

    With another mean, each layer would amplify one direction, and all tokens would become the same.
    """
    words = generator.integers(0, 1 << 32, shape, np.uint32)
    zeros = ~(words | words >> 1 | words >> 2 | words >> 3) & 0x11111111
    return words | zeros << 3


def draw_scales(mean: float, dtype: type) -> Draw:
    return lambda generator, shape: (mean * generator.uniform(0.9, 1.1, shape)).astype(dtype)


def _gptq(rows: int, columns: int) -> dict[str, Planned]:
    groups = columns // GROUP
    return {
        "qweight": Planned("I32", (columns // 8, rows), _nibbles),
        "qzeros": Planned(
            "I32", (groups, rows // 8), lambda _, shape: np.full(shape, 0x77777777, np.uint32)
        ),  # zero point 8, stored minus 1
        "scales": Planned("F16", (groups, rows), draw_scales(0.0043, np.float16)),
        "g_idx": Planned("I32", (columns,), lambda _, shape: np.arange(shape[0], dtype=np.int32) // GROUP),
    }


GPTQ4 = WeightLayout(
    "gptq4",
    {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
    },
    _gptq,
)
"""GPTQ v1 with 4-bit codes."""


def _e4m3(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draws codes whose values are below 2, so that none is NaN."""
    return generator.integers(0, 256, shape, np.uint8) & 0xBF


def _fp8(rows: int, columns: int) -> dict[str, Planned]:
    grid = -(-rows // GROUP), -(-columns // GROUP)
    return {
        "weight": Planned("F8_E4M3", (rows, columns), _e4m3),
        "weight_scale_inv": Planned("F32", grid, draw_scales(0.034, np.float32)),
    }


FP8 = WeightLayout(
    "fp8",
    {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [GROUP, GROUP],
        "activation_scheme": "dynamic",
    },
    _fp8,
)
"""Fine-grained FP8 with blocks of 128 × 128."""
