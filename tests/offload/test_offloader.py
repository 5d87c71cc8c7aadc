"""A block's parts are there during its forward and gone after it, whatever happens in between."""

import pytest
import torch

SIZE = 64


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, SIZE), (2, 5, SIZE), (0, SIZE)])
def test_a_stack_on_disk_computes_what_a_resident_one_does(build, shape, dtype):
    offloaded, resident = build(dtype=dtype), build(offload=False, dtype=dtype)
    activations = random(*shape).to(dtype)
    expected = resident.model(activations)
    assert torch.equal(offloaded.model(activations), expected)
    assert torch.equal(offloaded.model(activations), expected)


def test_parts_are_present_during_the_forward_and_on_meta_after_it(build):
    stack = build()
    seen = []

    def probe(layer):
        seen.append(
            [
                layer.norm.weight.is_meta,
                layer.scale.is_meta,
                *(t.is_meta for t in layer.q.onloaded_tensors().values()),
            ]
        )

    stack.model[0].probe = probe
    assert stack.is_offloaded()
    stack.model(random(3, SIZE))
    assert len(seen) == 1
    assert not any(seen[0])
    assert stack.is_offloaded()


def test_the_same_parameters_are_back_after_the_forward(build):
    stack = build()
    before = dict(stack.model.named_parameters())
    stack.model(random(3, SIZE))
    after = dict(stack.model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_a_dense_parameter_is_cast_to_its_dtype(build):
    stack, seen = build(dtype=torch.bfloat16), []
    stack.model[1].probe = lambda layer: seen.extend([layer.norm.bias, layer.scale])
    stack.model(random(3, SIZE).bfloat16())
    resident = build(offload=False).model[1]
    assert torch.equal(seen[0], resident.norm.bias.bfloat16())
    assert torch.equal(seen[1], resident.scale.bfloat16())
    assert not any(value.requires_grad for value in seen)


def test_all_blocks_share_one_buffer_of_two_neighbours(build):
    stack, addresses = build(), []
    for layer in stack.model:
        layer.probe = lambda layer: addresses.append(layer.q.onloaded_tensors()["weight"].data_ptr())
    stack.model(random(3, SIZE))
    stack.model(random(3, SIZE))
    buffer, sizes = (
        stack.buffers.buffer,
        [layout.nbytes for layout in stack.offloader.layouts],
    )
    assert buffer.numel() == max(size + sizes[index - 1] for index, size in enumerate(sizes))
    assert len(addresses) == 8
    assert all(buffer.data_ptr() <= address < buffer.data_ptr() + buffer.numel() for address in addresses)


def test_a_resident_stack_reads_nothing(build):
    stack = build(offload=False)
    stack.model(random(3, SIZE))
    assert stack.reader.counters.bytes_read == 0


def test_a_packed_layer_that_rests_in_memory_is_not_read(build):
    stack, resident = build(resident=("0.q",)), build(offload=False)
    activations, layer = random(3, SIZE), stack.model[0]
    assert torch.equal(stack.model(activations), resident.model(activations))
    own = sum(info.nbytes for info in layer.q.infos.values())
    assert stack.offloader.pass_nbytes == sum(stack.nbytes) - own
    assert not layer.q.weight.is_meta


def test_a_block_takes_keywords(build):
    offloaded, resident, activations = build(), build(offload=False), random(3, SIZE)
    expected = resident.model[0](activations=activations, gain=0.5)
    assert torch.equal(offloaded.model[0](activations=activations, gain=0.5), expected)
    assert not torch.equal(offloaded.model[0](activations), expected)


def test_a_part_that_is_called_alone_is_read_alone(build):
    stack, resident, activations = build(), build(offload=False), random(3, SIZE)
    assert torch.equal(stack.model[0].norm(activations), resident.model[0].norm(activations))
    assert torch.equal(stack.model[0].k(activations), resident.model[0].k(activations))
    norm, k = 2 * SIZE * 4, sum(info.nbytes for info in stack.model[0].k.infos.values())
    assert stack.reader.counters.bytes_read == norm + k
    assert stack.is_offloaded()


def test_inference_mode_and_plain_forwards_may_alternate(build):
    stack, activations = build(), random(3, SIZE)
    with torch.inference_mode():
        first = stack.model(activations)
    second = stack.model(activations.requires_grad_())
    assert torch.equal(first, second)
    second.sum().backward()
    with torch.inference_mode():
        assert torch.equal(stack.model(activations), first)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_gradient_through_offloaded_blocks_is_that_of_resident_ones(build, steps):
    gradients = []
    for stack in (build(), build(offload=False)):
        activations = random(4, SIZE).requires_grad_()
        for _ in range(steps):
            stack.model(activations).square().sum().backward()
        gradients.append(activations.grad)
        assert all(parameter.grad is None for parameter in stack.model.parameters())
    assert torch.equal(*gradients)


def test_a_backward_reads_the_packed_layers_again_and_nothing_else(build):
    stack = build()
    loss = stack.model(random(4, SIZE).requires_grad_()).sum()
    before = stack.quiet()
    loss.backward()
    assert stack.quiet() == before + sum(stack.quantized_nbytes)
    assert stack.is_offloaded()
