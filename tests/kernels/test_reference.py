"""Tests of the reference kernel against products with the dequantized weight."""

import pytest
import torch

from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.kernels import reference

IN = 256
FORMATS = {
    "gptq w4": (Gptq(4, 64, False, "word_plus_one", g_idx_length=IN), 96),
    "gptq w3 act-order": (Gptq(3, 64, True, "stored", g_idx_length=IN), 96),
    "fp8 block": (Fp8(strategy="block", block_structure=(48, 80)), 101),
    "fp8 channel": (Fp8(strategy="channel"), 37),
    "fp8 tensor": (Fp8(strategy="tensor", scale_shape=()), 1),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# the products are summed in float32 in another order, and rounded to the activations' dtype once or twice
# more
RELATIVE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def random(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1).to(dtype)


def layer(name: str):
    weight_format, out_features = FORMATS[name]
    tensors = weight_format.quantize(random(out_features, IN, seed=3))
    if "act-order" in name:
        tensors["g_idx"] = tensors["g_idx"][torch.randperm(IN, generator=torch.Generator().manual_seed(4))]
    return weight_format.resolve("m", tensors), tensors


def assert_close(found: torch.Tensor, expected: torch.Tensor):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert (found.double() - expected.double()).norm() <= RELATIVE[found.dtype] * expected.double().norm()


@pytest.fixture
def one_panel(monkeypatch):
    monkeypatch.setattr(reference, "PANEL_NBYTES", 1 << 30)


@pytest.fixture
def many_panels(monkeypatch):
    monkeypatch.setattr(
        reference, "PANEL_NBYTES", 4 * IN * 5
    )  # 5 rows, or 32 where panels start at multiples of 32


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 17, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_one_panel_is_the_product_with_the_dequantized_weight(one_panel, name, dtype, batch):
    weight_format, tensors = layer(name)
    activations = random(batch, IN, seed=batch, dtype=dtype)
    expected = activations @ weight_format.dequantize(tensors, dtype).t()
    assert torch.equal(reference.linear(activations, tensors, weight_format), expected)


@pytest.mark.parametrize("batch", [1, 3, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_many_panels_give_the_same_product(many_panels, name, dtype, batch):
    weight_format, tensors = layer(name)
    activations = random(batch, IN, seed=batch, dtype=dtype)
    expected = activations @ weight_format.dequantize(tensors, dtype).t()
    assert_close(reference.linear(activations, tensors, weight_format), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_panels_cover_every_row_once_and_start_at_multiples(many_panels, monkeypatch, name):
    weight_format, tensors = layer(name)
    seen = []
    dequantize_into = type(weight_format).dequantize_into

    def spy(self, panel, tensors, start):
        seen.append((start, len(panel)))
        dequantize_into(self, panel, tensors, start)

    monkeypatch.setattr(type(weight_format), "dequantize_into", spy)
    reference.linear(random(2, IN), tensors, weight_format)
    rows = [row for start, count in seen for row in range(start, start + count)]
    assert rows == list(range(FORMATS[name][1]))
    assert all(start % weight_format.row_multiple == 0 for start, _ in seen)
    assert len(seen) == -(-FORMATS[name][1] // max(5, weight_format.row_multiple))


@pytest.mark.parametrize("name", FORMATS)
def test_activations_may_have_any_number_of_dimensions(one_panel, name):
    weight_format, tensors = layer(name)
    rows = random(24, IN)
    expected = reference.linear(rows, tensors, weight_format)
    assert torch.equal(
        reference.linear(rows.view(2, 3, 4, IN), tensors, weight_format), expected.view(2, 3, 4, -1)
    )
    assert torch.equal(reference.linear(rows.view(4, 6, IN), tensors, weight_format), expected.view(4, 6, -1))
    first = reference.linear(rows[:1], tensors, weight_format)
    assert torch.equal(reference.linear(rows[0], tensors, weight_format), first[0])


def test_strided_activations_are_multiplied_like_their_copy(one_panel):
    weight_format, tensors = layer("fp8 block")
    wide = random(6, 5, 2 * IN)
    for strided in (
        wide[:, :, ::2],
        wide[:, :, :IN].transpose(0, 1),
        wide[0, :, IN:],
        wide[:1, 0, :IN].expand(7, IN),
    ):
        copied = reference.linear(strided.contiguous(), tensors, weight_format)
        assert_close(reference.linear(strided, tensors, weight_format), copied)


@pytest.mark.parametrize("shape", [(0, IN), (2, 0, IN)])
@pytest.mark.parametrize("name", FORMATS)
def test_an_empty_batch_gives_an_empty_result(many_panels, name, shape):
    weight_format, tensors = layer(name)
    assert reference.linear(torch.zeros(shape), tensors, weight_format).shape == (
        *shape[:-1],
        FORMATS[name][1],
    )
    grad = torch.zeros(*shape[:-1], FORMATS[name][1])
    assert reference.linear_grad(grad, tensors, weight_format).shape == shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", DTYPES, ids=str)
def test_a_bias_is_added_in_the_dtype_of_the_activations(one_panel, dtype, bias):
    weight_format, tensors = layer("fp8 channel")
    activations = random(3, IN, dtype=dtype)
    biased = tensors | {"bias": random(37, seed=9, dtype=bias)}
    expected = reference.linear(activations, tensors, weight_format) + biased["bias"].to(dtype)
    assert torch.equal(reference.linear(activations, biased, weight_format), expected)


def dense_gradient(weight_format, tensors, grad: torch.Tensor) -> torch.Tensor:
    activations = torch.zeros(*grad.shape[:-1], IN, dtype=grad.dtype, requires_grad=True)
    (activations @ weight_format.dequantize(tensors, grad.dtype).t()).backward(grad)
    return activations.grad


@pytest.mark.parametrize("shape", [(1,), (17,), (2, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_the_gradient_of_one_panel_is_that_of_the_dense_weight(one_panel, name, dtype, shape):
    weight_format, tensors = layer(name)
    grad = random(*shape, FORMATS[name][1], dtype=dtype)
    found = reference.linear_grad(grad, tensors, weight_format)
    if len(shape) == 1:
        assert torch.equal(found, dense_gradient(weight_format, tensors, grad))
    assert_close(found, dense_gradient(weight_format, tensors, grad))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_the_gradient_of_many_panels_is_that_of_the_dense_weight(many_panels, name, dtype):
    weight_format, tensors = layer(name)
    grad = random(5, 7, FORMATS[name][1], dtype=dtype)
    assert_close(
        reference.linear_grad(grad, tensors, weight_format), dense_gradient(weight_format, tensors, grad)
    )
    assert_close(
        reference.linear_grad(grad[0, 0], tensors, weight_format),
        dense_gradient(weight_format, tensors, grad[0, 0]),
    )


def test_a_strided_gradient_is_multiplied_like_its_copy(many_panels):
    weight_format, tensors = layer("fp8 channel")
    for strided in (random(37, 4).t(), torch.ones(1, 1).expand(4, 37), random(4, 74)[:, ::2]):
        copied = reference.linear_grad(strided.contiguous(), tensors, weight_format)
        assert_close(reference.linear_grad(strided, tensors, weight_format), copied)
