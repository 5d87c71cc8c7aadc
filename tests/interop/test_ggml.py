"""Tests of ggml's products in `python -m benchmarks kernels`, against float32 products."""

import importlib.util

import pytest
import torch

from benchmarks.kernels.ggml import PACKAGES, GgmlLinear
from benchmarks.kernels.kernel_peers import GGML, PEERS, make_peers

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not any(map(importlib.util.find_spec, PACKAGES)), reason="no ggml is installed"),
]

ERRORS = {
    ("Q4_K", True): (0.05, 0.1),
    ("Q4_K", False): (0.05, 0.1),
    ("Q4_0", True): (0.06, 0.12),
    ("Q8_0", False): (0.003, 0.015),
}
"""Largest error relative to the product's norm, by format.

Rounding normal weights to 4.5 bits, with steps of about a fifth of their deviation, or to 8.5 bits causes it.
"""


@pytest.fixture(scope="module")
def dense():
    return torch.randn(264, 512, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("name", "repack"), ERRORS)
def test_products_differ_from_the_float_ones_by_what_is_rounded(dense, name, repack):
    layer, (low, high) = GgmlLinear(dense, name, repack), ERRORS[name, repack]
    for rows in (1, 3, 8, 1):
        activations = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
        expected, found = activations @ dense.T, layer(activations)
        assert low < (found - expected).norm() / expected.norm() < high
        assert torch.equal(layer(activations.bfloat16()), layer(activations.bfloat16().float()).bfloat16())


def test_a_product_is_no_view_of_the_next_one(dense):
    layer, activations = GgmlLinear(dense, "Q4_K", True), torch.ones(1, 512)
    found = layer(activations)
    kept = found.clone()
    layer(2 * activations)
    assert torch.equal(found, kept)


def test_torchs_number_of_threads_is_taken_up(dense):
    before, layer = torch.get_num_threads(), GgmlLinear(dense, "Q4_K", True)
    activations = torch.randn(8, 512)
    try:
        torch.set_num_threads(1)
        expected = layer(activations)
        assert layer._threads == 1
        torch.set_num_threads(2)
        assert torch.equal(layer(activations), expected)  # one thread computes each output
        assert layer._threads == 2
    finally:
        torch.set_num_threads(before)


def test_weights_that_it_cannot_hold_so_are_refused():
    with pytest.raises(RuntimeError, match=r"does not multiply Q4_K \(12, 256\) in this arrangement"):
        GgmlLinear(torch.ones(12, 256), "Q4_K", True)
    with pytest.raises(RuntimeError, match="blocks of 256, found rows of 128"):
        GgmlLinear(torch.ones(8, 128), "Q4_K", True)


def test_it_is_measured_beside_the_kernels(dense):
    found = {key: nbytes for key, (nbytes, _) in make_peers(dense.bfloat16()).items() if key[0] == GGML}
    assert set(found) == {key for key in PEERS if key[0] == GGML}
    assert {nbytes * 8 / dense.numel() for nbytes in found.values()} == {4.5, 8.5}
