"""Tests of triangular matrices over several panels, against operations on whole matrices."""

import pytest
import torch

from hfq.quantization import triangular_matrix
from hfq.quantization.triangular_matrix import TriangularMatrix

SIZE = 50


@pytest.fixture(autouse=True)
def panels_of_16(monkeypatch):
    monkeypatch.setattr(triangular_matrix, "_ROWS", 16)


@pytest.fixture
def rows():
    return torch.randn(200, SIZE, generator=torch.Generator().manual_seed(0))


def moments(rows):
    matrix = TriangularMatrix.zeros(SIZE)
    matrix.add_products(rows)
    return matrix


def whole(matrix):
    return matrix.corner(0, SIZE).tril()


def test_sums_of_products_are_those_of_the_whole_matrix(rows):
    matrix, expected = moments(rows), rows.t() @ rows
    assert matrix.size == SIZE
    assert TriangularMatrix.nbytes_of(SIZE) == 4 * (16 * 16 + 16 * 32 + 16 * 48 + 2 * 50)
    torch.testing.assert_close(
        whole(matrix), expected.tril()
    )  # products of other shapes sum in another order
    assert torch.equal(matrix.diagonal(), whole(matrix).diagonal())
    matrix.add_to_diagonal(3.0)
    torch.testing.assert_close(matrix.diagonal(), expected.diagonal() + 3)
    columns = torch.arange(1.0, SIZE + 1)
    torch.testing.assert_close(
        whole(matrix.divide(columns)), (expected + 3 * torch.eye(SIZE)).tril() / columns
    )


@pytest.mark.parametrize(
    "order",
    [torch.arange(SIZE), torch.arange(SIZE).flip(0), torch.randperm(SIZE)],
    ids=["as is", "flip", "any"],
)
def test_rows_and_columns_are_permuted(rows, order):
    square = rows.t() @ rows
    square = square.tril() + square.tril(-1).t()
    permuted = TriangularMatrix.of(square.clone()).permute(order)
    assert torch.equal(whole(permuted), square[order][:, order].tril())
    assert torch.equal(
        permuted.corner(16, 32), square[order][:, order][16:32, 16:32]
    )  # whole on the diagonal


def test_the_whole_matrix_is_both_halves(rows):
    matrix = moments(rows)
    lower = whole(matrix)
    assert torch.equal(matrix.whole(), lower + lower.tril(-1).t())


def test_pieces_and_corners_are_parts_of_it(rows):
    matrix, full = moments(rows), whole(moments(rows))
    found = torch.cat([part[:, :10] for _, _, part in matrix.pieces(10, 40)])
    assert torch.equal(found, full[10:40, :10])
    assert [(start, stop) for start, stop, _ in matrix.pieces(10, 40)] == [(10, 16), (16, 32), (32, 40)]
    assert torch.equal(matrix.corner(10, 40).tril(), full[10:40, 10:40])


def test_it_is_factored(rows):
    matrix, square = moments(rows), whole(moments(rows))
    square = square + square.tril(-1).t()
    assert matrix.factor()
    torch.testing.assert_close(
        whole(matrix), torch.linalg.cholesky(square), rtol=1e-4, atol=1e-4
    )  # float32, in another order


@pytest.mark.parametrize("negative", [3, 20, 49])
def test_what_cannot_be_factored_is_as_before(rows, negative):
    square = whole(moments(rows))
    square[negative, negative] -= 1000
    matrix = moments(rows)
    for start, stop, part in matrix.pieces(negative, negative + 1):
        part[0, start:stop] -= 1000
    assert not matrix.factor()
    torch.testing.assert_close(whole(matrix), square, rtol=1e-5, atol=1e-3)  # but for rounding
    matrix.add_to_diagonal(2000.0)
    assert matrix.factor()
