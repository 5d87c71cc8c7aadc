"""Tests that moves and casts of a model on accelerators leave it right, or raise and leave it as it was."""

import copy
import pickle

import pytest
import torch

from hfq.errors import PlacementError, SetupError
from tests.support.accelerator_maps import LAYERS, MIXED
from tests.support.models import GPTQ, load

pytestmark = pytest.mark.accelerator
TOKENS = torch.arange(8)[None]
TWO = {"": "sim:0", LAYERS[2]: "sim:1", LAYERS[3]: "sim:1"}


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


@pytest.mark.parametrize("device", ["cpu", "meta", "sim:0", "sim:1", "sim:2"])
@pytest.mark.parametrize("part", ["", "model", LAYERS[2]])
@pytest.mark.parametrize("others", [{}, {LAYERS[1]: "disk"}], ids=["2", "2+disk"])
def test_a_model_on_two_accelerators_stays_there_with_its_parts(sim, expected, others, part, device):
    model = load(GPTQ, {**TWO, **others})
    before = {name: str(parameter.device) for name, parameter in model.named_parameters()}
    if part == LAYERS[2] and device == "sim:1":
        model.get_submodule(part).to(device)
    else:
        with pytest.raises(PlacementError, match=r"(on several devices|is offloaded) and cannot be moved"):
            model.get_submodule(part).to(device)
    assert {name: str(parameter.device) for name, parameter in model.named_parameters()} == before
    assert torch.equal(logits(model), expected[torch.float32])


def test_a_copy_of_a_model_on_two_accelerators_moves_and_casts_itself(sim, expected):
    model = load(GPTQ, TWO)
    copied = copy.deepcopy(model)
    copied.model.to(torch.bfloat16)  # accelerate's `copied.to` is that of the model
    assert {parameter.dtype for parameter in copied.model.norm.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(model), expected[torch.float32])
    with pytest.raises(PlacementError, match=r"cannot be moved"):
        copied.model.to("cpu")
    assert torch.equal(logits(model.to(torch.bfloat16)), expected[torch.bfloat16])


@pytest.mark.parametrize("placement", [{"": "sim:0"}, TWO], ids=["1", "2"])
def test_a_model_on_accelerators_is_not_pickled(sim, placement):
    with pytest.raises(SetupError, match="cannot be pickled"):
        pickle.dumps(load(GPTQ, placement))


@pytest.mark.parametrize("placement", MIXED)
def test_offloaded_weights_are_not_written_by_halves(sim, expected, placement):
    model = load(GPTQ, MIXED[placement])
    before = logits(model)
    state = load(GPTQ, {"": "cpu"}, cpu_memory="private").state_dict()
    with pytest.raises(PlacementError, match=r"Nothing was written\.") as caught:
        model.load_state_dict({name: tensor * 2 for name, tensor in state.items()})
    assert caught.value.tensor.startswith(LAYERS[1])
    assert torch.equal(logits(model), before)
    head = {"model.embed_tokens.weight": state["model.embed_tokens.weight"] * 2}
    model.load_state_dict(head, strict=False)
    assert not torch.equal(logits(model), before)
