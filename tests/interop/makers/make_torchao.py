"""Maker of torchao checkpoints, quantized and saved through transformers on the CPU.

    python make_torchao.py OUTPUT

The file's metadata holds the schema of each weight. torchao itself rebuilds and dequantizes the weights. The
dtype in the schema is replaced by float32, so that torchao computes (q - zero) * scale in float32.
"""

import json
import re
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerAxis,
    PerGroup,
    PerTensor,
    quantize_,
)
from transformers import AutoModelForCausalLM, TorchAoConfig
from writing import build, run_all, save_dense, save_tokenizer, stock_error, stored, write_reference

DTYPE = re.compile(r'("dtype": \{"_type": "torch.dtype", "_data": )"\w+"')


def schema(folder: Path) -> dict[str, str]:
    """Returns the metadata of all shards, merged as in transformers."""
    found, names = {}, []
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as stream:
            metadata = stream.metadata()
        names += json.loads(metadata["tensor_names"])
        found |= metadata
    return found | {"tensor_names": json.dumps(sorted(set(names)))}


def dequantize(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> dict[str, torch.Tensor]:
    names = [name for name in json.loads(metadata["tensor_names"]) if name in metadata]
    wide = {name: DTYPE.sub(r'\1"float32"', text) for name, text in metadata.items()}
    rebuilt, dense_experts = unflatten_tensor_state_dict(tensors, wide | {"tensor_names": json.dumps(names)})
    assert not any("._weight_" in name for name in dense_experts), "a part without its weight"
    rebuilt |= (
        dense_experts  # the schema uses the names in memory, such as fused experts, which are never quantized
    )
    dense = {
        name: tensor.dequantize() if hasattr(tensor, "qdata") else tensor for name, tensor in rebuilt.items()
    }
    assert all(dense[name].dtype == torch.float32 for name in dense if hasattr(rebuilt[name], "qdata"))
    return dense


def probe(quant_type) -> None:
    """Raises torchao's error if it cannot quantize here, which transformers hides in a report."""
    if not isinstance(quant_type, FqnToConfig):
        quantize_(torch.nn.Sequential(torch.nn.Linear(128, 128, dtype=torch.bfloat16)), quant_type)


def make(quant_type, kind: str = "llama", shard: str | None = None, sizes: dict | None = None, **options):
    def maker(folder):
        probe(quant_type)
        with tempfile.TemporaryDirectory() as dense:
            save_dense(build(kind, **(sizes or {})), Path(dense))
            config = TorchAoConfig(quant_type, **options)
            model = AutoModelForCausalLM.from_pretrained(
                dense, quantization_config=config, device_map="cpu", dtype="auto"
            )
        model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
        save_tokenizer(folder)
        tensors = stored(folder)
        method = "torchao's unflatten_tensor_state_dict and dequantize, with float32 as the schema's dtype"
        expected = write_reference(folder, dequantize(tensors, schema(folder)), method)
        packed = sum("_weight_qdata" in name for name in tensors)
        return f"{packed} packed; {stock_error(folder, expected)}"

    return maker


def intx(bits: int, group: int | None = None, **options):
    granularity = PerGroup(group) if group else PerAxis(0)
    return IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=granularity, **options)


def embeddings(config):
    """Returns a config for both embeddings.

    A plain config covers only the output embedding, so the input embedding is named.
    """
    return FqnToConfig({"model.embed_tokens": config, "lm_head": config, "_default": intx(4, 32)})


E4M3 = Float8WeightOnlyConfig()
MIXED = FqnToConfig(
    {r"re:.*mlp\.down_proj": None, r"re:.*mlp\..*": intx(4, 64), "_default": Int8WeightOnlyConfig()}
)
IN_OUT = {"include_input_output_embeddings": True}
UNTIED = IN_OUT | {"untie_embedding_weights": True}
MAKERS = {
    "float8wo-e4m3-row": make(E4M3),
    "float8wo-e4m3-tensor": make(Float8WeightOnlyConfig(granularity=PerTensor())),
    "float8wo-e4m3-group64": make(Float8WeightOnlyConfig(granularity=PerGroup(64))),
    "float8wo-e5m2": make(Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2)),
    "int8wo": make(Int8WeightOnlyConfig()),
    "int8wo-group64": make(Int8WeightOnlyConfig(granularity=PerGroup(64))),
    "int8dyn": make(Int8DynamicActivationInt8WeightConfig()),
    "intx4-g32": make(intx(4, 32)),
    "intx4-g64-asym": make(intx(4, 64, mapping_type=MappingType.ASYMMETRIC)),
    "intx4-axis": make(intx(4)),
    "intx3-g32": make(intx(3, 32)),
    "intx2-g64": make(intx(2, 64)),
    "intx8-g32-scale-f32": make(intx(8, 32, scale_dtype=torch.float32)),
    "int8dyn-intx4-g32": make(
        Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    ),
    "intx4-g32-lmhead": make(intx(4, 32), **IN_OUT),
    "int8wo-lmhead": make(Int8WeightOnlyConfig(), **IN_OUT),
    "intx-embeddings": make(embeddings(intx(8, 32)), **IN_OUT),
    "int8wo-embeddings": make(embeddings(Int8WeightOnlyConfig()), **IN_OUT),
    "float8wo-qwen2-tied": make(E4M3, "qwen2"),
    "intx4-g32-qwen2-tied": make(intx(4, 32), "qwen2"),
    "intx-qwen2-untied": make(embeddings(intx(8, 64)), "qwen2", **UNTIED),
    "float8wo-opt": make(E4M3, "opt"),
    "intx4-g32-mixtral": make(intx(4, 32), "mixtral"),
    "mixed": make(MIXED),
    "float8wo-sharded": make(E4M3, shard="120KB"),
    "intx4-g32-sharded": make(intx(4, 32), shard="90KB"),
    "float8dyn": make(Float8DynamicActivationFloat8WeightConfig()),
    "int4wo": make(Int4WeightOnlyConfig(group_size=64)),
}

if __name__ == "__main__":
    run_all("torchao", MAKERS)
