"""Maker of NVIDIA Model Optimizer checkpoints from export_hf_checkpoint, for formats of a CPU.

    python make_modelopt.py OUTPUT

Model Optimizer's own `from_quantized_weight`, and the `dequantize` of its tensor classes, dequantize the
weights in float32. It has no code that reads its bit-packed INT4, so a formula here does that. Model
Optimizer's own packer must then return the stored bytes. A `pre_quant_scale` is multiplied into the weight,
because the exported layer multiplies it into the input. NVFP4 and MX weights, too, are quantized on a CPU.
Only the fake quantization of a forward pass requires a GPU, and it is not run.
"""

import copy

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.model_config import QUANTIZATION_FP8, QUANTIZATION_INT8_SQ
from modelopt.torch.export.quant_utils import from_quantized_weight, pack_int4_in_uint8
from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant
from writing import build, logits, run_all, save_tokenizer, stored, tokens, write_reference

PARTS = (
    "weight_scale",
    "weight_scale_2",
    "input_scale",
    "pre_quant_scale",
    "k_scale",
    "v_scale",
    "k_bias",
    "v_bias",
)


def dequantize_int4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Dequantizes two's complement codes.

    A byte holds two output rows, the even one in the low nibble.
    """
    rows = torch.stack([weight & 15, weight >> 4], dim=1).flatten(0, 1).to(torch.int8)
    codes = torch.where(rows > 7, rows - 16, rows)
    group = codes.shape[1] // scale.shape[1]
    wide = codes.float() * scale.repeat_interleave(group, dim=1)
    assert torch.equal(pack_int4_in_uint8(wide, scale, group), weight)
    return wide


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.dim() == 0:
        return from_quantized_weight(weight, scale, QUANTIZATION_FP8, torch.float32)
    quantized = FP8QTensor(weight.shape, torch.float32, weight)
    if scale.dim() == 1:
        return quantized.dequantize(torch.float32, scale=scale[:, None])
    grid = scale.reshape(scale.shape[0], -1)  # four dimensions on disk
    block = {-1: weight.shape[1] // grid.shape[1], -2: weight.shape[0] // grid.shape[0]}
    return quantized.dequantize(torch.float32, scale=grid, block_sizes=block)


def dequantize_fp4(weight: torch.Tensor, scale: torch.Tensor, double: torch.Tensor | None) -> torch.Tensor:
    shape = torch.Size((weight.shape[0], 2 * weight.shape[1]))
    options = {"scale": scale, "block_sizes": {-1: shape[1] // scale.shape[1]}}
    if double is None:
        return MXFP4QTensor(shape, torch.float32, weight).dequantize(torch.float32, **options)
    return NVFP4QTensor(shape, torch.float32, weight).dequantize(
        torch.float32, double_scale=double, **options
    )


def dequantize_weight(weight: torch.Tensor, scale: torch.Tensor, double: torch.Tensor | None) -> torch.Tensor:
    if weight.dtype == torch.uint8:
        return (
            dequantize_int4(weight, scale)
            if scale.dtype == torch.float32
            else dequantize_fp4(weight, scale, double)
        )
    if weight.dtype == torch.int8:
        return from_quantized_weight(weight, scale, QUANTIZATION_INT8_SQ, torch.float32)
    if scale.dtype == torch.uint8:
        return MXFP8QTensor(weight.shape, torch.float32, weight).dequantize(torch.float32, scale=scale)
    return dequantize_fp8(weight, scale)


def dequantize_experts(
    weight: torch.Tensor, scale: torch.Tensor, double: torch.Tensor | None
) -> torch.Tensor:
    """Dequantizes experts in one tensor, with inputs before outputs.

    The scales have the same order, or one scale covers all experts.
    """
    if scale.dim() < 2:
        return from_quantized_weight(weight, scale.reshape(-1, 1, 1), QUANTIZATION_FP8, torch.float32)
    turned = zip(weight.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous(), strict=True)
    return torch.stack([dequantize_fp4(*expert, double).t() for expert in turned]).contiguous()


def dequantize(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dense = {name: tensor for name, tensor in tensors.items() if not name.endswith(PARTS)}
    for name, scale in tensors.items():
        if name.endswith("_proj_weight_scale"):
            module = name.removesuffix("_weight_scale")
            dense[module] = dequantize_experts(tensors[module], scale, tensors.get(f"{name}_2"))
        if not name.endswith(".weight_scale"):
            continue
        module = name.removesuffix(".weight_scale")
        weight, smoothing = tensors[f"{module}.weight"], tensors.get(f"{module}.pre_quant_scale")
        wide = dequantize_weight(weight, scale, tensors.get(f"{module}.weight_scale_2"))
        dense[f"{module}.weight"] = wide if smoothing is None else wide * smoothing.float()
    return dense


def with_blocks(config: dict, size: int) -> dict:
    """Returns the config with blocks of this size."""
    config = copy.deepcopy(config)
    for entry in config["quant_cfg"]:
        settings = entry.get("cfg") or {}
        for axis in (settings.get("block_sizes") or {}) if isinstance(settings, dict) else ():
            if isinstance(axis, int):
                settings["block_sizes"][axis] = size
    return config


def make(
    config: dict,
    kind: str = "llama",
    kv: dict | None = None,
    sizes: dict | None = None,
    shard: str | None = None,
):
    def maker(folder):
        model = build(kind, **(sizes or {}))
        plain = logits(model)
        settings = copy.deepcopy(config)
        if kv:
            settings = update_quant_cfg_with_kv_cache_quant(settings, kv["quant_cfg"])
        model = mtq.quantize(model, settings, lambda it: it(tokens()))
        export_hf_checkpoint(model, export_dir=str(folder), **({"max_shard_size": shard} if shard else {}))
        save_tokenizer(folder)
        method = (
            "modelopt's own dequantizers in float32; INT4 by formula, repacked to the same bytes; "
            "times "
            "pre_quant_scale"
        )
        expected = write_reference(folder, dequantize(stored(folder)), method)
        return f"the logits are {(plain - expected).norm() / expected.norm():.3f} away from the dense model's"

    return maker


WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MAKERS = {
    "fp8": make(mtq.FP8_DEFAULT_CFG),
    "fp8-pcpt": make(mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG),
    "fp8-2d-blockwise": make(mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, sizes=WIDE),
    "fp8-kv": make(mtq.FP8_DEFAULT_CFG, kv=mtq.FP8_KV_CFG),
    "int4-awq": make(mtq.INT4_AWQ_CFG),
    "w4a8-awq": make(mtq.W4A8_AWQ_BETA_CFG),
    "w8a8-sq": make(mtq.INT8_SMOOTHQUANT_CFG),
    "fp8-mixtral": make(mtq.FP8_DEFAULT_CFG, "mixtral"),
    "fp8-qwen3moe": make(mtq.FP8_DEFAULT_CFG, "qwen3_moe"),
    "fp8-qwen2-tied": make(mtq.FP8_DEFAULT_CFG, "qwen2"),
    "fp8-opt": make(mtq.FP8_DEFAULT_CFG, "opt"),
    "int4-blockwise": make(mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG),
    "int8": make(mtq.INT8_DEFAULT_CFG),
    "int8-wo": make(mtq.INT8_WEIGHT_ONLY_CFG),
    "w8a8-sq-mixtral": make(mtq.INT8_SMOOTHQUANT_CFG, "mixtral"),
    "int4-awq-qwen2-tied": make(mtq.INT4_AWQ_CFG, "qwen2"),
    "fp8-sharded": make(mtq.FP8_DEFAULT_CFG, shard="120KB"),
    "nvfp4": make(mtq.NVFP4_DEFAULT_CFG),
    "nvfp4-w4a16": make(mtq.W4A16_NVFP4_CFG),
    "nvfp4-w4a8-fp8": make(mtq.W4A8_NVFP4_FP8_CFG),
    "nvfp4-mixtral": make(mtq.NVFP4_DEFAULT_CFG, "mixtral"),
    "mxfp8": make(mtq.MXFP8_DEFAULT_CFG),
    "mxfp4": make(mtq.MXFP4_DEFAULT_CFG),
    "mxfp4-w4a8-fp8": make(mtq.W4A8_MXFP4_FP8_CFG),
    "fp8-kv-affine": make(mtq.FP8_DEFAULT_CFG, kv=mtq.FP8_AFFINE_KV_CFG),
    "fp8-gptoss": make(mtq.FP8_DEFAULT_CFG, "gpt_oss"),
    "fp8-pcpt-gptoss": make(mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG, "gpt_oss"),
    "nvfp4-gptoss": make(mtq.NVFP4_DEFAULT_CFG, "gpt_oss"),
    "fp8-llama4": make(mtq.FP8_DEFAULT_CFG, "llama4_text"),
    "nvfp4-llama4": make(mtq.NVFP4_DEFAULT_CFG, "llama4_text"),
    "nvfp4-w4a16-gptoss": make(mtq.W4A16_NVFP4_CFG, "gpt_oss"),
    "nvfp4-awq": make(mtq.NVFP4_AWQ_LITE_CFG),
}

if __name__ == "__main__":
    run_all("modelopt", MAKERS)
