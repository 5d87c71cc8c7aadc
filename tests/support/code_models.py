"""Tiny FP8 models of many architectures; the code of some reads the weights of its layers."""

import json
import re

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.pytorch_utils import Conv1D

from hfq.checkpoint import write_safetensors
from hfq.formats.fp8 import Fp8
from tests.support import tiny_models

CONFIG = {"quant_method": "fbgemm_fp8"}
TOKENS = {"input_ids": torch.tensor([[1, 5, 9, 60, 33, 2, 7]])}
SIGLIP = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "vision_use_head": False,
}
FALCON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 8, "time_step_rank": 16}
T5 = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 96,
    "decoder_start_token_id": 0,
}
LLAMA = {
    key: value for key, value in tiny_models.CONFIG.items() if key not in ("model_type", "architectures")
}
PIXELS = {"pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)}


def write(folder, auto, kind: str, options: dict, packed: str):
    """Returns (a float32 model with the dequantized weights, the folder of its quantized checkpoint)."""
    torch.manual_seed(5)
    model = auto.from_config(AutoConfig.for_model(kind, **options), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn(parameter.shape) * (0.1 if parameter.dim() > 1 else 0.5)
        parameter.data += 1.0 if "norm" in name else 0.0
    tensors, weight_format = {}, Fp8()
    for name, tensor in list(model.state_dict().items()):
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and re.search(packed, module):
            is_transposed = isinstance(model.get_submodule(module), Conv1D)
            stored = weight_format.quantize(tensor.t().contiguous() if is_transposed else tensor)
            tensors |= {f"{module}.{local}": t for local, t in stored.items()}
            weight = weight_format.dequantize(stored)
            model.get_parameter(name).data = weight.t().contiguous() if is_transposed else weight
        elif name not in model.all_tied_weights_keys:
            tensors[name] = tensor.clone()
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(
        folder / "model.safetensors",
        {n: tiny_models.as_stored(t) for n, t in tensors.items()},
        {"format": "pt"},
    )
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "quantization_config": CONFIG}
    (folder / "config.json").write_text(json.dumps(config))
    return model, folder


CASES = {
    "siglip, whose initialisation zeroes biases": (
        AutoModel,
        "siglip_vision_model",
        SIGLIP,
        r"_proj$|fc\d$",
        PIXELS,
    ),
    "falcon, whose linear layers have a forward of their own": (
        AutoModelForCausalLM,
        "falcon",
        FALCON,
        r"(query_key_value|dense\w*)$",
        TOKENS,
    ),
    "mamba, which reads weight and bias": (
        AutoModelForCausalLM,
        "mamba",
        MAMBA,
        r"(in|x|dt|out)_proj$",
        TOKENS,
    ),
    "t5, which reads the dtype of a weight": (
        AutoModelForSeq2SeqLM,
        "t5",
        T5,
        r"\.(q|k|v|o|wi|wo)$",
        {**TOKENS, "decoder_input_ids": TOKENS["input_ids"]},
    ),
}
