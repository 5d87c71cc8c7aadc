"""Tests of the options in configs of FP8 writers for one layer."""

import pytest
import torch

from hfq.errors import FormatError
from hfq.formats import ActivationScheme
from hfq.formats.fp8 import Fp8

MODULE = "model.layers.1.self_attn.q_proj"
GROUP = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}

CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [96, 64]}


@pytest.fixture
def detect(describe):
    """detect(config, weight_scale=(dtype, shape), …) → the format of an F8_E4M3 layer 256 → 192."""

    def detect(config=None, weight=("F8_E4M3", (192, 256)), **tensors):
        return Fp8.detect(MODULE, describe(MODULE, weight=weight, **tensors), config or {})

    return detect


def shapes(detected: Fp8, in_features: int = 256, out_features: int = 192):
    return {spec.name: spec.shape for spec in detected.tensor_specs(in_features, out_features)}


def compressed(*groups: tuple[list[str], dict], **more) -> dict:
    listed = {
        f"group_{i}": {"targets": targets, "weights": weights} | more
        for i, (targets, weights) in enumerate(groups)
    }
    return {"quant_method": "compressed-tensors", "config_groups": listed}


def test_a_group_that_leaves_a_rest_is_refused_or_read_by_its_size(detect):
    try:
        detected = detect(
            compressed((["Linear"], GROUP)), weight=("F8_E4M3", (4, 90)), weight_scale=("F32", (4, 3))
        )
    except FormatError:
        return
    tensors = {
        "weight": torch.ones(4, 90).to(torch.float8_e4m3fn),
        "weight_scale": torch.tensor([[1.0, 2, 3]]).repeat(4, 1),
    }
    refused = shapes(detected, 90, 4)["weight_scale"] != (4, 3)
    assert refused or detected.dequantize(tensors)[0].tolist() == [1.0] * 32 + [2.0] * 32 + [3.0] * 26


@pytest.mark.parametrize("more", [{"bits": 4}, {"bits": True}, {"bits": "8"}])
def test_bits_other_than_8_are_refused(detect, more):
    with pytest.raises(FormatError, match="bits="):
        detect({"quant_method": "fp8"} | more, weight_scale=("F32", ()))


@pytest.mark.parametrize(
    "size",
    [
        [128],
        [128, 128, 1],
        [0, 128],
        [128, -1],
        [128.0, 128],
        ["128", 128],
        "128",
        "128x",
        "0x128",
        "128x128x1",
        128,
        {},
        [True, 128],
    ],
)
def test_a_nonsensical_block_size_is_refused(detect, size):
    with pytest.raises(
        FormatError, match="weight_block_size in quantization_config is not supported"
    ) as caught:
        detect({"quant_method": "fp8", "weight_block_size": size}, weight_scale_inv=("F32", (2, 2)))
    assert caught.value.file == "config.json"


def test_a_block_of_older_compressed_tensors_is_a_string(detect):
    """compressed-tensors 0.9 requires a string such as 2x4 or 8x16; 0.15 also reads lists."""
    found = detect(
        compressed((["Linear"], BLOCK | {"block_structure": "96x64"})), weight_scale=("F32", (2, 4))
    )
    assert (found.strategy, found.block_structure) == ("block", (96, 64))


@pytest.mark.parametrize(
    "weights", [INT4, CHANNEL | {"type": "int"}, CHANNEL | {"num_bits": 4}, CHANNEL | {"num_bits": None}]
)
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


@pytest.mark.parametrize(
    "target", ["q_proj", "model.layers.1", "re:q_proj", r"re:.*layers\.10\..*", "Conv1d"]
)
def test_a_target_that_names_something_else_does_not_take_the_module(detect, target):
    assert detect(compressed(([target], INT4)), weight_scale=("F32", (192, 1))).strategy == "channel"


def test_a_target_that_is_no_regular_expression_is_refused(detect):
    with pytest.raises(FormatError, match="not a regular expression") as caught:
        detect(compressed((["re:*("], CHANNEL)), weight_scale=("F32", (192, 1)))
    assert "*(" in caught.value.found


@pytest.mark.parametrize("structure", [[96], "96x", "0x64", [0, 64]])
def test_a_nonsensical_block_structure_is_refused(detect, structure):
    with pytest.raises(FormatError, match="block_structure in quantization_config is not supported"):
        detect(compressed((["Linear"], BLOCK | {"block_structure": structure})), weight_scale=("F32", (2, 4)))


@pytest.mark.parametrize("size", [0, -1, True, "32"])
def test_a_nonsensical_group_size_is_refused(detect, size):
    with pytest.raises(FormatError, match="group_size="):
        detect(compressed((["Linear"], GROUP | {"group_size": size})), weight_scale=("F32", (192, 8)))


