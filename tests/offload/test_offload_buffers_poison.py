"""Regions that are given back are filled with 0xFF: nothing that a block computes, returns or leaves behind
may depend on them.
"""

import random as plain_random
import time

import pytest
import torch

from hfq.offload.lockstep import run_in_lockstep

SIZE, LAYERS = 64, 4


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def poisoned(build, monkeypatch):
    """poisoned(layers=…) → a stack whose regions are overwritten as soon as no block is in them; reads take
    random times.
    """

    def make(layers: int = LAYERS, seed: int = 0):
        stack, dice = build(layers=layers), plain_random.Random(seed)
        buffers, source, read = stack.buffers, stack.offloader.source, stack.offloader.source.read
        give_back = buffers.give_back

        def poison(unit: int) -> None:
            give_back(unit)
            if unit not in stack.offloader._in_use and buffers.ticket_of(unit) is not None:
                region = buffers._region(unit)
                buffers.drop(unit)
                region.fill_(0xFF)

        def late(wanted, target) -> None:
            time.sleep(dice.random() * 5e-4)
            target[: wanted.nbytes] = b"\xff" * wanted.nbytes
            read(wanted, target)

        monkeypatch.setattr(buffers, "give_back", poison)
        monkeypatch.setattr(source, "read", late)
        return stack

    return make


def test_outputs_are_right_in_every_pass(poisoned, build):
    stack, resident, activations = poisoned(), build(offload=False), random(3, SIZE)
    expected = resident.model(activations)
    with torch.no_grad():
        assert all(torch.equal(stack.model(activations), expected) for _ in range(200))


def test_outputs_are_right_in_any_order_and_with_gradients(poisoned, build):
    stack, resident = poisoned(5), build(offload=False, layers=5)
    dice = plain_random.Random(3)
    for step in range(60):
        stack.model.order = resident.model.order = dice.choices(range(5), k=dice.randint(1, 6))
        inputs = [random(3, SIZE, seed=step).requires_grad_() for _ in range(2)]
        outputs = [both.model(one) for both, one in zip((stack, resident), inputs, strict=True)]
        assert torch.equal(*outputs)
        if step % 3 == 0:
            for output in outputs:
                output.square().sum().backward()
            assert torch.equal(inputs[0].grad, inputs[1].grad)


def test_jobs_in_lockstep_are_right(poisoned, build):
    stack, resident = poisoned(), build(offload=False)
    batches = [random(2, SIZE, seed=seed) for seed in range(3)]
    expected = [resident.model(resident.model(batch)) for batch in batches]
    for _ in range(15):
        found = run_in_lockstep(
            stack.offloader, [lambda batch=batch: stack.model(stack.model(batch)) for batch in batches]
        )
        assert all(map(torch.equal, found, expected))


def test_what_a_block_returns_of_its_own_weight_survives(poisoned, build):
    stack, resident, activations = poisoned(), build(offload=False), random(3, SIZE)

    def parts(layer, outputs):
        tensors = layer.q.onloaded_tensors()
        return {"outputs": outputs, "views": [layer.scale.view(8, 8)[1:], layer.norm.bias, *tensors.values()]}

    for both in (stack, resident):
        both.model[1].result = parts
    with torch.no_grad():
        found, expected = stack.model[1](activations), resident.model[1](activations)
        for _ in range(2):
            stack.model[0](activations), stack.model[2](activations), stack.model[3](activations)
    assert torch.equal(found["outputs"], expected["outputs"])
    assert len(found["views"]) == len(expected["views"]) == 4
    for one, other in zip(found["views"], expected["views"], strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_a_dense_parameter_used_after_its_forward_fails_and_gives_no_other_blocks_bytes(poisoned):
    stack, activations = poisoned(), random(3, SIZE)
    with torch.no_grad():
        stack.model(activations)
    for layer in stack.model:
        assert layer.scale.is_meta
        with pytest.raises((RuntimeError, NotImplementedError)):
            (activations * layer.scale).sum().item()


def test_a_packed_layer_used_after_its_forward_reads_its_own_bytes_again(poisoned, build):
    stack, resident, activations = poisoned(), build(offload=False), random(3, SIZE)
    stack.model(activations)
    for layer, own in zip(stack.model, resident.model, strict=True):
        late, right = layer.q.onloaded_tensors(), own.q.onloaded_tensors()
        assert all(torch.equal(late[name].view(torch.uint8), right[name].view(torch.uint8)) for name in right)
        assert torch.equal(layer.k(activations), own.k(activations))
