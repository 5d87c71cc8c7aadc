"""Tests of every format of the contract suite on an accelerator: the bits of the reference kernel on a CPU."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import HfqConfig
from hfq.modules.quantized_module import QuantizedModule
from tests.contract.cases import CASES, REPRESENTATIVES
from tests.support import tiny_models
from tests.support.models import logits

pytestmark = pytest.mark.accelerator

TOKENS = torch.tensor([[1, 5, 9, 60, 33, 2, 7], [1, 90, 4, 4, 17, 80, 3]])


@pytest.fixture(
    params=[
        pytest.param(case, id=case.id, marks=() if case.id in REPRESENTATIVES else pytest.mark.slow)
        for case in CASES
    ],
    scope="module",
)
def checkpoint(request, tmp_path_factory):
    """Returns the folder of a model of two layers in one format."""
    case = request.param
    tensors = tiny_models.model_tensors(case.format)
    metadata = tiny_models.schemas(tensors, case.schema)
    return tiny_models.write_model(
        tmp_path_factory.mktemp(case.id), tensors, case.config, metadata, case.kind
    )


def load(checkpoint, device_map):
    return AutoModelForCausalLM.from_pretrained(
        checkpoint,
        quantization_config=HfqConfig(kernel="reference"),
        device_map=device_map,
        dtype=torch.float32,
        attn_implementation="eager",  # torch's fused attention on a CPU rounds otherwise than on other devices
    )


@pytest.fixture(scope="module")
def resident(sim, checkpoint):
    """Returns the model wholly on one accelerator, after one forward pass."""
    model = load(checkpoint, {"": "sim:0"})
    logits(model, TOKENS.to("sim:0"))
    return model


def test_every_format_gives_the_bits_of_the_cpu(checkpoint, resident):
    expected, tokens = logits(load(checkpoint, None), TOKENS), TOKENS.to("sim:0")
    offloaded = load(checkpoint, {"": "sim:0", "model.layers.0": "cpu", "model.layers.1": "disk"})
    for model in (resident, offloaded, offloaded):
        assert torch.equal(logits(model, tokens).cpu(), expected)


def test_no_format_copies_a_constant_in_every_pass(sim, resident):
    formats = [each.weight_format for each in resident.modules() if isinstance(each, QuantizedModule)]
    if not all(each.has_fixed_size for each in formats):
        pytest.skip("the host reads the lengths of rows, which depend on their values")
    tokens = TOKENS.to("sim:0")
    sim.take_counts()
    logits(resident, tokens)
    counts = sim.take_counts()
    assert (counts["pageable copies"], counts["pinned copies"], counts["waited"]) == (0, 0, 0)
