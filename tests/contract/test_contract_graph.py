"""Contract tests of formats in graphs of torch: a layer computes there what it computes without one."""

import pytest
import torch

from hfq.kernels.registry import choose_kernel
from hfq.modules.graph_ops import OPS
from hfq.modules.layer_layout import layout_of
from hfq.modules.linear import QuantizedLinear
from tests.support import tiny_models

OUT, IN = 128, 256
MODULE = "model.layers.0.mlp.down_proj"


@pytest.fixture
def layer(detected):
    found, tensors = detected[MODULE]
    kernel = choose_kernel("torch", found, IN, OUT)
    layer = QuantizedLinear("layer", IN, OUT, found, tiny_models.described("layer", tensors), kernel)
    layer.hold(tensors)
    return layer


@pytest.fixture
def activations():
    return torch.randn(3, IN, generator=torch.Generator().manual_seed(2))


def test_the_operator_computes_what_the_layer_computes(layer, activations):
    assert layout_of(layer.layout).weight_format == layer.weight_format
    assert torch.equal(OPS.linear(activations, layer.graph_inputs(), layer.layout), layer(activations))


@pytest.mark.once_each_format
def test_a_compiled_layer_has_the_same_bits_and_gradient(layer, activations):
    torch._dynamo.reset()
    outputs, gradients, activations = [], [], activations.requires_grad_()
    for called in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        outputs.append(called(activations))
        outputs[-1].sum().backward()
        gradients.append(activations.grad)
        activations.grad = None
    assert torch.equal(*outputs)
    assert torch.equal(*gradients)
