"""Operators compute in graphs what modules compute without one, and have their gradients."""

import copy
import gc
import pickle

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounter

from hfq.errors import SetupError
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.kernels.registry import KERNELS
from hfq.modules import graph_ops
from hfq.modules.embedding import QuantizedEmbedding
from hfq.modules.experts import QuantizedExperts
from hfq.modules.flat_buffer import FlatBuffer, flat_layout
from hfq.modules.graph_ops import OPS
from hfq.modules.linear import QuantizedLinear
from hfq.modules.output_head import OutputHead
from tests.support import tiny_models

OUT, IN = 96, 64
FORMATS = {"gptq": Gptq(4, 32, True, "stored", g_idx_length=IN), "fp8": Fp8(strategy="channel")}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantized(
    name: str = "gptq", in_buffer: bool = False, size: tuple[int, int] = (OUT, IN), cls=QuantizedLinear
):
    """Returns a layer, or an embedding, that holds random tensors."""
    found = Gptq(4, 32, True, "stored", g_idx_length=size[1]) if name == "gptq" else FORMATS[name]
    tensors = {local: each.contiguous() for local, each in found.quantize(random(*size)).items()}
    found = tiny_models.settled(found, tensors, {"checkpoint_format": "gptq_v2"}, size)
    infos = tiny_models.described("layer", tensors)
    args = (infos, KERNELS["torch"]) if cls is QuantizedLinear else (infos,)
    first = size[::-1] if cls is QuantizedLinear else size
    layer = cls("layer", *first, found, *args)
    if in_buffer:
        memory = torch.empty(flat_layout(infos)[1], dtype=torch.uint8)
        layer.hold_buffer(FlatBuffer.pack(tensors, infos, memory))
    else:
        layer.hold(tensors)
    return layer


