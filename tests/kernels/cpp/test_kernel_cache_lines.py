"""Tests of columns whose words cross cache lines, as in most files.

Results must be the same, and no memory beyond the words may be read.
"""

import itertools

import pytest
import torch

from hfq.formats.awq import Awq
from hfq.formats.gptq import Gptq
from hfq.kernels.cpp import kernel, library
from tests.support.kernel_layers import Case, at_the_end_of_a_page, misplaced, multiply_together

# rows of words are whole cache lines; one activation row has several parts of columns, and the last vector of
# columns is incomplete
LAYERS = {
    **{
        f"w{bits} {reading}": Case(Gptq(bits, 128, False, reading, g_idx_length=384), 384, 2144)
        for bits, reading in (
            *itertools.product((2, 3, 4, 8), ("stored", "field_plus_one")),
            *itertools.product((2, 4, 8), ("word_plus_one",)),
        )
    },
    "w4 act-order": Case(Gptq(4, 128, False, "field_plus_one", g_idx_length=384), 384, 336, scatter=True),
    "w4 bf16 scales": Case(
        Gptq(4, 128, False, "masked_plus_one", g_idx_length=384), 384, 48, dtype=torch.bfloat16
    ),
    "w4 f32 scales": Case(Gptq(4, 64, False, "stored", g_idx_length=384), 384, 16, dtype=torch.float32),
    "awq": Case(Awq(group_size=128), 384, 2304),
    "awq of one line": Case(Awq(group_size=128), 384, 128),
}
ROWS = (1, 2, 3, 5, 8, 12)


@pytest.fixture(params=list(LAYERS))
def layer(request):
    return LAYERS[request.param].make()


def products(tensors, weight_format) -> list[torch.Tensor]:
    found = []
    for rows, dtype in itertools.product(ROWS, (torch.bfloat16, torch.float32)):
        activations = torch.randn(rows, 384, generator=torch.Generator().manual_seed(rows)).to(dtype)
        found.append(kernel.linear(activations, tensors, weight_format))
    return found


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("level", [1, -1])
def test_results_do_not_depend_on_where_lines_begin(native, layer, level):
    weight_format, tensors = layer
    native.hfq_use(level)
    expected = products(misplaced(tensors, 0), weight_format)
    for shift in (4, 8, 24, 32, 56, 61):
        assert_equal(products(misplaced(tensors, shift), weight_format), expected)


def test_nor_where_bfloat16_is_counted_as_integers(native, layer):
    weight_format, tensors = layer
    native.hfq_use_short(0)
    expected = products(misplaced(tensors, 0), weight_format)
    for shift in (8, 36):
        assert_equal(products(misplaced(tensors, shift), weight_format), expected)


@pytest.mark.parametrize("left", [8, 40])
def test_nothing_beyond_the_last_line_is_read(native, layer, left):
    weight_format, tensors = layer
    mapped = {name: at_the_end_of_a_page(tensor, left) for name, tensor in tensors.items()}
    assert_equal(products(mapped, weight_format), products(tensors, weight_format))


@pytest.mark.parametrize("name", ["w4 stored", "w4 act-order", "awq"])
def test_experts_lie_anywhere(native, name):
    weight_format, tensors = LAYERS[name].make()
    layers = [(misplaced(tensors, shift), weight_format) for shift in (0, 8, 40)]
    for dtype in (torch.bfloat16, torch.float32):
        activations = torch.randn(7, 384, generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = torch.cat([kernel.linear(part, *layers[0]) for part in activations.split([1, 2, 4])])
        assert torch.equal(multiply_together(activations, [1, 2, 4], layers), expected)


@pytest.mark.parametrize("count", [2, 3])
def test_nor_on_threads(native, layer, count):
    weight_format, tensors = layer
    expected, before = products(misplaced(tensors, 0), weight_format), torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        assert_equal(products(misplaced(tensors, 24), weight_format), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_the_form_for_other_processors_computes_the_same(emulated):
    with library.use(emulated):
        for case in LAYERS.values():
            weight_format, tensors = case.make()
            assert_equal(
                products(misplaced(tensors, 24), weight_format),
                products(misplaced(tensors, 0), weight_format),
            )
