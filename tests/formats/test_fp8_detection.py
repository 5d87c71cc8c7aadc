"""How an FP8 layer is recognised, what it must hold, and what its config may and may not say about it."""

import contextlib

import pytest
import torch

from hfq.errors import FormatError
from hfq.formats import ActivationScheme
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
    "weight", [("U8", (192, 256)), ("F16", (192, 256)), ("F8_E4M3", (4, 192, 256)), ("F8_E4M3FNUZ", (192, 256))]
)
def test_another_weight_is_not_taken(detect, weight):
    assert detect(weight=weight, weight_scale=("F32", ())) is None


def test_the_specs_name_everything_a_layer_may_hold(detect):
    detected = detect(
        weight=("F8_E5M2", (192, 256)), weight_scale=("F32", (192, 1)), input_scale=("BF16", (1,)), bias=("F16", (192,))
    )
    specs = {spec.name: spec for spec in detected.tensor_specs(256, 192)}
    assert list(specs) == ["weight", "weight_scale", "input_scale", "bias"]
    assert specs["weight"].dtypes == ("F8_E5M2",)
    assert specs["weight_scale"].dtypes == (*FLOATS, "F8_E8M0", "U8")
    assert [specs[name].role for name in specs] == ["codes", "scale", "scale", "bias"]
    assert [specs[name].optional for name in specs] == [False, False, True, True]
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
    assert detect(weight_scale=("F32", ()), weight_scale_inv=("F32", (2, 2))).scale_name == "weight_scale_inv"


@pytest.mark.parametrize("scale", [(3, 2), (192, 3), (2,), (256,), (0,), (2, 2, 1)])
def test_a_scale_of_no_known_shape_is_refused_or_does_not_fit_the_specs(detect, scale):
    with contextlib.suppress(FormatError):
        assert shapes(detect(weight_scale=("F32", scale)))["weight_scale"] != scale


@pytest.mark.parametrize("scale", [(2, 1, 3, 1), (3, 1, 2, 1)])
def test_a_grid_of_four_dimensions_that_does_not_match_is_refused(detect, scale):
    with pytest.raises(FormatError, match="does not match its weight") as caught:
        detect(weight_scale=("F32", scale))
    assert caught.value.tensor == f"{MODULE}.weight_scale"


@pytest.mark.parametrize("scale", [(1, 2, 1, 2), (2, 3, 4, 5)])
def test_a_scale_of_four_dimensions_that_is_no_grid_does_not_fit_the_specs(detect, scale):
    with contextlib.suppress(FormatError):
        assert shapes(detect(weight_scale=("F32", scale)))["weight_scale"] != scale


GROUP = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}


def compressed(*groups: tuple[list[str], dict], **more) -> dict:
    listed = {f"group_{i}": {"targets": targets, "weights": weights} | more for i, (targets, weights) in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": listed}


def test_a_group_that_leaves_a_rest_is_refused_or_read_by_its_size(detect):
    try:
        detected = detect(compressed((["Linear"], GROUP)), weight=("F8_E4M3", (4, 90)), weight_scale=("F32", (4, 3)))
    except FormatError:
        return
    tensors = {"weight": torch.ones(4, 90).to(torch.float8_e4m3fn), "weight_scale": torch.tensor([[1.0, 2, 3]]).repeat(4, 1)}
    refused = shapes(detected, 90, 4)["weight_scale"] != (4, 3)
    assert refused or detected.dequantize(tensors)[0].tolist() == [1.0] * 32 + [2.0] * 32 + [3.0] * 26


@pytest.mark.parametrize("more", [{"bits": 4}, {"bits": True}, {"bits": "8"}])
def test_bits_other_than_8_are_refused(detect, more):
    with pytest.raises(FormatError, match="bits="):
        detect({"quant_method": "fp8"} | more, weight_scale=("F32", ()))


@pytest.mark.parametrize(
    "size", [[128], [128, 128, 1], [0, 128], [128, -1], [128.0, 128], ["128", 128], "128", 128, {}, [True, 128]]
)
def test_a_nonsensical_block_size_is_refused(detect, size):
    with pytest.raises(FormatError, match="unusable weight_block_size") as caught:
        detect({"quant_method": "fp8", "weight_block_size": size}, weight_scale_inv=("F32", (2, 2)))
    assert caught.value.file == "config.json"


CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [96, 64]}


@pytest.mark.parametrize("weights", [INT4, CHANNEL | {"type": "int"}, CHANNEL | {"num_bits": 4}, CHANNEL | {"num_bits": None}])
@pytest.mark.parametrize("target", ["Linear", MODULE, "re:.*q_proj"])
def test_a_config_group_that_contradicts_the_weight_is_refused(detect, weights, target):
    with pytest.raises(FormatError, match="contradicts the tensors") as caught:
        detect(compressed(([target], weights)), weight_scale=("F32", (192, 1)))
    assert caught.value.tensor == MODULE


@pytest.mark.parametrize("target", [MODULE, r"re:.*layers\.1\..*", "re:model"])
@pytest.mark.parametrize("first", [True, False])
def test_a_target_that_names_the_module_wins_over_its_class(detect, target, first):
    groups = [([target], BLOCK), (["Linear"], INT4)]
    detected = detect(compressed(*(groups if first else reversed(groups))), weight_scale=("F32", (2, 4)))
    assert (detected.strategy, detected.block_structure) == ("block", (96, 64))


