"""Tests of LLM.int8(): exact products of codes, and the order of the published table."""

import pytest
import torch

from hfq.quantization.textbook.linear import absmax
from hfq.quantization.textbook.llm_int8 import int8_linear, outlier_features


def made(outliers):
    generator = torch.Generator().manual_seed(3)
    activations, weight = torch.randn(40, 64, generator=generator), torch.randn(24, 64, generator=generator)
    activations[:, :3] = activations[:, :3].abs() * outliers + outliers  # one-sided, as in trained models
    return activations, weight


def error(activations, weight, **options):
    exact = activations @ weight.t()
    return float((int8_linear(activations, weight, **options) - exact).norm() / exact.norm())


def test_products_are_those_of_the_dequantized_matrices():
    activations, weight = made(0)
    expected = absmax(activations).dequantize().double() @ absmax(weight).dequantize().double().t()
    found = int8_linear(activations, weight, "vector", threshold=None)
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-5, atol=1e-6
    )  # the codes are exact, float32 scales are not


def test_outliers_spoil_plain_products_and_are_rescued_by_decomposition():
    activations, weight = made(50)
    options = [
        {"granularity": "tensor"},
        {"granularity": "row"},
        {"granularity": "vector"},
        {"granularity": "vector", "symmetric": False},
    ]
    tensor, row, vector, shifted = [error(activations, weight, threshold=None, **each) for each in options]
    decomposed = error(activations, weight, threshold=30.0)
    assert tensor >= row >= vector > shifted > decomposed
    assert decomposed < 0.1 * vector


def test_outlier_features_are_those_that_reach_the_threshold():
    activations, _ = made(50)
    assert outlier_features(activations, 30.0).nonzero().flatten().tolist() == [0, 1, 2]
    assert not outlier_features(activations, 1e9).any()


@pytest.mark.parametrize("symmetric", [True, False])
def test_nothing_is_rounded_where_all_features_are_outliers(symmetric):
    activations, weight = made(1)
    assert torch.equal(
        int8_linear(activations, weight, symmetric=symmetric, threshold=0.0), activations @ weight.t()
    )
