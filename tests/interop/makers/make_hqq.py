"""Maker of HQQ checkpoints in hqq's own format, from AutoHQQHFModel.save_to_safetensors.

    python make_hqq.py OUTPUT

The config.json of such a checkpoint does not describe the quantization. Each module has a description in
small tensors. The reference decodes them with hqq's own helpers, and calls hqq's own Quantizer.dequantize.
Its compute dtype, scales, and zeros are float32.
"""

import contextlib
import io

import torch
from hqq.core.quantize import _META_TYPE, BaseQuantizeConfig, Quantizer
from hqq.core.utils import decode_safetensor_type
from hqq.models.hf.base import AutoHQQHFModel
from writing import build, run_all, save_tokenizer, stored, write_reference

FLAGS = ("W_q", "bias", "offload_meta", "encoded_state_dict", "stores_quant_config")


def dequantize(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns one module's float32 weight, dequantized by hqq."""
    meta = {
        name: decode_safetensor_type(value, _META_TYPE[name])
        for name, value in parts.items()
        if name not in FLAGS
    }
    meta |= {"compute_dtype": torch.float32, "scale": meta["scale"].float(), "zero": meta["zero"].float()}
    return Quantizer.dequantize(parts["W_q"], meta)


def unquantized_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    modules = {name.removesuffix(".W_q") for name in tensors if name.endswith(".W_q")}
    dense = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in modules}
    for module in modules:
        parts = {
            name.rpartition(".")[2]: tensor
            for name, tensor in tensors.items()
            if name.rpartition(".")[0] == module
        }
        dense[f"{module}.weight"] = dequantize(parts)
        if "bias" in parts:
            dense[f"{module}.bias"] = parts["bias"]
    return dense


def make(
    bits,
    group: int,
    axis: int = 1,
    kind: str = "llama",
    sizes: dict | None = None,
    files: int | None = None,
    **options,
):
    def maker(folder):
        model = build(kind, **(sizes or {}))
        settings = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis, **options)
        folder.rmdir()  # hqq creates it
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            AutoHQQHFModel.quantize_model(
                model, quant_config=settings, compute_dtype=torch.bfloat16, device="cpu"
            )
            AutoHQQHFModel.save_to_safetensors(
                model, str(folder), **({"num_blocks_per_file": files} if files else {})
            )
        save_tokenizer(folder)
        method = "hqq's Quantizer.dequantize with float32 compute dtype, scale and zero"
        write_reference(folder, unquantized_tensors(stored(folder)), method)
        return (
            f"W_q {stored(folder)['model.layers.0.self_attn.q_proj.W_q'].dtype}" if kind == "llama" else None
        )

    return maker


EVEN = {"hidden_size": 160, "intermediate_size": 320, "head_dim": 40}  # three bits without padding rows
MAKERS = {
    "8bit-g64": make(8, 64),
    "4bit-g64": make(4, 64),
    "3bit-g64": make(3, 64),
    "2bit-g64": make(2, 64),
    "1bit-g64": make(1, 64),
    "4bit-g128": make(4, 128),
    "4bit-g64-axis0": make(4, 64, axis=0),
    "8bit-g128-axis0": make(8, 128, axis=0),
    "3bit-g64-axis0": make(3, 64, axis=0),
    "2bit-g128-axis0": make(2, 128, axis=0),
    "1bit-g64-axis0": make(1, 64, axis=0),
    "3bit-g64-even": make(3, 64, sizes=EVEN),
    "6bit-g64": make(6, 64),
    "4bit-g64-view-as-float": make(4, 64, view_as_float=True),
    "4bit-row": make(4, None),
    "4bit-g64-qwen2": make(4, 64, kind="qwen2", sizes={"tie_word_embeddings": False}),
    "4bit-g64-qwen2-tied": make(4, 64, kind="qwen2"),
    "4bit-g64-opt": make(4, 64, kind="opt"),
    "4bit-g64-sharded": make(4, 64, files=1),
}

if __name__ == "__main__":
    run_all("hqq", MAKERS)
