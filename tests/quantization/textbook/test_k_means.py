"""Tests of codebooks: a worked k-means example, fixed tables, and nearest entries by brute force."""

import pytest
import torch

from hfq import SetupError
from hfq.quantization.textbook.k_means import CODEBOOKS, fixed, kmeans
from tests.quantization.textbook.test_linear import WEIGHT


def test_kmeans_of_the_worked_example():
    found = kmeans(WEIGHT, 2)
    torch.testing.assert_close(found.table, torch.tensor([-1.0, 0.0, 1.5, 2.0]))
    assert found.indices.tolist() == [[3, 0, 2, 1], [1, 1, 0, 3], [0, 3, 1, 0], [3, 1, 2, 2]]


def test_kmeans_by_row_is_no_worse_than_one_table():
    weight = (
        torch.randn(8, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 8)[:, None]
    )
    errors = [(weight - kmeans(weight, 3, by_row).dequantize()).square().sum() for by_row in (True, False)]
    assert errors[0] < errors[1]


def test_a_table_that_holds_all_values_is_exact():
    weight = torch.tensor([[0.0, 1.0, 2.2, 1.0], [2.2, 0.0, -1.0, -1.0]])
    assert torch.equal(kmeans(weight, 2).dequantize(), weight)
    assert torch.equal(kmeans(torch.zeros(2, 3), 4).dequantize(), torch.zeros(2, 3))


def test_the_tables_of_four_bit_floats():
    magnitudes = {
        "fp4_e1m2": [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5],
        "fp4_e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
        "fp4_e3m0": [0, 0.25, 0.5, 1, 2, 4, 8, 16],
    }
    for name, values in magnitudes.items():
        assert sorted({abs(value) for value in CODEBOOKS[name]}) == values
        assert list(CODEBOOKS[name]) == sorted(CODEBOOKS[name])
    assert len(CODEBOOKS["nf4"]) == 16


@pytest.mark.parametrize("name", CODEBOOKS)
def test_fixed_tables_round_to_the_nearest_entry(name):
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    found = fixed(weight, name, 32)
    entries = found.scale[:, :, None] * torch.tensor(CODEBOOKS[name])
    distances = (weight.view(4, 2, 32, 1) - entries[:, :, None]).abs()
    chosen = (weight - found.dequantize()).abs().view(4, 2, 32)
    torch.testing.assert_close(chosen, distances.amin(3))


@pytest.mark.parametrize(("name", "block_size"), [("nf5", 32), ("nf4", 3)])
def test_what_is_no_table_is_refused(name, block_size):
    with pytest.raises(SetupError):
        fixed(torch.zeros(2, 64), name, block_size)
