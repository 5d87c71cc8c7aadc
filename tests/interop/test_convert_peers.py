"""Tests that other projects' readers load converted checkpoints with equal weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from hfq.checkpoint import Checkpoint
from hfq.convert import convert_checkpoint
from hfq.modules.linear import QuantizedLinear
from tests.contract.cases import CASES
from tests.support import tiny_models

pytestmark = pytest.mark.peers

ROWS = {case.id: case for case in CASES}
GPTQ, FP8 = tiny_models.DATA / "tiny-llama-gptq", tiny_models.DATA / "tiny-llama-fp8"
TOKENS = torch.arange(1, 25)[None]


def converted(path, folder, *targets):
    for number, to in enumerate(targets):
        convert_checkpoint(Checkpoint.open(path), folder / str(number), to)
        path = folder / str(number)
    return path


def made(folder, name):
    case = ROWS[name]
    tensors = tiny_models.model_tensors(case.format)
    scales = {key: tensor.bfloat16() for key, tensor in tensors.items() if key.endswith("weight_scale")}
    return tiny_models.write_model(folder, tensors | scales, case.config)


def packed_layers(path, quantize_activations=False):
    config = HfqConfig(kernel="reference", quantize_activations=quantize_activations)
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=torch.float32)
    return model, {
        name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)
    }


def test_transformers_gives_the_same_logits_of_fine_grained_fp8(tmp_path):
    found = AutoModelForCausalLM.from_pretrained(
        converted(FP8, tmp_path, "float-quantized", "fp8"), dtype=torch.bfloat16
    )
    expected = AutoModelForCausalLM.from_pretrained(FP8, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(found(TOKENS).logits, expected(TOKENS).logits)


SOURCES = [
    "gptq-v1-w4-sym",
    "gptq-v2-w4-asym",
    "gptq-v1-w3-sym",
    "gptq-v1-w8-channel",
    "fp8-block",
    "fp8-autofp8-static",
]


@pytest.mark.parametrize("name", SOURCES)
def test_compressed_tensors_own_decompression_gives_the_sources_weights(tmp_path, name):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    path = made(tmp_path / "source", name)
    target = converted(path, tmp_path, "float-quantized" if "fp8" in name else "pack-quantized")
    options = Checkpoint.open(target).config["quantization_config"]
    (scheme,) = QuantizationConfig(**options).config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(options["format"])
    tensors = tiny_models.stored_tensors(target)
    _, layers = packed_layers(path)
    assert len(layers) == 14
    for module, layer in layers.items():
        local = {
            key.removeprefix(f"{module}."): tensor
            for key, tensor in tensors.items()
            if key.startswith(f"{module}.")
        }
        found = compressor.decompress(local, scheme)["weight"]
        assert torch.equal(found, layer.weight.to(found.dtype)), module


@pytest.mark.parametrize(
    ("path", "to"), [(GPTQ, "pack-quantized"), (FP8, "float-quantized")], ids=["gptq", "fp8"]
)
def test_transformers_with_compressed_tensors_gives_hfqs_logits(tmp_path, path, to):
    target = converted(path, tmp_path, to)
    stock = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model, _ = packed_layers(path, quantize_activations=True)
    with torch.no_grad():
        expected, found = model(TOKENS).logits, stock(TOKENS).logits
    # Products over panels may sum in another order, which can change a rounding of FP8 activations.
    assert (found - expected).norm() <= (1e-3 if path is FP8 else 1e-5) * expected.norm()
