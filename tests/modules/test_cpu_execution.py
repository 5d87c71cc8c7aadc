"""A layer that computes where it rests, or where its activations are: the same bits, and the cheaper way for
each number of rows.
"""

import dataclasses

import pytest
import torch

from hfq.errors import PlacementError
from hfq.kernels.registry import KERNELS
from hfq.modules.cpu_execution import CPU_ROWS, CpuExecution
from hfq.modules.linear import QuantizedLinear

CPU = torch.device("cpu")
"""Stands for the accelerator: what is computed there is then computed by the same kernel, and can be compared
bit for bit.
"""


def random_rows(count: int, in_features: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(count, in_features, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("backing", ["mapped", "arena"])
def test_few_rows_compute_at_home_and_many_where_they_are(make, backing):
    linear, resident, home = (
        make(backing),
        make(backing),
        CpuExecution(CPU, "auto", QuantizedLinear.stored_tensors),
    )
    home.serve(linear)
    for rows in (1, CPU_ROWS, CPU_ROWS + 1, 40):
        activations = random_rows(rows, linear.in_features, torch.bfloat16)
        assert torch.equal(linear(activations), resident(activations))
    assert (home.cpu_forwards, home.fetches) == (2, 2)


def test_at_home_nothing_is_ever_brought_elsewhere(make):
    linear, resident, home = (
        make("mapped"),
        make("mapped"),
        CpuExecution(CPU, "cpu", QuantizedLinear.stored_tensors),
    )
    home.serve(linear)
    activations = random_rows(40, linear.in_features).view(2, 20, -1).requires_grad_()
    linear(activations).square().sum().backward()
    found, activations.grad = activations.grad, None
    resident(activations).square().sum().backward()
    assert torch.equal(found, activations.grad)
    assert (home.cpu_forwards, home.fetches) == (2, 0)


def test_rows_whose_bytes_are_more_than_the_layers_are_not_sent(make):
    linear, home = make("mapped"), CpuExecution(CPU, "auto", QuantizedLinear.stored_tensors)
    nbytes = sum(info.nbytes for info in linear.infos.values())
    moved = (linear.in_features + linear.out_features) * 4
    for rows in range(1, CPU_ROWS + 1):
        assert home.is_chosen(linear, random_rows(rows, linear.in_features)) is (rows * moved < nbytes)


def test_code_that_reads_the_weight_is_brought_it_and_the_layer_stays(make):
    linear, home = make("mapped"), CpuExecution(CPU, "cpu", QuantizedLinear.stored_tensors)
    expected = linear.weight
    home.serve(linear)
    assert torch.equal(linear.weight, expected)
    assert home.fetches == 1
    linear.to("cpu")
    with pytest.raises(PlacementError, match="cannot be moved"):
        linear.to("meta")


def test_what_others_fetch_they_go_on_fetching(make):
    linear, home, fetched = make("mapped"), CpuExecution(CPU, "auto", QuantizedLinear.stored_tensors), []
    row = linear.stored_tensors()
    linear.fetch, linear.is_offloaded = lambda: fetched.append(1) or row, True
    home.serve(linear)
    linear(random_rows(1, linear.in_features, torch.bfloat16))
    assert fetched == []
    linear(random_rows(40, linear.in_features))
    assert fetched == [1]
    assert home.fetches == 0


def test_each_type_of_device_has_its_own_kernel(make):
    asked = []

    def multiply(activations, tensors, weight_format):
        asked.append(activations.device.type)
        return activations.new_empty(*activations.shape[:-1], 64)

    made = make("mapped")
    accelerated = dataclasses.replace(KERNELS["reference"], linear=multiply)
    linear = QuantizedLinear(
        "m", 96, 64, made.weight_format, made.infos, KERNELS["reference"], None, accelerated
    )
    linear.hold(made.stored_tensors())
    assert linear(torch.zeros(2, 96, device="meta")).shape == (2, 64)
    assert asked == ["meta"]
    assert linear(torch.zeros(2, 96)).device == CPU
    assert asked == ["meta"]
