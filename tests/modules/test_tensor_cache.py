"""The tensors of a module are found once, and again whenever they are others: whatever is done to its
parameters is seen.
"""

import copy
import io
import weakref

import pytest
import torch
from torch import nn

from hfq.kernels.layer_tensors import LayerTensors
from hfq.kernels.registry import KERNELS

IN = 96
BACKINGS = ["mapped", "arena"]
KERNEL_NAMES = ["reference", "torch", "cpp"]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def doubled_scales(linear) -> str:
    """The name of the tensor of scales, for a layer of the fixture."""
    return next(name for name in linear.infos if "scale" in name)


@pytest.fixture(params=KERNEL_NAMES)
def build(make, request, compiled):
    """`make`, with each kernel in turn: kernels keep what they find out about tensors."""

    def build(backing: str):
        linear = make(backing)
        linear.kernel = linear.accelerated = KERNELS[request.param]
        return linear

    return build


@pytest.mark.parametrize("backing", BACKINGS)
def test_one_mapping_serves_call_after_call(make, backing):
    linear = make(backing)
    found = linear.onloaded_tensors()
    assert type(found) is LayerTensors
    assert linear.onloaded_tensors() is found
    assert linear.stored_tensors() is not found


@pytest.mark.parametrize("backing", BACKINGS)
def test_what_is_written_in_place_is_computed_with(build, backing):
    linear, activations = build(backing), random(2, IN)
    before = linear(activations) - linear.stored_tensors()["bias"].float()
    linear.stored_tensors()[doubled_scales(linear)].mul_(2)
    after = linear(activations) - linear.stored_tensors()["bias"].float()
    assert torch.allclose(after, 2 * before, rtol=1e-4, atol=1e-4)  # the bias was added to another sum
    assert not torch.allclose(after, before, rtol=1e-2)


@pytest.mark.parametrize("how", ["parameter", "data", "load_state_dict", "to", "hold"])
def test_a_tensor_that_takes_anothers_place_is_computed_with(build, how):
    linear, activations = build("mapped"), random(2, IN)
    first = linear(activations)
    scales = doubled_scales(linear)
    other = linear.stored_tensors()[scales].clone() * 2
    linear.onloaded_tensors()
    if how == "parameter":
        linear._parameters[scales] = nn.Parameter(other, requires_grad=False)
    elif how == "data":
        linear._parameters[scales].data = other
    elif how == "load_state_dict":
        linear.load_state_dict(linear.state_dict() | {scales: other})
    elif how == "to":
        linear._apply(torch.clone)
        linear._parameters[scales].data.mul_(2)
    else:
        linear.hold(linear.stored_tensors() | {scales: other})
    found, fresh = linear(activations), build("mapped")
    fresh.hold({name: tensor.clone() for name, tensor in linear.stored_tensors().items()})
    assert torch.equal(found, fresh(activations))
    assert not torch.equal(found, first)


@pytest.mark.parametrize("how", ["none", "deleted"])
def test_a_tensor_that_comes_back_is_computed_with(build, how):
    linear, activations = build("mapped"), random(2, IN)
    expected, bias = linear(activations), linear._parameters["bias"]
    if how == "none":
        linear._parameters["bias"] = None
    else:
        del linear._parameters["bias"]
    assert not torch.equal(linear(activations), expected)
    linear._parameters["bias"] = bias
    assert torch.equal(linear(activations), expected)


def test_a_tensor_that_is_read_otherwise_in_its_place_is_computed_with(build):
    linear, fresh, activations = build("mapped"), build("mapped"), random(2, IN)
    first = linear(activations)
    for module in (linear, fresh):
        module._parameters["bias"].data = module._parameters["bias"].data.view(torch.bfloat16)
    assert torch.equal(linear(activations), fresh(activations))
    assert not torch.equal(linear(activations), first)


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("how", ["to", "meta", "parameter"])
def test_memory_of_replaced_tensors_is_given_back_before_the_next_forward(build, backing, how):
    linear = build(backing)
    linear(random(2, IN))
    found = [weakref.ref(tensor) for tensor in linear.onloaded_tensors().values()]
    if how == "parameter":  # as accelerate's hooks do
        for name, parameter in linear._parameters.items():
            linear._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        del parameter
    else:
        linear._apply(torch.clone if how == "to" else lambda tensor: tensor.to("meta"))
    assert all(tensor() is None for tensor in found)


def test_what_is_replaced_while_it_is_looked_for_is_noticed(build, monkeypatch):
    linear, activations = build("mapped"), random(2, IN)
    scales = doubled_scales(linear)
    other = nn.Parameter(linear._parameters[scales] * 2, requires_grad=False)
    find = linear.stored_tensors

    def interrupted():
        tensors = find()
        linear._parameters[scales] = other  # by another thread
        return tensors

    monkeypatch.setattr(linear, "stored_tensors", interrupted)
    first = linear(activations)
    monkeypatch.undo()
    fresh = build("mapped")
    fresh._parameters[scales] = other
    assert torch.equal(linear(activations), fresh(activations))
    assert not torch.equal(linear(activations), first)


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_used_module_computes_with_its_own_bytes(build, backing, how):
    linear, activations = build(backing), random(2, IN)
    linear.reader = None  # of the fixture alone
    expected = linear(activations)
    other = copy.deepcopy(linear) if how == "deepcopy" else pickled(linear)
    assert torch.equal(other(activations), expected)
    for tensor in other.onloaded_tensors().values():
        tensor.reshape(-1).view(torch.uint8).zero_()
    assert torch.equal(linear(activations), expected)
    assert not torch.equal(other(activations), expected)


def pickled(module):
    memory = io.BytesIO()
    torch.save(module, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


def test_what_inference_mode_finds_first_is_used_outside_of_it(make):
    linear = make("arena")
    with torch.inference_mode():
        expected = linear(random(2, IN))
    assert not any(tensor.is_inference() for tensor in linear.onloaded_tensors().values())
    activations = random(2, IN).requires_grad_()
    found = linear(activations)
    found.sum().backward()
    assert torch.equal(found.detach(), expected)


def test_a_layer_that_moved_is_described_anew(make, layer, compiled):
    weight_format, _ = layer
    linear = make("arena")
    linear.kernel = KERNELS["cpp"]
    expected = linear(random(1, IN))
    answers = linear.onloaded_tensors().answers
    assert answers["cpp"][0] is weight_format
    old = linear.flat_buffer.data
    linear.flat_buffer.data = old.clone()
    old.zero_()
    assert linear.onloaded_tensors().answers is not answers
    assert torch.equal(linear(random(1, IN)), expected)
