"""Tests of errors that name scales that are not finite, and indices out of range."""

import pytest
import torch

from hfq.errors import FormatError
from hfq.formats.codecs.value_checks import check_finite, check_index, check_positive

EXTREMES = [0.0, -0.0, 1e-45, 3.4e38, -3.4e38]


@pytest.mark.parametrize(
    "scale", [torch.tensor(EXTREMES), torch.tensor(2.0), torch.ones(2, 1, 3, 1), torch.empty(0)]
)
def test_finite_scales_of_any_shape_pass(scale):
    check_finite("m", "scales", scale)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e8m0fnu], ids=str
)
def test_one_nan_in_any_dtype_is_found(dtype):
    scale = torch.ones(3, 4)
    check_finite("m", "scales", scale.to(dtype))
    scale[1, 2] = torch.nan
    with pytest.raises(FormatError):
        check_finite("m", "scales", scale.to(dtype))


def test_the_first_bad_scale_is_named_and_all_are_counted():
    scale = torch.ones(3, 4)
    scale[1, 2], scale[2, 0], scale[2, 3] = torch.inf, torch.nan, -torch.inf
    with pytest.raises(FormatError) as caught:
        check_finite("model.layers.0", "scales", scale)
    assert caught.value.tensor == "model.layers.0.scales"
    assert caught.value.found == "inf at [1, 2], 3 in all"


def test_a_bad_scalar_is_named_without_a_place():
    with pytest.raises(FormatError) as caught:
        check_finite("m", "weight_scale", torch.tensor(torch.nan))
    assert caught.value.found == "nan at [], 1 in all"


@pytest.mark.parametrize("index", [[0], [3], [0, 1, 2, 3], [3, 3, 0]])
def test_an_index_within_its_bound_passes(index):
    check_index("m", "g_idx", torch.tensor(index, dtype=torch.int32), 4)


@pytest.mark.parametrize(
    ("index", "found"),
    [([4], "4 to 4"), ([0, -1, 3], "-1 to 3"), ([-2, 9], "-2 to 9"), ([0, 4, 1], "0 to 4")],
)
def test_an_index_out_of_its_bound_is_named_with_its_extremes(index, found):
    with pytest.raises(FormatError) as caught:
        check_index("m", "g_idx", torch.tensor(index, dtype=torch.int32), 4)
    assert caught.value.tensor == "m.g_idx"
    assert (caught.value.expected, caught.value.found) == ("0 to 3", found)


@pytest.mark.parametrize(
    "scale", [torch.tensor(1e-30), torch.tensor([0.5, 448.0]), torch.tensor([[1.0]], dtype=torch.bfloat16)]
)
def test_scales_above_zero_pass(scale):
    check_positive("m", "input_scale", scale)


@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, torch.nan])
def test_a_scale_that_is_not_above_zero_is_named(bad):
    with pytest.raises(FormatError, match="not positive") as caught:
        check_positive("m", "input_scale", torch.tensor([1.0, bad]))
    assert caught.value.tensor == "m.input_scale"
