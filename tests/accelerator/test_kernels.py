"""Tests of the kernels on accelerators of a kind that hfq has no kernel for."""

import pytest
import torch

from hfq.errors import SetupError
from hfq.formats import ActivationScheme
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.kernels.registry import KERNELS, choose_kernel
from tests.support.other_devices import ON_CPU, calls_with

pytestmark = pytest.mark.accelerator


@pytest.mark.parametrize("preference", ["auto", *KERNELS])
def test_the_reference_kernel_multiplies(sim, native, preference):
    try:
        choose_kernel(preference)
    except SetupError:
        pytest.skip(f"the kernel {preference} is not available here")
    for layer in (Gptq(), None), (Fp8(), ActivationScheme("token")), (Fp8(), None):
        assert choose_kernel(preference, layer[0], 64, 64, "sim", layer[1]).name == "reference"


@pytest.mark.parametrize("kernel", ON_CPU)
def test_a_kernel_of_the_cpu_refuses_a_tensor_on_an_accelerator(sim, native, kernel):
    for name, arguments in calls_with(kernel, "sim:0"):
        with pytest.raises(SetupError, match="received a tensor on another device") as caught:
            KERNELS[kernel].linear(*arguments)
        assert (caught.value.tensor, caught.value.found) == (name, "sim:0")


def test_a_layer_on_an_accelerator_computes_the_bits_of_the_reference_kernel(sim):
    weight_format, tensors = Gptq(), Gptq().quantize(torch.randn(64, 128))
    activations = torch.randn(3, 128)
    expected = KERNELS["reference"].linear(activations, tensors, weight_format)
    moved = {name: tensor.to("sim:1") for name, tensor in tensors.items()}
    found = KERNELS["reference"].linear(activations.to("sim:1"), moved, weight_format)
    assert found.device == torch.device("sim:1")
    assert torch.equal(found.cpu(), expected)
