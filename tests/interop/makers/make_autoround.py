"""Maker of AutoRound checkpoints in each format that a CPU can export.

    python make_autoround.py OUTPUT

Nearly all use round-to-nearest. AutoRound's own code dequantizes every weight in float32: its torch GPTQ
layer applied to the identity matrix, its `dequantize_gemm`, or the `dequant_weight_online` of its MX, NVFP4,
and FP8 layers. The operator of transformers dequantizes blockwise FP8, as in AutoRound's own load.
compressed-tensors dequantizes int-quantized and pack-quantized exports.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from auto_round import AutoRound
from auto_round.experimental.qmodules.fp8_static import WeightFP8ActFP8StaticQuantLinear
from auto_round.experimental.qmodules.mx import MXFP4QuantLinear, MXFP8QuantLinear, MXINT4QuantLinear
from auto_round.experimental.qmodules.nvfp4 import NVFP4QuantLinear
from auto_round.experimental.qmodules.nvfp4_e5m3 import NVFP4E5M3QuantLinear
from auto_round.export.export_to_awq.utils import dequantize_gemm
from auto_round.schemes import preset_name_to_scheme
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
from compressed_tensors.compressors.pack_quantized import unpack_from_int32
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from writing import VOCABULARY, build, run_all, save_dense, stored, write_reference

PARTS = (
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_global_scale",
    "input_global_scale",
    "input_scale",
    "weight_shape",
)
_LAYERS = {
    "MXFP4": MXFP4QuantLinear,
    "MXFP8": MXFP8QuantLinear,
    "MXINT4": MXINT4QuantLinear,
    "NVFP4": NVFP4QuantLinear,
    "NVFP4_E5M3": NVFP4E5M3QuantLinear,
}


def by_gptq(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    rows = parts["scales"].shape[1]
    bits = 32 * parts["qzeros"].shape[1] // rows
    columns = 32 * parts["qweight"].shape[0] // bits
    group = columns // parts["scales"].shape[0]
    if "g_idx" in parts:  # trivial here, and the layer that accepts g_idx returns only the first K rows
        assert torch.equal(parts["g_idx"], torch.arange(columns, dtype=torch.int32) // group)
    layer = QuantLinear(bits, group, columns, rows, bias=False)
    layer.qweight, layer.qzeros, layer.scales = parts["qweight"], parts["qzeros"], parts["scales"].float()
    return layer(torch.eye(columns)).t()


def by_awq(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    group = parts["qweight"].shape[0] // parts["scales"].shape[0]
    return dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"].float(), 4, group).t()


def by_layer(parts: dict[str, torch.Tensor], scheme: str) -> torch.Tensor:
    """Returns AutoRound's own quantized layer for this scheme with these tensors."""
    weight = parts.get("weight_packed", parts.get("weight"))
    columns = weight.shape[1] * (2 if "weight_packed" in parts else 1)
    config = preset_name_to_scheme(scheme)
    layer = _LAYERS[scheme](columns, weight.shape[0], config=config, dtype=torch.float32)
    for name, tensor in parts.items():
        assert name in layer._buffers, name
        layer._buffers[name] = tensor
    return layer.dequant_weight_online()


