"""Tests of the detection of GPTQ layers, and of their configs."""

import contextlib

import pytest

from hfq.errors import FormatError
from hfq.formats.gptq import Gptq

MODULE = "model.layers.3.mlp.down_proj"
GPTQMODEL = {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}


@pytest.fixture
def layer(describe):
    """layer(num_bits, group_size) → the tensors of a linear layer 256 → 64."""

    def layer(num_bits: int = 4, group_size: int = 64, **more):
        groups = 256 // group_size
        return describe(
            MODULE,
            qweight=("I32", (256 * num_bits // 32, 64)),
            qzeros=("I32", (groups, 64 * num_bits // 32)),
            scales=("F16", (groups, 64)),
            **more,
        )

    return layer


@pytest.mark.parametrize("num_bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 256])
def test_an_empty_config_leaves_bits_and_groups_to_the_tensors(layer, num_bits, group_size):
    detected = Gptq.detect(MODULE, layer(num_bits, group_size), {})
    assert detected.num_bits == num_bits
    assert detected.group_size == (-1 if group_size == 256 else group_size)
    assert detected.zero_reading == "field_plus_one"
    assert detected.symmetric
    assert {spec.name: spec.shape for spec in detected.tensor_specs(256, 64)}["scales"] == (
        256 // group_size,
        64,
    )


def test_a_width_that_several_bits_explain_needs_the_config(describe):
    tensors = describe(MODULE, qweight=("I32", (32, 8)), qzeros=("I32", (1, 1)), scales=("F16", (1, 8)))
    assert Gptq.detect(MODULE, tensors, {}) is None
    assert Gptq.detect(MODULE, tensors, {"bits": 4}).num_bits == 4


def test_a_group_size_of_the_config_explains_a_last_group_that_is_not_full(describe):
    tensors = describe(MODULE, qweight=("I32", (12, 64)), qzeros=("I32", (2, 8)), scales=("F16", (2, 64)))
    assert Gptq.detect(MODULE, tensors, {"group_size": 64}).group_size == 64
    assert Gptq.detect(MODULE, tensors, {}).group_size == 48


@pytest.mark.parametrize(
    "rest",
    [
        {},
        {"scales": ("F16", (64,))},
        {"scales": ("F16", ())},
        {"scales": ("F16", (4, 0)), "qzeros": ("I32", (4, 0)), "g_idx": ("I32", (256,))},
        {"qzeros": ("I32", (8,)), "scales": ("F16", (4, 64))},
    ],
)
def test_a_layer_with_a_part_missing_or_misshapen_is_taken_so_that_its_specs_can_say_so(describe, rest):
    tensors = describe(MODULE, qweight=("I32", (32, 64)), **rest)
    detected = Gptq.detect(MODULE, tensors, {"bits": 4, "group_size": 64})
    specs = {spec.name: spec for spec in detected.tensor_specs(256, 64)}
    assert (specs["scales"].shape, specs["qzeros"].shape) == ((4, 64), (4, 8))
    assert not specs["scales"].optional
    assert Gptq.detect(MODULE, tensors, {}) is None
    assert Gptq.detect(MODULE, tensors, {"bits": 4}).num_bits == 4


@pytest.mark.parametrize("shape", [(), (0, 64)])
def test_an_empty_weight_is_refused_or_taken_so_that_its_specs_can_say_so(describe, shape):
    tensors = describe(MODULE, qweight=("I32", shape), scales=("F16", (4, 64)), qzeros=("I32", (4, 8)))
    with contextlib.suppress(FormatError):
        assert Gptq.detect(MODULE, tensors, {"bits": 4}).tensor_specs(256, 64)[0].shape == (32, 64)


def test_a_layer_without_scales_is_left_to_awq_where_the_config_says_so(describe):
    tensors = describe(MODULE, qweight=("I32", (256, 8)))
    assert Gptq.detect(MODULE, tensors, {"quant_method": "awq", "bits": 4}) is None


@pytest.mark.parametrize(("num_bits", "claimed"), [(4, 8), (8, 4), (3, 4), (2, 3)])
def test_a_config_that_contradicts_the_zero_points_is_refused(layer, num_bits, claimed):
    with pytest.raises(FormatError, match="contradicts the tensors") as caught:
        Gptq.detect(MODULE, layer(num_bits), {"bits": claimed})
    assert caught.value.tensor == f"{MODULE}.qzeros"
    assert str(claimed) in caught.value.expected
    assert caught.value.found.startswith(f"{num_bits} bits")


@pytest.mark.parametrize("bits", [0, 1, 5, 16, -4, True, 4.0, "4", [4]])
def test_unusable_bits_are_refused(layer, bits):
    with pytest.raises(FormatError, match="bits=") as caught:
        Gptq.detect(MODULE, layer(), {"bits": bits})
    assert caught.value.expected == "2, 3, 4 or 8"


@pytest.mark.parametrize("group_size", [0, -2, True, "x", "128", 64.0, 1 << 24, [64]])
def test_an_unusable_group_size_is_refused(layer, group_size):
    with pytest.raises(FormatError, match="group_size="):
        Gptq.detect(MODULE, layer(), {"bits": 4, "group_size": group_size})


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
@pytest.mark.parametrize("label", ["marlin", "bitblas", "GPTQ", 2])
def test_another_checkpoint_format_is_refused(layer, key, label):
    with pytest.raises(FormatError, match="is a GPTQ layout that hfq does not support") as caught:
        Gptq.detect(MODULE, layer(), {"bits": 4, key: label})
    assert caught.value.tensor == MODULE
    assert caught.value.expected == "gptq or gptq_v2 or gptq_p"


@pytest.mark.parametrize("label", [["gptq"], {"name": "gptq"}])
def test_a_checkpoint_format_of_the_wrong_type_is_refused(layer, label):
    with pytest.raises(FormatError):
        Gptq.detect(MODULE, layer(), {"bits": 4, "checkpoint_format": label})


@pytest.mark.parametrize(
    ("config", "num_bits", "reading"),
    [
        ({}, 4, "field_plus_one"),
        ({"checkpoint_format": "gptq"}, 4, "field_plus_one"),
        ({"checkpoint_format": "gptq_v2"}, 4, "stored"),
        ({"format": "gptq_v2"}, 4, "stored"),
        ({"checkpoint_format": "gptq_v2"} | GPTQMODEL, 4, "stored"),
        (GPTQMODEL, 2, "word_plus_one"),
        (GPTQMODEL, 3, "masked_plus_one"),
        (GPTQMODEL, 4, "word_plus_one"),
        (GPTQMODEL, 8, "word_plus_one"),
        ({"meta": {"quantizer": "gptqmodel:1.0"}}, 4, "word_plus_one"),
        ({"meta": {"quantizer": ["auto_gptq:0.7.1"]}}, 4, "field_plus_one"),
        ({"meta": None}, 4, "field_plus_one"),
        ({"meta": "gptqmodel"}, 4, "field_plus_one"),
    ],
)
def test_the_label_and_the_writer_decide_how_zero_points_are_read(layer, config, num_bits, reading):
    assert Gptq.detect(MODULE, layer(num_bits), config).zero_reading == reading


def test_a_weight_that_awq_packed_along_the_output_is_not_taken(describe):
    awq = describe(MODULE, qweight=("I32", (256, 8)), qzeros=("I32", (2, 8)), scales=("F16", (2, 64)))
    assert Gptq.detect(MODULE, awq, {"quant_method": "awq", "bits": 4}) is None
    assert Gptq.detect(MODULE, awq, {}) is None


def test_a_dense_layer_is_not_taken(describe):
    assert (
        Gptq.detect(MODULE, describe(MODULE, weight=("F16", (64, 256)), scales=("F16", (2, 64))), {"bits": 4})
        is None
    )


RULES = {
    "-:.*lm_head.*": {},
    "+:.*down_proj": {"bits": 8, "group_size": 32},
    r".*layers\.3\..*": {"bits": 2, "sym": False},
}


@pytest.mark.parametrize(
    ("module", "num_bits", "group_size", "symmetric"),
    [
        ("model.layers.3.mlp.down_proj", 8, 32, True),
        ("model.layers.3.mlp.up_proj", 2, 64, False),
        ("model.layers.30.mlp.up_proj", 4, 64, True),
        ("lm_head", 4, 64, True),
    ],
)
def test_the_first_dynamic_rule_that_matches_overrides_the_config(
    layer, module, num_bits, group_size, symmetric
):
    config = {"bits": 4, "group_size": 64, "sym": True, "dynamic": RULES}
    detected = Gptq.detect(module, layer(num_bits, group_size), config)
    assert (detected.num_bits, detected.group_size, detected.symmetric) == (num_bits, group_size, symmetric)


def test_a_dynamic_rule_matches_from_the_front_of_the_name_only(layer):
    config = {"bits": 4, "dynamic": {"mlp": {"bits": 8}, r"model\.layers\.3": {"bits": 2}}}
    assert Gptq.detect(MODULE, layer(2), config).num_bits == 2


def test_a_negative_rule_ends_the_search(layer):
    config = {"bits": 4, "dynamic": {"-:.*down_proj": {"bits": 8}, ".*": {"bits": 2}}}
    assert Gptq.detect(MODULE, layer(4), config).num_bits == 4


@pytest.mark.parametrize(
    ("dynamic", "key"),
    [
        ({"+:*broken(": {"bits": 8}}, "dynamic"),
        ({"-:[": {}}, "dynamic"),
        ({".*": 8}, "dynamic"),
        ({"+:.*": ["bits"]}, "dynamic"),
        (["-:.*"], "dynamic"),
        ("-:.*", "dynamic"),
        (7, "dynamic"),
        ({".*": {"bits": "eight"}}, "bits"),
    ],
)
def test_unusable_dynamic_rules_are_refused(layer, dynamic, key):
    with pytest.raises(FormatError) as caught:
        Gptq.detect(MODULE, layer(4), {"bits": 4, "dynamic": dynamic})
    assert key in caught.value.message
    assert caught.value.file == "config.json"


def test_a_rule_that_does_not_match_may_hold_anything(layer):
    assert Gptq.detect(MODULE, layer(4), {"bits": 4, "dynamic": {"other": 8}}).num_bits == 4


def test_act_order_needs_its_g_idx(layer):
    config = {"bits": 4, "group_size": 64, "desc_act": True}
    spec = Gptq.detect(MODULE, layer(g_idx=("I32", (1,))), config).tensor_specs(256, 64)[3]
    assert (spec.name, spec.shape, spec.optional) == ("g_idx", (256,), False)
    assert not Gptq.detect(MODULE, layer(), config).tensor_specs(256, 64)[3].optional
    assert Gptq.detect(MODULE, layer(4, 256), config | {"group_size": -1}).tensor_specs(256, 64)[3].optional


@pytest.mark.parametrize("g_idx", [{}, {"g_idx": ("I32", (0,))}, {"g_idx": ("I32", (1,))}])
def test_a_last_group_that_is_not_full_needs_a_whole_g_idx(layer, g_idx):
    detected = Gptq.detect(MODULE, layer(**g_idx), {"bits": 4, "group_size": 96})
    with pytest.raises(FormatError, match="do not divide its input"):
        detected.tensor_specs(256, 64)
    whole = Gptq.detect(MODULE, layer(g_idx=("I32", (256,))), {"bits": 4, "group_size": 96})
    assert {spec.name: spec.shape for spec in whole.tensor_specs(256, 64)}["scales"] == (3, 64)
