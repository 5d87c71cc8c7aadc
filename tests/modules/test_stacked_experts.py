"""Experts that compute together by the device's own routing equal those that compute one by one."""

import copy
import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from hfq.formats.gptq import Gptq
from hfq.kernels.registry import KERNELS
from hfq.modules.experts import QuantizedExperts
from hfq.modules.linear import QuantizedLinear
from tests.support import tiny_models
from tests.support.triton_device import DEVICE

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
EXPERTS, HIDDEN, INTERMEDIATE, CHOSEN = 4, 64, 32, 2


def layer(out_features: int, in_features: int) -> QuantizedLinear:
    """Returns a layer of random GPTQ codes that the Triton kernel multiplies."""
    weight_format = Gptq(4, 32, True, "stored", g_idx_length=in_features)
    tensors = weight_format.quantize(torch.randn(out_features, in_features))
    tensors = {local: tensor.contiguous() for local, tensor in tensors.items()}
    shape = (out_features, in_features)
    found = tiny_models.settled(weight_format, tensors, {"checkpoint_format": "gptq_v2"}, shape)
    described = tiny_models.described("m", tensors)
    kernel = KERNELS["triton"]
    module = QuantizedLinear("m", in_features, out_features, found, described, kernel, accelerated=kernel)
    module.hold({local: tensor.to(DEVICE) for local, tensor in tensors.items()})
    return module


def gated(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.fixture
def experts():
    torch.manual_seed(3)
    sizes = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN)}
    sizes["down_proj"] = (HIDDEN, INTERMEDIATE)
    return QuantizedExperts(
        [{local: layer(*size) for local, size in sizes.items()} for _ in range(EXPERTS)], gated
    )


def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(tokens)])
    weights = torch.rand(tokens, CHOSEN, generator=generator)
    return tuple(each.to(DEVICE) for each in (hidden, index, weights))


@pytest.mark.parametrize("tokens", [1, 4, 5, 20])
def test_experts_with_weights_apart_give_the_same_bits(experts, tokens):
    found = experts(*inputs(tokens))
    fetched = []
    for number in (1, 3):
        for each in experts[number].values():
            tensors = each.stored_tensors()
            each.is_offloaded = True
            each.fetch = lambda tensors=tensors: fetched.append(1) or tensors
    assert torch.equal(experts(*inputs(tokens)), found)
    assert fetched


def test_stacks_are_kept_until_a_layer_changes(experts):
    made, kernel = [], KERNELS["triton"]
    spied = dataclasses.replace(
        kernel.experts, products=lambda *layers: made.append(1) or kernel.experts.products(*layers)
    )
    spied = dataclasses.replace(kernel, experts=spied)
    for each in (each for own in experts for each in own.values()):
        each.kernel = each.accelerated = spied
    first = experts(*inputs(2))
    assert torch.equal(experts(*inputs(2)), first)
    assert len(made) == 1
    changed = experts[1]["up_proj"]
    changed.hold({local: tensor.clone() for local, tensor in changed.stored_tensors().items()})
    assert torch.equal(experts(*inputs(2)), first)
    assert len(made) == 2
    changed.hold({local: tensor.clone() for local, tensor in experts[0]["up_proj"].stored_tensors().items()})
    other = experts(*inputs(2))
    assert not torch.equal(other, first)


def test_hooks_and_other_kernels_are_called(experts):
    found = experts(*inputs(3))
    called = []
    handle = experts[0]["up_proj"].register_forward_hook(lambda *_: called.append(1))
    experts(*inputs(3))
    assert called
    handle.remove()
    called.clear()
    assert torch.equal(experts(*inputs(3)), found)
    assert not called
    spied = dataclasses.replace(KERNELS["triton"], experts=None)
    for each in experts[0].values():
        each.kernel = each.accelerated = spied
    assert experts(*inputs(3)).shape == found.shape


def test_a_copy_makes_its_own_stacks(experts):
    found = experts(*inputs(1))
    copied = copy.deepcopy(experts)
    for own in copied:
        for each in own.values():
            each.hold({local: tensor.clone() for local, tensor in each.stored_tensors().items()})
    assert torch.equal(copied(*inputs(1)), found)


def test_no_tokens_and_gradients_need_no_stack(experts):
    hidden, index, weights = inputs(3)
    assert experts(hidden[:0], index[:0], weights[:0]).shape == (0, HIDDEN)
    hidden.requires_grad_()
    experts(hidden, index, weights).float().sum().backward()
    assert hidden.grad.abs().sum() > 0
