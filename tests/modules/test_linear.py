"""QuantizedLinear computes the same from either backing, has a gradient for activations only, and refuses to
guess.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from hfq.errors import PlacementError, SetupError
from hfq.formats import ActivationScheme
from hfq.kernels import reference
from hfq.kernels.activations import quantize_activations
from hfq.modules.flat_buffer import FlatBuffer

IN, OUT = 96, 64
BACKINGS = ["mapped", "arena"]


def random(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(IN,), (3, IN), (2, 5, IN), (0, IN)])
def test_both_backings_give_the_forward_of_the_kernel(make, layer, shape, dtype):
    weight_format, tensors = layer
    activations = random(*shape, dtype=dtype)
    expected = reference.linear(activations, tensors, weight_format)
    assert expected.shape == (*shape[:-1], OUT)
    assert torch.equal(make("mapped")(activations), expected)
    assert torch.equal(make("arena")(activations), expected)


@pytest.mark.parametrize("backing", BACKINGS)
def test_the_gradient_reaches_the_activations(make, layer, backing):
    weight_format, tensors = layer
    activations = random(2, 5, IN).requires_grad_()
    output = make(backing)(activations)
    grad = random(2, 5, OUT)
    output.backward(grad)
    assert torch.equal(activations.grad, reference.linear_grad(grad, tensors, weight_format))
    # the dense product sums the 64 outputs in another order
    dense = grad @ weight_format.dequantize(tensors)
    assert (activations.grad - dense).norm() <= 1e-6 * dense.norm()


@pytest.mark.parametrize("backing", BACKINGS)
def test_no_packed_tensor_has_a_gradient(make, backing):
    linear = make(backing)
    model = nn.Sequential(nn.Linear(IN, IN), linear)
    model(random(3, IN)).sum().backward()
    assert model[0].weight.grad is not None
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in linear.parameters())
    assert not linear(random(3, IN)).requires_grad


@pytest.mark.parametrize("backing", BACKINGS)
def test_an_optimizer_changes_no_packed_tensor_whatever_is_asked_of_the_model(make, layer, backing):
    linear = make(backing)
    model = nn.Sequential(nn.Linear(IN, IN), linear)
    with contextlib.suppress(RuntimeError):  # torch refuses a gradient for integers
        model.requires_grad_(True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0, weight_decay=0.1)
    before = model[0].weight.detach().clone()
    model(random(3, IN)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert all(parameter.grad is None for parameter in linear.parameters())
    raw = [
        [t.reshape(-1).view(torch.uint8) for t in tensors]
        for tensors in (linear.state_dict().values(), layer[1].values())
    ]
    assert all(torch.equal(*pair) for pair in zip(*raw, strict=True))


@pytest.mark.parametrize("backing", BACKINGS)
def test_nothing_is_saved_for_the_backward_but_the_module(make, backing):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        make(backing)(random(3, IN).requires_grad_()).sum().backward()
    assert not saved


def test_tensors_are_on_meta_until_they_are_held(make, layer):
    _, tensors = layer
    linear = make("meta")
    assert list(linear.parameters()) == []
    assert linear.compute_device == torch.device("meta")
    assert {name: (t.device.type, t.dtype, t.shape) for name, t in linear.state_dict().items()} == {
        name: ("meta", tensor.dtype, tensor.shape) for name, tensor in tensors.items()
    }
    assert [name for name, _ in make("mapped").named_parameters()] == list(tensors)
    assert [(name, p.device.type, p.dtype) for name, p in make("arena").named_parameters()] == [
        ("flat_buffer", "cpu", torch.uint8)
    ]


def test_nothing_is_copied_to_be_held(make):
    linear = make("mapped")
    mapped = linear.reader.map(next(iter(linear.infos.values())).range.file)
    start = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    for name, tensor in linear.stored_tensors().items():
        assert tensor.data_ptr() == start + linear.infos[name].range.offset
    row = FlatBuffer.read(linear.reader, linear.infos)
    linear.hold_buffer(row)
    assert linear.flat_buffer.data_ptr() == row.buffer.data_ptr()
    assert all(
        tensor.untyped_storage().data_ptr() == row.buffer.data_ptr()
        for tensor in linear.onloaded_tensors().values()
    )


def test_the_last_backing_held_is_the_one_in_use(make):
    linear, activations = make("mapped"), random(3, IN)
    expected = linear(activations)
    tensors = linear.stored_tensors()
    row = FlatBuffer.read(linear.reader, linear.infos)
    linear.hold_buffer(row)
    row.buffer.zero_()
    assert not torch.equal(linear(activations), expected)
    linear.hold(tensors)
    assert torch.equal(linear(activations), expected)
    assert "flat_buffer" not in dict(linear.named_parameters())


def test_use_before_loading_is_refused_by_name(make):
    with pytest.raises(
        PlacementError, match=r"model\.layers\.0\.q was used before its weights were loaded"
    ) as caught:
        make("meta")(random(3, IN))
    assert caught.value.found == "weights on meta"


@pytest.mark.parametrize("backing", [*BACKINGS, "meta"])
@pytest.mark.parametrize("shape", [(3, IN + 1), (IN - 1,), (IN, 1), (2, 0)])
def test_activations_of_the_wrong_size_are_refused_by_name(make, backing, shape):
    with pytest.raises(
        SetupError, match=r"model\.layers\.0\.q received activations of the wrong size"
    ) as caught:
        make(backing)(torch.zeros(shape))
    assert caught.value.expected == f"[..., {IN}]"
    assert caught.value.found == str(list(shape))


def test_activations_that_are_no_floats_are_refused(make):
    with pytest.raises(SetupError, match=r"dtype, torch\.int64"):
        make("mapped")(torch.ones(3, IN, dtype=torch.int64))


def test_a_lent_row_is_computed_with_until_it_is_taken_back(make, layer):
    _, tensors = layer
    linear, activations = make("meta"), random(3, IN)
    linear.onload(tensors)
    assert torch.equal(linear(activations), make("mapped")(activations))
    assert all(parameter.is_meta for parameter in linear.parameters())
    linear.offload()
    with pytest.raises(PlacementError):
        linear(activations)


def test_a_row_is_lent_to_one_thread(make, layer):
    _, tensors = layer
    linear, activations = make("meta"), random(3, IN)
    linear.onload(tensors)
    with ThreadPoolExecutor(1) as pool, pytest.raises(PlacementError):
        pool.submit(linear, activations).result(20)
    assert torch.equal(linear(activations), make("mapped")(activations))


def test_transformers_is_told_not_to_initialise_what_is_held(make):
    for backing in ("meta", *BACKINGS):
        assert all(parameter._is_hf_initialized is True for parameter in make(backing).parameters())


def test_a_lent_row_takes_the_place_of_what_is_held(make, layer):
    _, tensors = layer
    linear, activations = make("arena"), random(3, IN)
    held = linear(activations)
    linear.onload(tensors | {"bias": tensors["bias"] + 1})
    assert not torch.equal(linear(activations), held)
    linear.offload()
    assert torch.equal(linear(activations), held)


def test_a_module_that_rests_elsewhere_fetches_in_forward_and_backward(make, layer):
    _, tensors = layer
    linear, calls = make("meta"), []
    linear.fetch = lambda: calls.append(1) or tensors
    activations, held = random(3, IN).requires_grad_(), random(3, IN).requires_grad_()
    linear(activations).sum().backward()
    make("mapped")(held).sum().backward()
    assert len(calls) == 2
    assert torch.equal(activations.grad, held.grad)


@pytest.mark.parametrize("backing", BACKINGS)
def test_activations_are_quantized_first_where_there_is_a_scheme(make, backing):
    scheme, activations = ActivationScheme("token"), random(3, IN)
    rounded = quantize_activations(activations, scheme, {})
    found = make(backing, scheme)(activations)
    assert not torch.equal(found, make(backing)(activations))
    assert torch.equal(found, make(backing)(rounded))


def test_the_gradient_passes_straight_through_the_quantized_activations(make):
    plain, scheme = random(3, IN).requires_grad_(), random(3, IN).requires_grad_()
    make("mapped")(plain).sum().backward()
    make("mapped", ActivationScheme("token"))(scheme).sum().backward()
    assert torch.equal(scheme.grad, plain.grad)


@pytest.mark.parametrize("backing", BACKINGS)
def test_inference_mode_and_training_mode_give_the_same(make, backing):
    linear, activations = make(backing), random(3, IN)
    expected = linear(activations)
    with torch.inference_mode():
        assert torch.equal(linear(activations), expected)
    assert torch.equal(linear.train()(activations), expected)
    assert torch.equal(linear.eval()(activations.clone().requires_grad_()), expected)


def test_the_representation_names_the_sizes_and_the_format(make, layer):
    text = repr(make("arena"))
    assert text == f"QuantizedLinear(in_features=96, out_features=64, format={layer[0].describe()})"
