"""Maker of AMD Quark checkpoints, for schemes that Quark quantizes on a CPU.

    python make_quark.py OUTPUT

Quark's own importer reads each file back, and its quantizers dequantize the weights. Their scales are
converted to float32 first, because Quark computes in their dtype.
"""

import torch
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
from quark.torch.quantization.config.config import QConfig
from quark.torch.quantization.config.template import QuantizationSchemeCollection
from transformers import AutoConfig, AutoModelForCausalLM
from writing import build, logits, run_all, save_tokenizer, stored, tokens, write_reference

PARTS = ("weight_scale", "weight_scale_2", "weight_zero_point", "weight_zero_point_2")
INPUTS = ("input_scale", "input_scale_2", "input_zero_point")


def dequantize(folder) -> dict[str, torch.Tensor]:
    """Returns all tensors with the weights that Quark dequantizes, in float32."""
    blank = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model = import_model_from_safetensors(blank, str(folder)).float()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QParamsLinear)}
    assert layers
    dense = {name: tensor for name, tensor in stored(folder).items() if not name.endswith((*PARTS, *INPUTS))}
    for name, module in layers.items():
        dense[f"{name}.weight"] = module._get_qweight(module.weight).float()
    return dense


def make(scheme: str, pack_method: str = "reorder", sizes: dict | None = None):
    def maker(folder):
        model = build("llama", **(sizes or {}))
        plain = logits(model)
        settings = QuantizationSchemeCollection().get_scheme(scheme).config
        config = QConfig(global_quant_config=settings, exclude=["lm_head"])
        quantizer = ModelQuantizer(config)
        model = quantizer.freeze(quantizer.quantize_model(model, [tokens()]))
        export_safetensors(model, folder, pack_method=pack_method)
        save_tokenizer(folder)
        expected = write_reference(folder, dequantize(folder), "Quark's importer and its quantizers")
        return f"the logits are {(plain - expected).norm() / expected.norm():.3f} away from the dense model's"

    return maker


MAKERS = {
    "int4-g32": make("int4_wo_32"),
    "int4-g32-order": make("int4_wo_32", pack_method="order"),
    "uint4-g64": make("uint4_wo_64"),
    "uint4-g64-order": make("uint4_wo_64", pack_method="order"),
    "int4-channel": make("int4_wo_per_channel"),
    "uint4-channel": make("uint4_wo_per_channel"),
    "uint4-channel-order": make("uint4_wo_per_channel", pack_method="order"),
    "int4-wa": make("int4_wa_64"),
    "int8": make("int8"),
    "fp8": make("fp8"),
    "ptpc-fp8": make("ptpc_fp8"),
    "mxfp4": make("mxfp4_weight_only"),
    "mxfp4-fp8": make("mxfp4_fp8"),
    "mxfp6-e3m2": make("mxfp6_e3m2"),
    "mxfp6-e2m3": make("mxfp6_e2m3"),
    "amdfp4": make("amdfp4"),
    "amdfp4-g32": make("amdfp4_g32"),
    "amdfp4-global16": make("amdfp4_global16"),
    "nvfp4": make("nvfp4"),
    "int4-fp8": make("int4_fp8"),
    "mx6": make("mx6"),
}

if __name__ == "__main__":
    run_all("quark", MAKERS)
