"""Tests of the detection of FP8 layers, and of their tensors and configs."""

import contextlib

import pytest
import torch

from hfq.errors import FormatError
from hfq.formats.fp8 import Fp8

MODULE = "model.layers.1.self_attn.q_proj"
FLOATS = ("F16", "BF16", "F32")


@pytest.fixture
def detect(describe):
    """detect(config, weight_scale=(dtype, shape), …) → the format of an F8_E4M3 layer 256 → 192."""

    def detect(config=None, module=MODULE, weight=("F8_E4M3", (192, 256)), **tensors):
        return Fp8.detect(module, describe(module, weight=weight, **tensors), config or {})

    return detect


def shapes(detected: Fp8, in_features: int = 256, out_features: int = 192):
    return {spec.name: spec.shape for spec in detected.tensor_specs(in_features, out_features)}


@pytest.mark.parametrize(
    "weight",
    [("U8", (192, 256)), ("F16", (192, 256)), ("F8_E4M3", (4, 192, 256)), ("F8_E4M3FNUZ", (192, 256))],
)
def test_another_weight_is_not_taken(detect, weight):
    assert detect(weight=weight, weight_scale=("F32", ())) is None


def test_the_specs_name_everything_a_layer_may_hold(detect):
    detected = detect(
        weight=("F8_E5M2", (192, 256)),
        weight_scale=("F32", (192, 1)),
        input_scale=("BF16", (1,)),
        bias=("F16", (192,)),
    )
    specs = {spec.name: spec for spec in detected.tensor_specs(256, 192)}
    assert list(specs) == ["weight", "weight_scale", "input_scale", "bias"]
    assert specs["weight"].dtypes == ("F8_E5M2",)
    assert specs["weight_scale"].dtypes == (*FLOATS, "F8_E8M0", "U8")
    assert [specs[name].role for name in specs] == ["codes", "scale", "scale", "bias"]
    assert [specs[name].optional for name in specs] == [False, False, False, True]
    assert specs["bias"].shape == (192,)


