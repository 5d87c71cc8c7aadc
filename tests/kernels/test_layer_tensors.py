"""Tests that no kernel of the CPU takes the address of a tensor on another device."""

import pytest
import torch

from hfq.errors import SetupError
from hfq.kernels.layer_tensors import LayerTensors
from hfq.kernels.registry import KERNELS
from tests.support.kernel_layers import CASES
from tests.support.other_devices import ON_CPU, calls_with


@pytest.mark.parametrize("kernel", ON_CPU)
def test_a_kernel_of_the_cpu_refuses_a_tensor_without_memory(native, kernel):
    for name, arguments in calls_with(kernel, "meta"):
        with pytest.raises(SetupError, match="received a tensor on another device") as caught:
            KERNELS[kernel].linear(*arguments)
        assert (caught.value.tensor, caught.value.found) == (name, "meta")
        assert caught.value.expected.endswith(" B in CPU memory")


@pytest.mark.parametrize("kernel", ["torch", "cpp"])
def test_a_gradient_on_another_device_is_refused(native, kernel):
    weight_format, tensors = CASES["w4 g32"].make()
    grad = torch.ones(2, CASES["w4 g32"].out_features, device="meta")
    with pytest.raises(SetupError, match="received a tensor on another device"):
        KERNELS[kernel].linear_grad(grad, tensors, weight_format)


def test_tensors_that_a_module_holds_are_checked_once(native):
    weight_format, tensors = CASES["w4 g32"].make()
    held = LayerTensors(tensors)
    KERNELS["cpp"].linear(torch.ones(1, 352), held, weight_format)
    assert "cpp" in held.answers
    moved = LayerTensors({name: tensor.to("meta") for name, tensor in tensors.items()})
    with pytest.raises(SetupError, match="received a tensor on another device"):
        KERNELS["cpp"].linear(torch.ones(1, 352), moved, weight_format)
