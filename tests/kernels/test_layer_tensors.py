"""Tests of the tensors that kernels of the CPU take, and of their addresses."""

import ctypes

import pytest
import torch

from hfq.errors import SetupError
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.kernels.cpp.layers import describe_layer, reads_values
from hfq.kernels.layer_tensors import LayerPlaces, LayerTensors, PlacedTensors
from hfq.kernels.registry import KERNELS
from hfq.tensor_spec import ByteRange, TensorInfo
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


def placed(tensors: dict, first: int) -> PlacedTensors:
    """Returns copies of tensors in one buffer, one after the other from an offset on."""
    infos, places, end = {}, {}, first
    for name, tensor in tensors.items():
        found = ByteRange("file", end, tensor.nbytes)
        infos[name] = TensorInfo(name, safetensors_dtype(tensor.dtype), tuple(tensor.shape), found)
        end += -end % tensor.element_size()
        places[infos[name]] = end
        end += tensor.nbytes
    made = PlacedTensors(torch.zeros(end, dtype=torch.uint8), LayerPlaces(infos, places))
    with torch.inference_mode():
        for name, tensor in tensors.items():
            made[name].copy_(tensor)
    return made


@pytest.mark.parametrize("name", CASES)
def test_tensors_in_a_buffer_are_described_as_others_wherever_they_lie(native, name):
    weight_format, tensors = CASES[name].make()
    for first in (0, 4100):
        held = placed(tensors, first)
        assert list(held) == list(tensors)
        for local, tensor in tensors.items():
            assert (held[local].shape, held[local].dtype) == (tensor.shape, tensor.dtype)
            assert torch.equal(
                held[local].flatten().view(torch.uint8), tensor.flatten().clone().view(torch.uint8)
            )
        found, expected = describe_layer(weight_format, held), describe_layer(weight_format, dict(held))
        assert (found is None) == (expected is None)
        for field, kind in expected._fields_ if expected is not None else ():
            # values that a description contains are copied into each
            if kind is not ctypes.c_void_p or not reads_values(weight_format):
                assert getattr(found, field) == getattr(expected, field), field
        assert not any(view.is_inference() for view in held.values())


def test_views_of_a_buffer_are_made_once_and_only_for_those_that_ask(native):
    weight_format, tensors = CASES["w4 g32"].make()
    describe_layer(weight_format, placed(tensors, 0))
    held = placed(tensors, 64)
    held._views.clear()
    assert describe_layer(weight_format, held) is describe_layer(weight_format, held)
    assert not held._views
    assert held["qweight"] is held["qweight"]
    assert "bias" not in held
    assert len(held) == len(tensors)
