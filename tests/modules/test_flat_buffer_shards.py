"""A row that others gather and let go of: the module computes with it while it is whole, and says so where it
is not.
"""

import pytest
import torch
from torch import nn

from hfq import PlacementError
from hfq.modules.flat_buffer import FlatBuffer
from hfq.modules.offloaded_parameter import OffloadedParameter

INPUT = torch.randn(3, 96, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def sharded(make):
    """(a module that holds a row viewed as bfloat16, the same module in an arena, a switch that gathers and
    frees the row).
    """
    linear, plain = make("meta"), make("arena")
    row = FlatBuffer.read(linear.reader, linear.infos)
    parameter = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)
    is_whole = [False]
    linear.hold_shard(parameter, row.segments, lambda: is_whole[0])

    def gather(whole: bool) -> None:
        is_whole[0] = whole
        parameter.data = (
            row.buffer.clone().view(torch.bfloat16) if whole else torch.empty(0, dtype=torch.bfloat16)
        )

    return linear, plain, gather


def test_it_computes_from_the_gathered_bytes(sharded):
    linear, plain, gather = sharded
    gather(True)
    assert torch.equal(linear(INPUT), plain(INPUT))
    assert torch.equal(linear.weight, plain.weight)
    assert [name for name, _ in linear.named_parameters()] == ["flat_buffer"]


def test_the_backward_reads_the_row_again(sharded):
    linear, plain, gather = sharded
    grads = []
    for layer in (linear, plain):
        activations = INPUT.clone().requires_grad_()
        gather(True)
        output = layer(activations)
        gather(False)  # as ZeRO does between forward and backward
        gather(True)
        output.sum().backward()
        grads.append(activations.grad)
    assert torch.equal(*grads)


def test_a_row_that_is_not_gathered_is_an_error_and_its_weight_a_stand_in(sharded):
    linear, _, gather = sharded
    gather(True)
    gather(False)
    with pytest.raises(PlacementError, match=r"(?s)weights on meta|not gathered"):
        linear(INPUT)
    assert isinstance(linear.weight, OffloadedParameter)
    assert linear.weight.shape == (64, 96)
    with pytest.raises(PlacementError):
        INPUT @ linear.weight.t()


def test_its_state_speaks_on_disk_names_and_holds_no_bytes_while_sharded(sharded):
    linear, plain, gather = sharded
    assert list(linear.state_dict()) == list(plain.state_dict())
    assert all(tensor.is_meta for tensor in linear.state_dict().values())
    gather(True)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(
            linear.state_dict()[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
        )


def test_casts_and_moves_leave_the_parameter_to_its_owner(sharded):
    linear, _, _ = sharded
    parameter = linear.flat_buffer
    linear.to(torch.float16)
    assert linear.flat_buffer is parameter
    assert linear.dtype == torch.float16


def test_a_state_without_bytes_loads_into_a_module_without_bytes(sharded):
    linear, plain, _ = sharded
    assert linear.load_state_dict(linear.state_dict()).missing_keys == []
    with pytest.raises(RuntimeError, match="is on disk"):
        linear.load_state_dict(plain.state_dict())
