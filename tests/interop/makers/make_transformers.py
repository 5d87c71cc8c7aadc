"""Maker of checkpoints in the formats of transformers: fine-grained FP8, MXFP4 of gpt-oss, BitNet, Gemma QAT.

    python make_transformers.py OUTPUT

The operators of transformers quantize FP8 weights, and dequantize them to float32. A matrix that blocks do
not divide is padded with zeros first, and the result is trimmed. This yields the ceil grid of the original
files. MXFP4 has no writer without a GPU. Its blocks are therefore encoded here, following the OCP
specification, and the code of transformers reads them.
"""

import re
from types import SimpleNamespace

import torch
from torch.nn.functional import pad
from transformers import FineGrainedFP8Config
from transformers.integrations.bitnet import pack_weights, unpack_weights
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.gemma_quant import QuantizedEmbedding, QuantizedLinear
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from writing import build, rewrite, run_all, save_dense, stock_error, stored, write_reference

BLOCK = (128, 128)
DENSE = r"embed|lm_head|norm|\.gate\.weight|shared_expert_gate|block_sparse_moe\.(router|input_linear|output_linear)"
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BIG = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def quantize_blocks(weight: torch.Tensor, config) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (codes, scales, float32 weight) from transformers' operator on the padded matrix."""
    quantizer = SimpleNamespace(quantization_config=config)
    (rows, columns), (height, width) = weight.shape, config.weight_block_size or weight.shape
    padded = pad(weight, (0, -columns % width, 0, -rows % height))
    codes, scales = Fp8Quantize(quantizer).convert({"m.weight": padded}).values()
    wide = Fp8Dequantize(quantizer)._dequantize_one(codes, scales, output_dtype=torch.float32)
    return (
        codes[:rows, :columns],
        scales if config.weight_block_size else scales.squeeze(),
        wide[:rows, :columns],
    )


def fp8(
    kind: str,
    scale_fmt: str = "float",
    unquantized: tuple = (),
    as_bytes: bool = False,
    block: tuple | None = BLOCK,
    **sizes,
):
    """Returns a maker of FP8 checkpoints. `as_bytes` stores ue8m0 scales as U8."""

    def make(folder):
        model = build(kind, **{**BIG, **sizes})
        config = FineGrainedFP8Config(weight_block_size=block, scale_fmt=scale_fmt)
        config.modules_to_not_convert = ["lm_head", *unquantized]
        save_dense(model, folder)
        packed, dense = {}, {}
        for name, tensor in stored(folder).items():
            if re.search(DENSE, name) or tensor.dim() != 2 or not name.endswith(".weight"):
                packed[name] = dense[name] = tensor
                continue
            codes, scales, dense[name] = quantize_blocks(tensor, config)
            packed[name] = codes
            packed[f"{name}_scale_inv"] = scales.view(torch.uint8) if as_bytes else scales
        rewrite(folder, packed, {**config.to_dict(), "weight_block_size": list(block) if block else None})
        method = (
            "transformers' Fp8Dequantize._dequantize_one into float32, over a zero-padded matrix where "
            "it does not tile"
        )
        expected = write_reference(folder, dense, method)
        return stock_error(folder, expected)

    return make


def encode_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes a weight [E, rows, K] as MXFP4.

    Returns:
        Blocks, U8 [E, rows, K/32, 16], low nibble first, and exponents, U8 [E, rows, K/32].
    """
    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1).clamp(min=2.0**-120))) - 2
    scaled = groups / torch.exp2(exponent)[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1).to(torch.uint8) | (
        (scaled < 0).to(torch.uint8) << 3
    )
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


def mxfp4(folder, **sizes):
    save_dense(build("gpt_oss", **{"hidden_size": 256, "intermediate_size": 128, **sizes}), folder)
    packed, dense = {}, {}
    for name, tensor in stored(folder).items():
        if re.search(r"experts\.(gate_up|down)_proj$", name):
            blocks, scales = encode_mxfp4(tensor.transpose(1, 2))  # an unquantized expert is [in, out]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert dense[name].shape == tensor.shape
            assert (dense[name] - tensor).norm() < 0.2 * tensor.norm()
        else:
            packed[name] = dense[name] = tensor
    unquantized = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    rewrite(folder, packed, {"quant_method": "mxfp4", "modules_to_not_convert": unquantized})
    expected = write_reference(folder, dense, "transformers convert_moe_packed_tensors(dtype=float32)")
    return stock_error(folder, expected)


def bitnet(linear_class: str, **sizes):
    """Returns a maker of ternary checkpoints, packed and unpacked by the code of transformers."""

    def make(folder):
        save_dense(build("llama", **sizes), folder)
        packed, dense = {}, {}
        for name, tensor in stored(folder).items():
            packed[name] = dense[name] = tensor
            if re.search(DENSE, name) or not name.endswith(".weight"):
                continue
            scale = (1 / tensor.float().abs().mean()).bfloat16()
            codes = (tensor.float() * scale.float()).round().clamp(-1, 1)
            packed[name] = pack_weights(codes)
            with torch.compiler.set_stance("force_eager"):
                found = unpack_weights(packed[name], torch.float32)
            if linear_class == "autobitlinear":
                scale = (1 / scale.float()).bfloat16()
            packed[f"{name}_scale"] = scale.reshape(1)
            dense[name] = found * scale.float() if linear_class == "autobitlinear" else found / scale.float()
        mode = {"quantization_mode": "offline", "modules_to_not_convert": None}
        rewrite(folder, packed, {"quant_method": "bitnet", "linear_class": linear_class, **mode})
        write_reference(folder, dense, "transformers' unpack_weights, and its scale in float32")

    return make


def encode_gemma(weight: torch.Tensor, bits: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes of a weight, and a scale for each block of a row."""
    half, share = 1 << (bits - 1), 8 // bits
    grouped = weight.float().unflatten(1, (blocks, -1))
    scale = grouped.abs().amax(2) / (half - 0.5)
    codes = (grouped / scale[:, :, None]).round().clamp(-half, half - 1).flatten(1).to(torch.int8)
    if bits == 8:
        return codes, scale
    parts = pad(codes + half, (0, -codes.shape[1] % share)).to(torch.uint8).unflatten(1, (-1, share))
    return sum(parts[:, :, place] << bits * place for place in range(share)), scale


