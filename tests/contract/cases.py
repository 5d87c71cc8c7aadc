"""The table of the contract suite: a format joins by one row for each of its variants."""

from dataclasses import dataclass

from hfq.formats.base import Format
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq

GPTQMODEL = {"quant_method": "gptq", "checkpoint_format": "gptq", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}


@dataclass(frozen=True)
class Case:
    """A variant of a format: what quantizes with it, and the quantization_config that goes with the tensors."""

    id: str
    format: Format
    config: dict


def gptq(id: str, zero_reading: str, config: dict, **options) -> Case:
    weight_format = Gptq(zero_reading=zero_reading, g_idx_length=128, **options)
    hints = {"bits": weight_format.num_bits, "group_size": weight_format.group_size, "sym": weight_format.symmetric}
    return Case(id, weight_format, {**config, **hints})


V2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
AUTOGPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq"}


def compressed_tensors(strategy: str, **options) -> dict:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **options}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


CASES = [
    gptq("gptq-v1-w4-sym", "word_plus_one", GPTQMODEL, num_bits=4, group_size=64),
    gptq("gptq-v1-w4-asym", "word_plus_one", GPTQMODEL, num_bits=4, group_size=32, symmetric=False),
    gptq("gptq-v2-w4-asym", "stored", V2, num_bits=4, group_size=32, symmetric=False),
    gptq("gptq-v1-w3-sym", "masked_plus_one", GPTQMODEL, num_bits=3, group_size=128),
    gptq("gptq-v1-w2-sym", "word_plus_one", GPTQMODEL, num_bits=2, group_size=32),
    gptq("gptq-v1-w8-channel", "word_plus_one", GPTQMODEL, num_bits=8, group_size=-1),
    gptq("gptq-autogptq-w4", "field_plus_one", AUTOGPTQ, num_bits=4, group_size=128),
    Case(
        "fp8-block",
        Fp8(strategy="block", block_structure=(128, 128), scale_name="weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    Case(
        "fp8-block-ragged",
        Fp8(strategy="block", block_structure=(48, 80), scale_name="weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 80]},
    ),
    Case("fp8-tensor", Fp8(strategy="tensor"), compressed_tensors("tensor")),
    Case("fp8-channel", Fp8(strategy="channel"), compressed_tensors("channel")),
    Case("fp8-group", Fp8(strategy="group", group_size=64), compressed_tensors("group", group_size=64)),
    Case(
        "fp8-autofp8-static",
        Fp8(strategy="tensor", scale_shape=(), input_scale_name="input_scale"),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
    Case("fp8-fbgemm", Fp8(strategy="channel"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    Case(
        "fp8-gptqmodel-reciprocal",
        Fp8(strategy="channel", scale_shape=(1,), scale_name="weight_scale_inv", reciprocal=True),
        {"quant_method": "fp8", "format": "float8_e4m3fn", "bits": 8, "weight_scale_semantics": "inverse"},
    ),
    Case("fp8-e5m2", Fp8(strategy="channel", codes_dtype="F8_E5M2"), compressed_tensors("channel")),
]
