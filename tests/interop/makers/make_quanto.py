"""Maker of optimum-quanto checkpoints in its own format, with quanto_qmap.json next to them.

    python make_quanto.py OUTPUT

For the reference, quanto's own tensor classes read the file, and their `dequantize` is called. Scales and
shifts are converted to float32 first, because quanto computes in their dtype. quanto does not load the whole
model, since that would repack 4-bit weights for a kernel. Its forward pass is not run, because PyTorch's
int8 kernel crashes on some CPUs.
"""

import torch
from optimum.quanto import (
    QModuleMixin,
    QTensor,
    QuantizedModelForCausalLM,
    WeightQBitsTensor,
    WeightQBytesTensor,
    qfloat8,
    qfloat8_e5m2,
    qint2,
    qint4,
    qint8,
)
from writing import build, run_all, save_tokenizer, stored, write_reference

PARTS = (
    ".weight._data",
    ".weight._scale",
    ".weight._shift",
    ".weight._data._data",
    ".input_scale",
    ".output_scale",
)


def load_weight(tensors: dict[str, torch.Tensor], name: str, module: QModuleMixin) -> QTensor:
    """Returns a module's weight as quanto reads it, before it is repacked for a kernel."""
    options = {"prefix": f"{name}.weight.", "qtype": module.weight_qtype, "axis": 0, "missing_keys": []}
    options |= {"size": module.weight.size(), "stride": module.weight.stride()}
    if module.weight_qtype in (qint2, qint4):
        return WeightQBitsTensor.load_from_state_dict(
            dict(tensors), group_size=module.weight_group_size, **options
        )
    return WeightQBytesTensor.load_from_state_dict(dict(tensors), activation_qtype=None, **options)


def dequantize(weight: QTensor) -> torch.Tensor:
    """Returns the weight in float32, dequantized by quanto."""
    weight._scale = weight._scale.float()
    if isinstance(weight, WeightQBitsTensor) and weight._shift.is_floating_point():
        weight._shift = weight._shift.float()
    return weight.dequantize()


def unquantized_tensors(folder) -> dict[str, torch.Tensor]:
    """Returns all tensors with dequantized weights, without quanto's own parts."""
    model, tensors = QuantizedModelForCausalLM.from_pretrained(folder)._wrapped, stored(folder)
    packed = {name: module for name, module in model.named_modules() if isinstance(module, QModuleMixin)}
    assert packed
    dense = {
        f"{name}.weight": dequantize(load_weight(tensors, name, module)) for name, module in packed.items()
    }
    return dense | {name: tensor for name, tensor in tensors.items() if not name.endswith(PARTS)}


def make(weights, kind: str = "llama", exclude: str | None = "lm_head", sizes: dict | None = None, **options):
    def maker(folder):
        model = QuantizedModelForCausalLM.quantize(
            build(kind, **(sizes or {})), weights=weights, exclude=exclude, **options
        )
        model.save_pretrained(folder)
        save_tokenizer(folder)
        write_reference(
            folder, unquantized_tensors(folder), "optimum-quanto's dequantize with float32 scales and shifts"
        )
        return f"{sum(name.endswith('.weight._scale') for name in stored(folder))} packed"

    return maker


ODD = {
    "hidden_size": 160,
    "intermediate_size": 416,
    "head_dim": 40,
}  # quanto then uses groups of 32 and 64, and whole rows
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MAKERS = {
    "qint8": make(qint8),
    "qint4": make(qint4),
    "qint2": make(qint2),
    "qfloat8": make(qfloat8),
    "qfloat8-e5m2": make(qfloat8_e5m2),
    "qint8-lmhead": make(qint8, exclude=None),
    "qint4-lmhead": make(qint4, exclude=None),
    "qint4-wide": make(qint4, sizes=WIDE),
    "qint4-odd": make(qint4, sizes=ODD),
    "qint2-odd": make(qint2, sizes=ODD),
    "qint8-opt": make(qint8, "opt"),
    "qint4-opt": make(qint4, "opt"),
    "qfloat8-opt": make(qfloat8, "opt"),
    "qint8-qwen2-tied": make(qint8, "qwen2"),
    "qint4-qwen2-tied": make(qint4, "qwen2"),
    "qint4-qwen2-lmhead": make(qint4, "qwen2", exclude=None),
    "qint8-mixtral": make(qint8, "mixtral"),
}

if __name__ == "__main__":
    run_all("quanto", MAKERS)
