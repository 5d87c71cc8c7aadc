"""Tests of affine quantization: worked examples of the lecture material, and bounds."""

import pytest
import torch

from hfq import SetupError
from hfq.quantization.textbook.linear import absmax, zero_point

WEIGHT = torch.tensor(
    [[2.09, -0.98, 1.48, 0.09], [0.05, -0.14, -1.08, 2.12], [-0.91, 1.92, 0, -1.03], [1.87, 0, 1.53, 1.49]]
)


def test_linear_quantization_to_two_bits():
    found = zero_point(WEIGHT, 2, "tensor")
    assert round(float(found.scale), 2) == 1.07
    assert int(found.zero_point) == -1
    assert found.codes.tolist() == [[1, -2, 0, -1], [-1, -1, -2, 1], [-2, 1, -1, -2], [1, -1, 0, 0]]
    shown = [[2.14, -1.07, 1.07, 0], [0, 0, -1.07, 2.14], [-1.07, 2.14, 0, -1.07], [2.14, 0, 1.07, 1.07]]
    torch.testing.assert_close((found.codes + 1) * torch.tensor(1.07), torch.tensor(shown))
    assert torch.equal(found.dequantize(), (found.codes + 1) * found.scale)


@pytest.mark.parametrize(("strategy", "error"), [("channel", 2.08), ("tensor", 2.28)])
def test_absmax_to_two_bits(strategy, error):
    found = absmax(WEIGHT, 2, strategy)
    assert round(float((WEIGHT - found.dequantize()).norm()), 2) == error
    if strategy == "channel":
        assert found.codes.tolist() == [[1, 0, 1, 0], [0, 0, -1, 1], [0, 1, 0, -1], [1, 0, 1, 1]]
        assert found.scale.flatten().tolist() == pytest.approx([2.09, 2.12, 1.92, 1.87])


def test_the_printed_errors_are_not_those_of_the_printed_matrix():
    """Erratum: one entry is printed as 1.98, but the errors are those of 1.48."""
    printed = WEIGHT.clone()
    printed[0, 2] = 1.98
    errors = [
        float((printed - absmax(printed, 2, strategy).dequantize()).norm())
        for strategy in ("channel", "tensor")
    ]
    assert errors == pytest.approx([1.991, 2.198], abs=1e-3)  # three digits are known


def test_absmax_of_a_vector_to_eight_bits():
    assert absmax(torch.tensor([[15, 0.1, 0.02, 1.0, 0.01]])).codes.tolist() == [[127, 1, 0, 8, 0]]


@pytest.mark.parametrize("quantize", [absmax, zero_point])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "block"])
@pytest.mark.parametrize("num_bits", [2, 4, 8])
def test_no_value_is_further_than_half_a_step(quantize, strategy, num_bits):
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(num_bits)) + 0.3
    found = quantize(weight, num_bits, strategy, group_size=32, block=(16, 64))
    assert found.codes.min() >= -(1 << (num_bits - 1))
    assert found.codes.max() < 1 << (num_bits - 1)
    steps = found.scale.repeat_interleave(found.block[0], 0).repeat_interleave(found.block[1], 1)
    half = (
        0.5 if found.zero_point is None else 1.0
    )  # the ends of a range meet codes whose zero point is rounded, too
    assert ((weight - found.dequantize()).abs() <= steps * half * 1.0001).all()


@pytest.mark.parametrize("quantize", [absmax, zero_point])
def test_constants_are_exact(quantize):
    for value in (0.0, 3.0, -0.25):
        found = quantize(torch.full((2, 4), value), 8, "channel")
        torch.testing.assert_close(found.dequantize(), torch.full((2, 4), value))


@pytest.mark.parametrize(
    "options",
    [{"strategy": "group", "group_size": 3}, {"strategy": "block", "block": (3, 2)}, {"strategy": "row"}],
)
def test_what_does_not_divide_is_refused(options):
    with pytest.raises(SetupError):
        absmax(torch.zeros(4, 8), 4, **options)