def test_a_group_size_of_the_config_must_explain_the_scale(detect):
    assert shapes(detect(compressed((["Linear"], GROUP)), weight_scale=("U8", (192, 8))))["weight_scale"] == (
        192,
        8,
    )
    assert shapes(detect(compressed((["Linear"], GROUP)), weight_scale=("U8", (192, 4))))["weight_scale"] == (
        192,
        8,
    )


@pytest.mark.parametrize(
    "config",
    [
        compressed(([MODULE], [8])),
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": 5}}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": "Linear"}}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": None}},
        {"quant_method": "compressed-tensors", "config_groups": [CHANNEL]},
        compressed((["Linear"], CHANNEL)) | {"transform_config": {"config_groups": {"u": {}}}},
        compressed((["Linear"], CHANNEL)) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        compressed(
            (["Linear"], CHANNEL),
            input_activations={"dynamic": True, "type": "float", "strategy": "group", "group_size": 0},
        ),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": "high"},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": True},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": float("nan")},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 0},
        {"quant_method": "fp8", "activation_scheme": "sometimes"},
        {"quant_method": "fp8", "activation_scheme": ["static"]},
        {"quant_method": "fp8", "weight_scale_semantics": "Inverse"},
    ],
    ids=str,
)
def test_a_config_that_hfq_cannot_follow_is_refused(detect, config):
    with pytest.raises(FormatError) as caught:
        detect(config, weight_scale=("F32", (192, 1)))
    assert caught.value.file == "config.json"


@pytest.mark.parametrize(
    "more",
    [
        {"transform_config": {}},
        {"transform_config": None},
        {"sparsity_config": {}},
        {"sparsity_config": {"format": "dense"}},
    ],
)
def test_transforms_and_sparsity_that_are_none_are_no_hindrance(detect, more):
    assert (
        detect(compressed((["Linear"], CHANNEL)) | more, weight_scale=("F32", (192, 1))).strategy == "channel"
    )


def dynamic(strategy: str, **more) -> dict:
    return {
        "input_activations": {"type": "float", "num_bits": 8, "dynamic": True, "strategy": strategy, **more}
    }


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        ({}, None),
        ({"quant_method": "fp8"}, ActivationScheme("token")),
        ({"quant_method": "fp8", "activation_scheme": "static"}, None),
        ({"quant_method": "fp8", "weight_block_size": [64, 32]}, ActivationScheme("group", group_size=32)),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            ActivationScheme("token", upper_bound=1200.0),
        ),
        ({"quant_method": "fbgemm_fp8"}, ActivationScheme("token")),
        (compressed((["Linear"], CHANNEL)), None),
        (compressed((["Linear"], CHANNEL), **dynamic("token")), ActivationScheme("token")),
        (compressed((["Linear"], CHANNEL), **dynamic("tensor")), ActivationScheme("tensor")),
        (
            compressed((["Linear"], CHANNEL), **dynamic("group", group_size=64)),
            ActivationScheme("group", group_size=64),
        ),
        (
            compressed((["Linear"], CHANNEL), **dynamic("token", dynamic=False)),
            ActivationScheme("token", dtype="8-bit float"),
        ),
        (
            compressed((["Linear"], CHANNEL), **dynamic("token", type="int")),
            ActivationScheme("token", dtype="int8"),
        ),
    ],
)
def test_the_config_says_how_activations_are_quantized(detect, config, scheme):
    assert detect(config, weight_scale=("F32", (192, 1))).activation_scheme == scheme


@pytest.mark.parametrize("name", ["input_scale", "activation_scale"])
def test_a_stored_input_scale_makes_the_scheme_static(detect, name):
    detected = detect(
        compressed((["Linear"], CHANNEL), **dynamic("token")),
        weight_scale=("F32", ()),
        **{name: ("F32", (1,))},
    )
    assert detected.activation_scheme == ActivationScheme("tensor", scale_name=name)
    assert shapes(detected)[name] == (1,)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "activation_scheme": "static"},
        compressed((["Linear"], CHANNEL), **dynamic("tensor", dynamic=False)),
    ],
)
def test_a_static_scheme_needs_its_scale(detect, config):
    specs = {spec.name: spec for spec in detect(config, weight_scale=("F32", ())).tensor_specs(256, 192)}
    assert specs["input_scale"].shape in ((), (1,))
    assert not specs["input_scale"].optional
    assert "input_scale" not in shapes(detect({"quant_method": "fp8"}, weight_scale=("F32", ())))


@pytest.mark.parametrize(
    "config",
    [{"quant_method": "fp8", "weight_scale_semantics": "multiplier"}, compressed((["Linear"], CHANNEL))],
)
def test_row_scales_above_1_multiply_where_the_config_says_so(detect, config, caplog):
    tensors = {
        "weight": torch.ones(192, 256).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.full((192,), 2000.0),
    }
    resolved = detect(config, weight_scale_inv=("F32", (192,))).resolve(MODULE, tensors)
    assert resolved.dequantize(tensors).unique().tolist() == [2000.0]
    assert not caplog.records