def gemma(kind: str, bits: int, embedding_bits: int = 0, blocks: int = 1, **sizes):
    """Returns a maker of checkpoints that the quantized layers of transformers dequantize."""

    def make(folder):
        model = build(kind, **sizes)
        save_dense(model, folder)
        packed, dense = {}, {}
        for name, tensor in stored(folder).items():
            packed[name] = dense[name] = tensor
            module, (rows, columns) = name.removesuffix(".weight"), (*tensor.shape, 0)[:2]
            if embedding_bits and "embed_tokens" in name:
                layer = QuantizedEmbedding(rows, columns, torch.float32, num_bits=embedding_bits)
                codes, scale = encode_gemma(tensor, embedding_bits, blocks)
                layer.embedding_quantized.data, layer.embedding_scale.data = codes, scale
                del packed[name]
                packed |= {f"{module}.embedding_quantized": codes, f"{module}.embedding_scale": scale}
                dense[name] = layer.weight
            elif not re.search(DENSE, name):
                layer = QuantizedLinear(columns, rows, num_bits=bits)
                layer.weight.data, layer.weight_scale.data = encode_gemma(tensor, bits, 1)
                packed |= {f"{module}.{local}": value for local, value in layer.state_dict().items()}
                dense[name] = layer._dequantize_weights()
        config = {"quant_method": "gemma", "num_bits": bits, "quantize_embeddings": embedding_bits > 0}
        overrides = {"embed_tokens": {"num_bits": embedding_bits}} if embedding_bits else None
        rewrite(folder, packed, config | {"module_quant_configs": overrides})
        write_reference(folder, dense, "transformers' QuantizedLinear and QuantizedEmbedding in float32")

    return make


GRANITE = tuple(f"model.layers.{layer}.block_sparse_moe" for layer in range(2))
SHARED_GATES = tuple(f"model.layers.{layer}.mlp.shared_expert_gate" for layer in range(2))
MAKERS = {
    "fp8-qwen3moe": fp8("qwen3_moe"),
    "fp8-mixtral": fp8("mixtral", intermediate_size=128),
    "fp8-deepseekv3": fp8("deepseek_v3", intermediate_size=256, head_dim=32),
    "fp8-qwen2moe": fp8("qwen2_moe", unquantized=SHARED_GATES),
    "mxfp4-gptoss": mxfp4,
    "fp8-granitemoe": fp8("granitemoe", intermediate_size=64, unquantized=GRANITE),
    "fp8-block": fp8("llama"),
    "fp8-tensor": fp8("llama", block=None),
    "fp8-ue8m0": fp8("llama", scale_fmt="ue8m0"),
    "fp8-ue8m0-u8": fp8("llama", scale_fmt="ue8m0", as_bytes=True),
    "fp8-ragged": fp8("llama", hidden_size=192, intermediate_size=416, head_dim=48),
    "fp8-ragged-ue8m0": fp8("llama", scale_fmt="ue8m0", hidden_size=192, intermediate_size=416, head_dim=48),
    "fp8-qwen3moe-ragged": fp8("qwen3_moe", moe_intermediate_size=96, hidden_size=192),
    "fp8-qwen2-tied": fp8("qwen2"),
    "bitnet-bitlinear": bitnet("bitlinear"),
    "bitnet-autobitlinear": bitnet("autobitlinear"),
    "gemma-4bit": gemma("llama", 4),
    "gemma-2bit": gemma("llama", 2),
    "gemma-8bit": gemma("llama", 8),
    "gemma-embedding": gemma("gemma3_text", 4, 8, tie_word_embeddings=True),
    "gemma-embedding-blocks": gemma("gemma3_text", 4, 4, 4, tie_word_embeddings=True),
}

if __name__ == "__main__":
    run_all("transformers", MAKERS)
