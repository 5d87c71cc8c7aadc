"""Maker of MLX checkpoints, from mlx-lm's own `convert`.

    python make_mlx.py OUTPUT

For the reference, `mlx.core.dequantize` dequantizes the stored tensors, with scales and biases in float32.
mlx-lm reads `rope_theta`, but transformers 5 writes `rope_parameters`. The logits of mlx-lm are therefore
different.
"""

import contextlib
import io
import json
import re
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.convert import convert
from writing import build, run_all, save_dense, stored, write_reference

MODES = {"affine": 64, "mxfp4": 32, "mxfp8": 32, "nvfp4": 16}


def dequantize(parts: dict[str, torch.Tensor], options: dict) -> torch.Tensor:
    """Returns one module's float32 weight from MLX: [out, in], or [experts, out, in]."""
    mode = options.get("mode", "affine")
    words = mx.array(parts["weight"].numpy())
    if mode == "affine":
        scales, biases = (mx.array(parts[name].float().numpy()) for name in ("scales", "biases"))
        found = mx.dequantize(words, scales, biases, group_size=options["group_size"], bits=options["bits"])
    else:
        found = mx.dequantize(words, mx.array(parts["scales"].numpy()), mode=mode, dtype=mx.float32)
    return torch.from_numpy(np.array(found))


def unquantized_tensors(tensors: dict[str, torch.Tensor], quantization: dict) -> dict[str, torch.Tensor]:
    modules = {name.removesuffix(".scales") for name in tensors if name.endswith(".scales")}
    dense = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in modules}
    for module in modules:
        parts = {
            name.rpartition(".")[2]: tensor
            for name, tensor in tensors.items()
            if name.rpartition(".")[0] == module
        }
        own = quantization.get(module)
        weight = dequantize(parts, own if isinstance(own, dict) else quantization)
        if ".switch_mlp." not in module:
            dense[f"{module}.weight"] = weight
        else:
            head, tail = module.split(".switch_mlp.")
            names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
            dense |= {
                f"{head}.experts.{number}.{names[tail]}.weight": expert
                for number, expert in enumerate(weight)
            }
        if "bias" in parts:
            dense[f"{module}.bias"] = parts["bias"]
    return dense


def make(
    bits: int = 4,
    mode: str = "affine",
    kind: str = "llama",
    group: int | None = None,
    sizes: dict | None = None,
    **options,
):
    def maker(folder):
        folder.rmdir()  # mlx-lm creates it
        with tempfile.TemporaryDirectory() as source, contextlib.redirect_stdout(io.StringIO()):
            save_dense(build(kind, **(sizes or {})), Path(source))
            size = {"q_group_size": group or MODES[mode], "q_bits": bits, "q_mode": mode}
            convert(source, mlx_path=str(folder), quantize=True, **size, **options)
        for extra in ("README.md", "model.safetensors.index.json"):
            (folder / extra).unlink(missing_ok=True)
        quantization = json.loads((folder / "config.json").read_text())["quantization"]
        tensors = unquantized_tensors(stored(folder), quantization)
        write_reference(folder, tensors, f"mlx.core.dequantize of mode {mode} with float32 scales and biases")

    return maker


def mixed(path: str, _module) -> bool | dict:
    """Uses more bits for some layers, like mlx-lm's own recipes."""
    return {"group_size": 32, "bits": 6} if re.search(r"down_proj|lm_head", path) else True


MAKERS = {
    **{f"{bits}bit-g64": make(bits) for bits in (2, 3, 4, 5, 6, 8)},
    "4bit-g32": make(group=32),
    "4bit-g128": make(group=128),
    "4bit-f16": make(dtype="float16"),
    "4bit-mixed": make(quant_predicate=mixed),
    **{mode: make(8 if mode == "mxfp8" else 4, mode) for mode in ("mxfp4", "mxfp8", "nvfp4")},
    "4bit-qwen2-tied": make(kind="qwen2"),
    "4bit-mixtral": make(kind="mixtral"),
    "mxfp4-mixtral": make(mode="mxfp4", kind="mixtral"),
}

if __name__ == "__main__":
    run_all("mlx", MAKERS)