def compiled(module: torch.nn.Module):
    torch._dynamo.reset()
    return torch.compile(module, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("in_buffer", [False, True], ids=["tensors", "flat buffer"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_in_a_graph_has_the_same_bits_and_gradient(name, in_buffer):
    layer, x = quantized(name, in_buffer), random(3, IN).requires_grad_()
    outputs, gradients = [], []
    for called in (layer, compiled(layer)):
        outputs.append(called(x))
        outputs[-1].sum().backward()
        gradients.append(x.grad)
        x.grad = None
    assert torch.equal(*outputs)
    assert torch.equal(*gradients)


def test_a_graph_without_gradients_is_not_used_for_one_with_them():
    layer, x = quantized(), random(3, IN).requires_grad_()
    graph = compiled(layer)
    with torch.no_grad():
        graph(x)
    graph(x).sum().backward()
    assert x.grad.any()


def test_a_product_under_autocast_has_the_dtype_and_bits_of_eager():
    layer, x = quantized(), random(3, IN)
    graph = compiled(layer)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert layer(x).dtype == torch.bfloat16
        assert torch.equal(graph(x), layer(x))


def test_an_input_of_another_size_is_the_error_of_eager():
    graph = torch.compile(quantized(), backend="eager")
    with pytest.raises(SetupError, match="layer received activations of the wrong size"):
        graph(random(3, IN + 1))


@pytest.mark.parametrize("change", ["outliers", "is_sliced", "size", "dtype"])
def test_a_full_graph_of_a_layer_in_memory_is_an_error_with_its_reason(change):
    layer, x = quantized(), random(3, IN + (change == "size"))
    if change in ("outliers", "is_sliced"):
        vars(layer)[change] = True
    if change == "dtype":
        x = x.long()
    with pytest.raises(Unsupported, match=r"counts outliers.*a slice.*wrong size or dtype") as caught:
        compiled(layer)(x)
    assert "Fix: Leave fullgraph=True out." in str(caught.value)
    assert "memory of one device" not in str(caught.value)


def test_layers_of_one_kind_share_a_graph():
    layers = [quantized(), quantized()]
    torch._dynamo.reset()
    counter = CompileCounter()
    for layer in layers:
        layer.compile(backend=counter, fullgraph=True)
        layer(random(3, IN))
    assert counter.frame_count == 1


def test_a_changed_kernel_makes_another_graph():
    layer, x = quantized(), random(3, IN)
    torch._dynamo.reset()
    counter = CompileCounter()
    graph = torch.compile(layer, backend=counter, fullgraph=True)
    graph(x)
    layer.kernel = KERNELS["reference"]
    assert torch.equal(graph(x), layer(x))
    assert counter.frame_count == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_computes_with_its_own_tensors(duplicate):
    layer, x = quantized(), random(3, IN)
    graph = compiled(layer)
    before = graph(x)
    other = duplicate(layer)
    with torch.no_grad():
        next(iter(other.parameters())).zero_()
    assert torch.equal(compiled(other)(x), other(x))
    assert not torch.equal(other(x), before)
    assert torch.equal(graph(x), before)


def test_tensors_are_described_once_and_freed_with_the_layer():
    layer, x = quantized(), random(3, IN)
    graph, key = compiled(layer), id(next(iter(layer.parameters())))
    with torch.no_grad():
        graph(x)
        cache = graph_ops._held[key][2]
        graph(x)
    assert graph_ops._held[key][2] is cache
    torch._dynamo.reset()
    del layer, graph
    gc.collect()
    assert graph_ops._held.get(key, (None, None, None))[2] is not cache


def test_an_embedding_in_a_graph_has_the_same_rows_and_errors():
    embedding = quantized(size=(40, IN), cls=QuantizedEmbedding)
    graph, tokens = compiled(embedding), torch.tensor([[3, 9, 3], [0, 39, 1]])
    assert torch.equal(graph(tokens), embedding(tokens))
    with pytest.raises(SetupError, match="outside of its table"):
        graph(torch.tensor([[3, 9, 3], [0, 40, 1]]))


def test_a_weight_that_model_code_reads_is_in_the_graph():
    layer = quantized()
    graph = torch.compile(lambda x: x @ layer.weight.t(), backend="aot_eager", fullgraph=True)
    x = random(3, IN)
    assert torch.equal(graph(x), x @ layer.weight.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_in_a_graph_has_the_same_bits_and_gradients(dtype):
    head = OutputHead(IN, OUT, bias=False, dtype=dtype)
    x, outputs, gradients = random(2, IN, dtype=dtype).requires_grad_(), [], []
    for called in (head, compiled(head)):
        outputs.append(called(x))
        outputs[-1].sum().backward()
        gradients.append((x.grad, head.weight.grad))
        x.grad = head.weight.grad = None
    assert torch.equal(*outputs)
    assert all(map(torch.equal, *gradients))


def experts(count: int = 4) -> QuantizedExperts:
    layers = [{"up_proj": quantized(), "down_proj": quantized(size=(IN, OUT))} for _ in range(count)]
    return QuantizedExperts(layers, torch.nn.functional.silu)


ROUTED = torch.tensor([[0, 3], [3, 1], [2, 0]])


def test_experts_in_a_graph_have_the_same_bits_and_gradients():
    module, outputs, gradients = experts(), [], []
    x, weights = random(3, IN).requires_grad_(), random(3, 2, seed=1).requires_grad_()
    for called in (module, compiled(module)):
        outputs.append(called(x, ROUTED, weights))
        outputs[-1].sum().backward()
        gradients.append((x.grad, weights.grad))
        x.grad = weights.grad = None
    assert torch.equal(*outputs)
    assert all(map(torch.equal, *gradients))


def test_routes_do_not_compile_again():
    module = experts()
    torch._dynamo.reset()
    counter = CompileCounter()
    graph = torch.compile(module, backend=counter, fullgraph=True)
    with torch.no_grad():
        for shift in range(4):
            routed = (ROUTED + shift) % 4
            assert torch.equal(
                graph(random(3, IN), routed, torch.ones(3, 2)),
                module(random(3, IN), routed, torch.ones(3, 2)),
            )
    assert counter.frame_count == 1


def test_copied_experts_have_a_number_of_their_own():
    module = experts()
    assert int(copy.deepcopy(module)._number) != int(module._number)


def test_experts_that_were_freed_are_an_error():
    module = experts()
    number = module._number
    del module
    gc.collect()
    with pytest.raises(SetupError, match="experts that are not in memory"):
        OPS.experts(random(3, IN), ROUTED, torch.ones(3, 2), number)
