"""Each architecture: every weight of a model is found in its GGUF file, with the bits that the file means."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from hfq.checkpoint.gguf.architectures import ARCHITECTURES
from tests.support.gguf_models import MODELS, make_model, write_model
from tests.support.models import logits

TOKENS = torch.tensor([[1, 5, 9, 30, 7, 3], [2, 2, 17, 39, 0, 11]])
KINDS = [
    ("Q8_0", "Q4_0"),
    *(pytest.param(kinds, marks=pytest.mark.slow) for kinds in (("BF16",), ("F16", "Q4_0"))),
]


def load(folder, device_map=None):
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=HfqConfig(), device_map=device_map, dtype=torch.float32
    )


def weight_of(model, name):
    """Returns the weight of a linear layer, an embedding, or an expert of a model in plain transformers."""
    found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down|gate_up)_proj", name)
    if found is None:
        weight = model.get_submodule(name).weight
        return weight.t() if type(model.get_submodule(name)).__name__ == "Conv1D" else weight
    experts, expert = model.get_submodule(found[1]), int(found[2])
    fused = (experts.down_proj if found[3] == "down" else experts.gate_up_proj)[expert]
    is_gpt_oss = model.config.model_type == "gpt_oss"
    fused = fused.t() if is_gpt_oss else fused
    if found[3] in ("down", "gate_up"):
        return fused
    halves = (fused[::2], fused[1::2]) if is_gpt_oss else fused.chunk(2)
    return halves[found[3] == "up"]


def test_every_architecture_is_tested():
    assert {architecture for architecture, _, _ in MODELS.values()} == ARCHITECTURES.keys()


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_file_and_logits_those_of_the_model(name, kinds, tmp_path):
    model = make_model(name)
    write_model(tmp_path, name, model, kinds)
    found = load(tmp_path, {"": "cpu"})
    for path, module in found.hf_quantizer.loading.quantized.items():
        expected = weight_of(model, path)
        weight = module.weight.t() if module.is_transposed else module.weight
        assert torch.equal(weight, expected), path
    quantized = found.hf_quantizer.loading.quantized
    for path, parameter in found.named_parameters():
        if path.rpartition(".")[0] not in quantized:
            other = model.get_parameter(path)
            if path.endswith("A_log"):  # the logarithm of an exponential
                assert torch.allclose(parameter, other, rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(parameter, other), path
    expected, resident = logits(model, TOKENS), logits(found, TOKENS)
    assert (resident - expected).norm() <= 1e-5 * expected.norm()
    assert torch.equal(logits(load(tmp_path, {"": "disk"}), TOKENS), resident)
