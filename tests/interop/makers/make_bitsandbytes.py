"""Maker of bitsandbytes checkpoints, quantized and saved through transformers on the CPU.

    python make_bitsandbytes.py OUTPUT

The code of bitsandbytes dequantizes all weights. For 4-bit weights, the output dtype of their state is set to
float32. For 8-bit weights, `int8_vectorwise_dequant` multiplies in float32.
"""

import re
import tempfile
from pathlib import Path

import torch
from bitsandbytes import functional
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from writing import build, run_all, save_dense, save_tokenizer, stock_error, stored, write_reference

PART = re.compile(
    r"(.+)\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"
)


def dequantize_4bit(weight: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    state = functional.QuantState.from_dict(dict(parts), device=torch.device("cpu"))
    state.dtype, shape = torch.float32, state.shape
    state.shape = torch.Size([1, shape.numel()])  # on a CPU, 0.50.2 misplaces blocks that span rows
    return functional.dequantize_4bit(weight, state).view(shape)


def dequantize(tensors: dict[str, torch.Tensor], transposed: bool = False) -> dict[str, torch.Tensor]:
    """Returns the dequantized weights. `transposed` is for Conv1D, whose weights are [in, out]."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if found := PART.fullmatch(name):
            parts.setdefault(f"{found[1]}.weight", {})[found[2]] = tensor
    dense = {}
    for name, tensor in tensors.items():
        scales = name.removesuffix("weight") + "SCB"
        if PART.fullmatch(name) or name.endswith((".SCB", ".weight_format")):
            continue
        if name in parts:
            tensor = dequantize_4bit(tensor, parts[name])
        elif name.endswith(".weight") and scales in tensors:
            tensor = functional.int8_vectorwise_dequant(tensor, tensors[scales])
        else:
            dense[name] = tensor
            continue
        dense[name] = tensor.t() if transposed else tensor
    return dense


def make(kind: str = "llama", shard: str | None = None, sizes: dict | None = None, **options):
    def maker(folder):
        with tempfile.TemporaryDirectory() as dense:
            save_dense(build(kind, **(sizes or {})), Path(dense))
            config = BitsAndBytesConfig(**{"bnb_4bit_compute_dtype": torch.bfloat16, **options})
            model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config, device_map="cpu")
        model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
        save_tokenizer(folder)
        way = (
            "dequantize_4bit with a float32 state"
            if options.get("load_in_4bit")
            else "int8_vectorwise_dequant in float32"
        )
        unquantized_tensors = dequantize(stored(folder), transposed=kind == "gpt2")
        return stock_error(folder, write_reference(folder, unquantized_tensors, f"bitsandbytes {way}"))

    return maker


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DOUBLE = NF4 | {"bnb_4bit_use_double_quant": True}
INT8 = {"load_in_8bit": True}
ODD = {
    "hidden_size": 96,
    "intermediate_size": 208,
    "num_attention_heads": 4,
    "head_dim": 24,
}  # K % 64 != 0 everywhere
MAKERS = {
    "nf4": make(**NF4),
    "fp4": make(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "nf4-dq": make(**DOUBLE),
    "int8": make(**INT8),
    "nf4-storage-bf16": make(**NF4, bnb_4bit_quant_storage=torch.bfloat16),
    "nf4-dq-storage-fp32": make(**DOUBLE, bnb_4bit_quant_storage=torch.float32),
    "nf4-opt": make("opt", **NF4),
    "int8-opt": make("opt", **INT8),
    "nf4-dq-qwen2-tied": make("qwen2", **DOUBLE),
    "int8-qwen2-tied": make("qwen2", **INT8),
    "nf4-gpt2": make("gpt2", **NF4),
    "int8-gpt2": make("gpt2", **INT8),
    "nf4-dq-mixtral": make("mixtral", **DOUBLE),
    "nf4-odd": make(sizes=ODD, **NF4),
    "fp4-dq-odd": make(sizes=ODD, **DOUBLE | {"bnb_4bit_quant_type": "fp4"}),
    "nf4-dq-sharded": make(shard="60KB", **DOUBLE),
    "int8-sharded": make(shard="120KB", **INT8),
}

if __name__ == "__main__":
    run_all("bitsandbytes", MAKERS)
