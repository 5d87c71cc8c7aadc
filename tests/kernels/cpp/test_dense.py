"""Products by unquantized weights of 16-bit floats, in the C++ library."""

import pytest
import torch

from hfq.kernels.cpp import dense

DTYPES = (torch.bfloat16, torch.float16)
SIZES = ((37, 301), (1, 1), (513, 64), (300, 352), (4, 31))


def made(size: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size[1])
    return torch.randn(dense.MOST_ROWS, size[1], generator=generator).to(dtype), torch.randn(
        size, generator=generator
    ).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("level", [0, 1, 2])
def test_sums_are_those_of_float32_rounded_once(native, level, size, dtype):
    native.hfq_use(level)
    rows, weight = made(size, dtype)
    found = dense.linear(rows, weight)
    exact = rows.double() @ weight.double().t()
    scale = rows.double().abs() @ weight.double().abs().t()
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5 * scale
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_rows_bits_depend_on_nothing_else(native, size, dtype):
    rows, weight = made(size, dtype)
    together = dense.linear(rows, weight)
    for count in (1, 2, 3, 5):
        assert torch.equal(dense.linear(rows[:count], weight), together[:count])
    assert torch.equal(dense.linear(rows[3], weight), together[3])
    assert torch.equal(dense.linear(rows.view(2, 4, -1), weight), together.view(2, 4, -1))
    memory = torch.empty(weight.numel() + 3, dtype=dtype)
    moved = memory[3:].view(size).copy_(weight)
    assert torch.equal(dense.linear(rows, moved), together)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(dense.linear(rows, weight), together)
    finally:
        torch.set_num_threads(before)


def test_infinities_and_nan_stay_in_their_rows(native):
    rows, weight = made((37, 301), torch.bfloat16)
    expected = dense.linear(rows, weight)
    rows[1, 5], rows[2, 300] = float("inf"), float("nan")
    found = dense.linear(rows, weight)
    assert not found[1].isfinite().any()
    assert found[2].isnan().all()
    others = [0, *range(3, dense.MOST_ROWS)]
    assert torch.equal(found[others], expected[others])


def test_other_calls_are_declined(native):
    rows, weight = made((37, 64), torch.bfloat16)
    assert dense.linear(rows[:0], weight) is None
    assert dense.linear(torch.cat([rows, rows]), weight) is None
    assert dense.linear(rows.float(), weight) is None
    assert dense.linear(rows.half(), weight) is None
    assert dense.linear(rows[:, 1:], weight) is None
    assert dense.linear(rows, weight.t().contiguous().t()) is None
    assert dense.linear(rows.to("meta"), weight) is None