@pytest.mark.parametrize(
    ("config", "name", "shape"),
    [
        ({}, "weight_scale", (192, 1)),
        ({"quant_method": "compressed-tensors"}, "weight_scale", (192, 1)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_scale_inv", (192, 1)),
        ({"quant_method": "fp8", "weight_scale_semantics": "inverse"}, "weight_scale_inv", (192, 1)),
    ],
)
def test_a_missing_scale_is_named_by_the_specs(detect, config, name, shape):
    spec = detect(config).tensor_specs(256, 192)[1]
    assert (spec.name, spec.role, spec.optional) == (name, "scale", False)
    assert spec.shape == shape


def test_the_name_of_transformers_wins_where_both_scales_are_stored(detect):
    block = {"weight_block_size": [128, 128]}
    assert (
        detect(block, weight_scale=("F32", ()), weight_scale_inv=("F32", (2, 2))).scale_name
        == "weight_scale_inv"
    )


def test_a_grid_that_128_does_not_tile_needs_the_word_of_the_config(detect):
    with pytest.raises(FormatError, match=r"(?s)does not state the block size.*weight_block_size"):
        detect(weight_scale_inv=("F32", (2, 2)))


@pytest.mark.parametrize("scale", [(3, 2), (192, 3), (2,), (256,), (0,), (2, 2, 1)])
def test_a_scale_of_no_known_shape_is_refused_or_does_not_fit_the_specs(detect, scale):
    with contextlib.suppress(FormatError):
        assert shapes(detect(weight_scale=("F32", scale)))["weight_scale"] != scale


@pytest.mark.parametrize("scale", [(2, 1, 3, 1), (3, 1, 2, 1)])
def test_a_grid_of_four_dimensions_that_does_not_match_is_refused(detect, scale):
    with pytest.raises(FormatError, match="does not match its weight") as caught:
        detect({"weight_block_size": [128, 128]}, weight_scale=("F32", scale))
    assert caught.value.tensor == f"{MODULE}.weight_scale"
    with pytest.raises(FormatError, match="does not state the block size"):
        detect(weight_scale=("F32", scale))


@pytest.mark.parametrize("scale", [(1, 2, 1, 2), (2, 3, 4, 5)])
def test_a_scale_of_four_dimensions_that_is_no_grid_does_not_fit_the_specs(detect, scale):
    with contextlib.suppress(FormatError):
        assert shapes(detect(weight_scale=("F32", scale)))["weight_scale"] != scale


@pytest.mark.parametrize(
    ("name", "scale", "place"),
    [
        ("weight_scale", torch.tensor(torch.nan), "[]"),
        ("weight_scale", torch.tensor([torch.inf]), "[0]"),
        ("weight_scale", torch.ones(192, 1).index_fill_(0, torch.tensor([7]), torch.nan), "[7, 0]"),
        (
            "weight_scale",
            torch.full((192, 1), 127, dtype=torch.uint8).index_fill_(0, torch.tensor([9]), 255),
            "[9, 0]",
        ),
        ("input_scale", torch.tensor([torch.nan]), "[0]"),
    ],
)
def test_a_scale_that_is_not_finite_is_refused(describe_tensors, name, scale, place):
    tensors = {
        "weight": torch.zeros(192, 256, dtype=torch.float8_e4m3fn),
        "weight_scale": torch.ones(192, 1),
    } | {name: scale}
    detected = Fp8.detect(MODULE, describe_tensors(MODULE, tensors), {})
    with pytest.raises(FormatError, match="not finite") as caught:
        detected.resolve(MODULE, tensors)
    assert caught.value.tensor == f"{MODULE}.{name}"
    assert f"at {place}" in caught.value.found


@pytest.mark.parametrize("scale", [torch.tensor(0.0), torch.tensor([-1.0])])
def test_a_static_activation_scale_that_nothing_can_be_divided_by_is_refused(describe_tensors, scale):
    tensors = {
        "weight": torch.zeros(192, 256, dtype=torch.float8_e4m3fn),
        "weight_scale": torch.ones(1),
        "input_scale": scale,
    }
    detected = Fp8.detect(MODULE, describe_tensors(MODULE, tensors), {})
    with pytest.raises(FormatError, match="not positive") as caught:
        detected.resolve(MODULE, tensors)
    assert caught.value.tensor == f"{MODULE}.input_scale"


@pytest.mark.parametrize("bad", [0.0, torch.inf])
def test_a_reciprocal_of_zero_or_infinity_is_refused(describe_tensors, bad):
    tensors = {
        "weight": torch.zeros(192, 256, dtype=torch.float8_e4m3fn),
        "weight_scale_inv": torch.ones(192),
    }
    tensors["weight_scale_inv"][5] = bad
    config = {"quant_method": "fp8", "weight_scale_semantics": "inverse"}
    with pytest.raises(FormatError, match="not finite") as caught:
        Fp8.detect(MODULE, describe_tensors(MODULE, tensors), config).resolve(MODULE, tensors)
    assert caught.value.tensor == f"{MODULE}.weight_scale_inv"


def test_a_multiplier_of_zero_is_none_of_hfqs_business(describe_tensors):
    tensors = {"weight": torch.ones(192, 256).to(torch.float8_e4m3fn), "weight_scale_inv": torch.zeros(192)}
    detected = Fp8.detect(MODULE, describe_tensors(MODULE, tensors), {"quant_method": "fp8"})
    assert torch.equal(detected.resolve(MODULE, tensors).dequantize(tensors), torch.zeros(192, 256))


@pytest.mark.parametrize(
    ("stored", "expected"), [((), ()), ((1,), (1,)), ((3,), (1,)), ((192,), (1,)), ((1, 1), (1,))]
)
def test_a_static_activation_scale_is_one_number(detect, stored, expected):
    assert shapes(detect(weight_scale=("F32", ()), input_scale=("F32", stored)))["input_scale"] == expected
