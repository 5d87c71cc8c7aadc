"""Tests that moves and casts of a model on accelerators leave it right, or raise and leave it as it was."""

import pickle

import pytest
import torch

from hfq.errors import PlacementError, SetupError
from tests.support.accelerator_maps import LAYERS, MIXED
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator
TOKENS = torch.arange(8)[None]


@pytest.fixture(scope="module")
def expected(sim):
    model = load(GPTQ, {"": "sim:0"})
    return {dtype: logits(model.to(dtype)) for dtype in (torch.float32, torch.bfloat16)}


def logits(model) -> torch.Tensor:
    model.set_attn_implementation("eager")  # torch's fused attention differs between kinds of devices
    with torch.no_grad():
        return model(TOKENS.to(model.device)).logits.cpu()


@pytest.mark.parametrize("device", ["cpu", "sim:0", "sim:1"])
@pytest.mark.parametrize("start", ["cpu", "sim:0"])
def test_a_model_that_is_whole_moves_between_devices(sim, expected, start, device):
    model = load(GPTQ, {"": start}, kernel="reference").to(device)
    assert {str(parameter.device) for parameter in model.parameters()} == {device}
    assert torch.equal(logits(model), expected[torch.float32])


@pytest.mark.parametrize("device", ["cpu", "meta", "sim:2", "sim:1", "sim:0"])
@pytest.mark.parametrize("placement", MIXED)
def test_a_model_with_offloaded_parts_stays_whole(sim, expected, placement, device):
    model = load(GPTQ, MIXED[placement])
    before = {name: str(parameter.device) for name, parameter in model.named_parameters()}
    if placement == "1+cpu+disk" and device == "sim:0":
        assert model.to(device) is model
    else:
        with pytest.raises(PlacementError, match=r"is offloaded and cannot be moved"):
            model.to(device)
    assert {name: str(parameter.device) for name, parameter in model.named_parameters()} == before
    assert torch.equal(logits(model), expected[torch.float32])


@pytest.mark.parametrize("device", ["cpu", "sim:0", "sim:1", "sim:2"])
def test_a_model_on_two_accelerators_stays_whole(sim, expected, device):
    model = load(GPTQ, {"": "sim:0", LAYERS[2]: "sim:1", LAYERS[3]: "sim:1"})
    before = {name: str(parameter.device) for name, parameter in model.named_parameters()}
    for part in (model, model.get_submodule(LAYERS[2])):
        if part is not model and device == "sim:1":
            continue
        with pytest.raises(PlacementError, match="is a part of a model on several devices"):
            part.to(device)
    assert {name: str(parameter.device) for name, parameter in model.named_parameters()} == before
    assert torch.equal(logits(model), expected[torch.float32])


def test_a_model_on_accelerators_is_not_pickled(sim):
    for device_map in ({"": "sim:0"}, {"": "sim:0", LAYERS[3]: "sim:1"}):
        with pytest.raises(SetupError):
            pickle.dumps(load(GPTQ, device_map))


def test_the_parts_in_memory_do_not_move_without_those_on_disk(sim):
    model = load(GPTQ, {"": "cpu", LAYERS[3]: "disk"})
    expected = logits(model)
    with pytest.raises(PlacementError, match=r"expected: cpu\n *found: sim:1"):
        model.to("sim:1")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("placement", MIXED)
def test_a_cast_changes_the_dtype_of_activations(sim, expected, placement):
    model = load(GPTQ, MIXED[placement])
    assert model.to(torch.bfloat16) is model
    assert torch.equal(logits(model), expected[torch.bfloat16])
    with pytest.raises(ValueError, match=r"`.half\(\)` is not supported"):  # of transformers
        model.half()