def by_fp8(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
    if "weight_scale_inv" in parts or (scale.shape[-1] > 1 and scale.dim() == 2):
        return Fp8Dequantize(None)._dequantize_one(parts["weight"], scale, output_dtype=torch.float32)
    layer = WeightFP8ActFP8StaticQuantLinear(*parts["weight"].shape[::-1], bias=None, dtype=torch.float32)
    layer.weight = torch.nn.Parameter(parts["weight"], requires_grad=False)
    layer.weight_scale = scale.float().flatten()
    return layer.dequant_weight_online()


def by_integers(parts: dict[str, torch.Tensor], scheme: str) -> torch.Tensor:
    """Returns the weight of an export whose integers compressed-tensors packs."""
    codes = parts.get("weight")
    if codes is None:
        shape = torch.Size(parts["weight_shape"].tolist())
        codes = unpack_from_int32(parts["weight_packed"], preset_name_to_scheme(scheme).bits, shape)
    scale = parts["weight_scale"].float()
    return codes.float() * scale.repeat_interleave(codes.shape[1] // scale.shape[1], dim=1)


def dequantize_module(parts: dict[str, torch.Tensor], scheme: str, awq: bool) -> torch.Tensor:
    if "qweight" in parts:
        return by_awq(parts) if awq else by_gptq(parts)
    if scheme in _LAYERS:
        return by_layer(parts, scheme)
    packed = "weight_packed" in parts or parts["weight"].dtype == torch.int8
    return by_integers(parts, scheme) if packed else by_fp8(parts)


def dequantize(tensors: dict[str, torch.Tensor], scheme: str, awq: bool) -> dict[str, torch.Tensor]:
    modules = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in PARTS}
    dense = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part not in PARTS and (part != "weight" or module not in modules):
            dense[name] = tensor
    for module in modules:
        parts = {
            name.removeprefix(f"{module}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{module}.")
        }
        parts.pop("bias", None)
        dense[f"{module}.weight"] = dequantize_module(parts, scheme, awq)
    return dense


def as_on_the_hub(dense: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Renames the projections of Mixtral's experts as AutoRound does."""
    if kind != "mixtral":
        return dense
    names = {".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
    renamed = {}
    for name, tensor in dense.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def calibration(folder: Path) -> str:
    generator = torch.Generator().manual_seed(7)
    samples = torch.randint(4, VOCABULARY, (8, 64), generator=generator).tolist()
    file = folder / "calibration.json"
    file.write_text(json.dumps([{"text": " ".join(f"w{i}" for i in sample)} for sample in samples]))
    return str(file)


def quantize(folder: Path, kind: str, scheme: str, form: str, sizes: dict, options: dict) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        source, output = Path(temporary) / "dense", Path(temporary) / "packed"
        save_dense(build(kind, **sizes), source)
        options = {
            "iters": 0,
            "disable_opt_rtn": True,
            "nsamples": 4,
            "seqlen": 32,
            "device_map": "cpu",
            **options,
        }
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(source)
        rounder = AutoRound(model, tokenizer, scheme=scheme, dataset=calibration(source), **options)
        rounder.quantize_and_save(str(output), format=form)
        written = next(output.rglob("config.json")).parent  # AutoRound adds a subfolder
        shutil.copytree(written, folder, dirs_exist_ok=True)


def make(scheme: str, form: str, kind: str = "llama", sizes: dict | None = None, **options):
    def maker(folder):
        quantize(folder, kind, scheme, form, sizes or {}, options)
        tensors = stored(folder)
        dense = as_on_the_hub(dequantize(tensors, scheme, awq="awq" in form), kind)
        write_reference(folder, dense, "auto-round's own layers, in float32")
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        packed = sum(
            name.rpartition(".")[2] in ("qweight", "weight_scale", "weight_scale_inv") for name in tensors
        )
        return (
            f"{packed} packed, {config['quant_method']}, {config.get('packing_format', config.get('format'))}"
        )

    return maker


WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
OVERRIDES = {
    "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64},
    "model.layers.1.mlp.up_proj": {"bits": 2, "group_size": 32},
    "model.layers.1.self_attn.o_proj": {"bits": 16},
}
HEAD = {"lm_head": {"bits": 4, "group_size": 32, "sym": True}}
MAKERS = {
    "gptq-w4g128": make("W4A16", "auto_gptq"),
    "gptq-w2g64": make("W2A16G64", "auto_gptq"),
    "gptq-w3g128": make("W3A16", "auto_gptq"),
    "gptq-w8g128": make("W8A16", "auto_gptq"),
    "w4g128": make("W4A16", "auto_round"),
    "w3g128": make("W3A16", "auto_round"),
    "w2g32": make("W2A16G32", "auto_round"),
    "extra": make("W4A16", "auto_round", layer_config=OVERRIDES),
    "gptq-extra": make("W4A16", "auto_gptq", layer_config=OVERRIDES),
    "lmhead": make("W4A16", "auto_round", layer_config=HEAD, iters=1),
    "lmhead-claimed": make(
        "W4A16", "auto_round", layer_config=HEAD
    ),  # quantized according to the config, but unquantized in the file
    "awq-w4g128": make("W4A16", "auto_awq", sym=False),
    "own-awq-w4g128": make("W4A16", "auto_round:auto_awq", sym=False),
    "llmc-mxfp4": make("MXFP4", "llm_compressor"),
    "llmc-mxfp8": make("MXFP8", "llm_compressor"),
    "llmc-nvfp4": make("NVFP4", "llm_compressor"),
    "llmc-w4g128": make("W4A16", "llm_compressor"),
    "llmc-int8": make("INT8", "llm_compressor"),
    "llmc-fp8-static": make("FP8_STATIC", "llm_compressor"),
    "llmc-fp8-block": make("FP8_BLOCK", "llm_compressor", sizes=WIDE),
    "mxfp4": make("MXFP4", "auto_round"),
    "mxfp8": make("MXFP8", "auto_round"),
    "nvfp4": make("NVFP4", "auto_round"),
    "mxint4": make("MXINT4", "auto_round"),
    "nvfp4-e5m3": make("NVFP4_E5M3", "auto_round"),
    "fpw8a16": make("FPW8A16", "auto_round"),
    "fp8-static": make("FP8_STATIC", "auto_round"),
    "own-fp8-block": make("FP8_BLOCK", "auto_round", sizes=WIDE),
    "fp8-block": make("FP8_BLOCK", "fp8", sizes=WIDE),
    "gptq-w4-qwen2-tied": make("W4A16", "auto_gptq", "qwen2"),
    "gptq-w4-opt": make("W4A16", "auto_gptq", "opt"),
    "gptq-w4-qwen3moe": make("W4A16", "auto_gptq", "qwen3_moe"),
    "w4-qwen3moe": make("W4A16", "auto_round", "qwen3_moe"),
    "w4-mixtral": make("W4A16", "auto_round", "mixtral"),
}

if __name__ == "__main__":
    run_all("autoround", MAKERS)
