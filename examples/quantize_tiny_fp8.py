"""Make `tests/data/tiny-llama-fp8`: the fine-grained FP8 of DeepSeek and transformers (128 × 128 blocks,
float32 scales).

python examples/quantize_tiny_fp8.py tests/data/tiny-llama OUTPUT_FOLDER
"""

import argparse
import json
import pathlib
import shutil

import torch

from hfq.checkpoint import Checkpoint, Reader, write_safetensors
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.formats.fp8 import Fp8
from hfq.modules.flat_buffer import read_tensor

COPIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}


def as_bytes(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], memoryview]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return safetensors_dtype(tensor.dtype), tuple(tensor.shape), memoryview(flat.numpy())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    arguments = parser.parse_args()
    checkpoint = Checkpoint.open(arguments.model)
    reader, block = (
        Reader(checkpoint),
        Fp8(strategy="block", block_structure=(128, 128), scale_name="weight_scale_inv"),
    )
    tensors = {}
    for name, info in checkpoint.tensors.items():
        weight, module = read_tensor(reader, info), name.rpartition(".")[0]
        packed = block.quantize(weight) if name.endswith("_proj.weight") else {"weight": weight}
        tensors |= {f"{module}.{local}": as_bytes(tensor) for local, tensor in packed.items()}
    arguments.output.mkdir(parents=True, exist_ok=True)
    nbytes = write_safetensors(arguments.output / "model.safetensors", tensors, {"format": "pt"})
    config = {**checkpoint.config, "quantization_config": CONFIG}
    (arguments.output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in COPIED:
        shutil.copy(arguments.model / name, arguments.output / name)
    print(f"{nbytes} bytes written")


if __name__ == "__main__":
    main()