def test_an_exact_name_wins_over_a_regular_expression(detect):
    groups = [(["re:.*q_proj"], BLOCK | {"block_structure": [64, 96]}), ([MODULE], BLOCK)]
    assert detect(compressed(*groups), weight_scale=("F32", (2, 4))).block_structure == (96, 64)


@pytest.mark.parametrize("target", ["q_proj", "model.layers.1", "re:q_proj", r"re:.*layers\.10\..*", "Conv1d"])
def test_a_target_that_names_something_else_does_not_take_the_module(detect, target):
    assert detect(compressed(([target], INT4)), weight_scale=("F32", (192, 1))).strategy == "channel"


def test_a_target_that_is_no_regular_expression_is_refused(detect):
    with pytest.raises(FormatError, match="not a regular expression") as caught:
        detect(compressed((["re:*("], CHANNEL)), weight_scale=("F32", (192, 1)))
    assert "*(" in caught.value.found


@pytest.mark.parametrize("structure", [[96], "96x64", [0, 64]])
def test_a_nonsensical_block_structure_is_refused(detect, structure):
    with pytest.raises(FormatError, match="unusable block_structure"):
        detect(compressed((["Linear"], BLOCK | {"block_structure": structure})), weight_scale=("F32", (2, 4)))


@pytest.mark.parametrize("size", [0, -1, True, "32"])
def test_a_nonsensical_group_size_is_refused(detect, size):
    with pytest.raises(FormatError, match="group_size="):
        detect(compressed((["Linear"], GROUP | {"group_size": size})), weight_scale=("F32", (192, 8)))


def test_a_group_size_of_the_config_must_explain_the_scale(detect):
    assert shapes(detect(compressed((["Linear"], GROUP)), weight_scale=("U8", (192, 8))))["weight_scale"] == (192, 8)
    assert shapes(detect(compressed((["Linear"], GROUP)), weight_scale=("U8", (192, 4))))["weight_scale"] == (192, 8)


@pytest.mark.parametrize(
    "config",
    [
        compressed(([MODULE], [8])),
        compressed(([MODULE], {})) | {"config_groups": {"group_0": {"targets": 5}}},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": "high"},
    ],
    ids=["weights is a list", "targets is a number", "activation_scale_ub is a word"],
)
def test_a_config_of_the_wrong_type_is_refused_by_name(detect, config):
    with pytest.raises(FormatError):
        detect(config, weight_scale=("F32", (192, 1)))


@pytest.mark.parametrize(
    ("name", "scale", "place"),
    [
        ("weight_scale", torch.tensor(torch.nan), "[]"),
        ("weight_scale", torch.tensor([torch.inf]), "[0]"),
        ("weight_scale", torch.ones(192, 1).index_fill_(0, torch.tensor([7]), torch.nan), "[7, 0]"),
        ("weight_scale", torch.full((192, 1), 127, dtype=torch.uint8).index_fill_(0, torch.tensor([9]), 255), "[9, 0]"),
        ("input_scale", torch.tensor([torch.nan]), "[0]"),
    ],
)
def test_a_scale_that_is_not_finite_is_refused(describe_tensors, name, scale, place):
    tensors = {"weight": torch.zeros(192, 256, dtype=torch.float8_e4m3fn), "weight_scale": torch.ones(192, 1)} | {name: scale}
    detected = Fp8.detect(MODULE, describe_tensors(MODULE, tensors), {})
    with pytest.raises(FormatError, match="not finite") as caught:
        detected.resolve(MODULE, tensors)
    assert caught.value.tensor == f"{MODULE}.{name}"
    assert f"at {place}" in caught.value.found


def dynamic(strategy: str, **more) -> dict:
    return {"input_activations": {"type": "float", "num_bits": 8, "dynamic": True, "strategy": strategy, **more}}


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        ({}, None),
        ({"quant_method": "fp8"}, ActivationScheme("token")),
        ({"quant_method": "fp8", "activation_scheme": "static"}, None),
        ({"quant_method": "fp8", "weight_block_size": [64, 32]}, ActivationScheme("group", group_size=32)),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, ActivationScheme("token", upper_bound=1200.0)),
        ({"quant_method": "fbgemm_fp8"}, ActivationScheme("token")),
        (compressed((["Linear"], CHANNEL)), None),
        (compressed((["Linear"], CHANNEL), **dynamic("token")), ActivationScheme("token")),
        (compressed((["Linear"], CHANNEL), **dynamic("tensor")), ActivationScheme("tensor")),
        (compressed((["Linear"], CHANNEL), **dynamic("group", group_size=64)), ActivationScheme("group", group_size=64)),
        (compressed((["Linear"], CHANNEL), **dynamic("token", dynamic=False)), None),
        (compressed((["Linear"], CHANNEL), **dynamic("token", type="int")), None),
    ],
)
def test_the_config_says_how_activations_are_quantized(detect, config, scheme):
    assert detect(config, weight_scale=("F32", (192, 1))).activation_scheme == scheme


@pytest.mark.parametrize("name", ["input_scale", "activation_scale"])
def test_a_stored_input_scale_makes_the_scheme_static(detect, name):
    detected = detect(compressed((["Linear"], CHANNEL), **dynamic("token")), weight_scale=("F32", ()), **{name: ("F32", (1,))})
    assert detected.activation_scheme == ActivationScheme("tensor", scale_name=name)
    assert shapes(detected)[name] == (1,)
