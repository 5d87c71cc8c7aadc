"""Tests of Quark's config: which spec a layer has, and what its activations are."""

import pytest

from hfq import FormatError
from hfq.formats.base import ActivationScheme
from hfq.formats.configs.quark_config import packs_in_order, read_inputs, weight_specs

GLOBAL, FP8, MX = {"dtype": "uint4"}, {"dtype": "fp8_e4m3"}, {"dtype": "fp4"}
CONFIG = {
    "quant_method": "quark",
    "global_quant_config": {"weight": GLOBAL},
    "layer_quant_config": {
        "*.down_proj": {"weight": [FP8, MX]},
        "model.layers.?.up_proj": {"weight": MX},
        "model.layers.1.down_proj": {"weight": FP8},
        "*.gate": {"weight": None},
    },
}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("model.layers.0.q_proj", [GLOBAL]),
        ("model.layers.0.down_proj", [FP8, MX]),
        ("model.layers.1.down_proj", [FP8]),
        ("model.layers.7.up_proj", [MX]),
        ("model.layers.17.up_proj", [GLOBAL]),
        ("model.layers.7.up_proj.extra", [GLOBAL]),
        ("model.layers.7.gate", []),
    ],
)
def test_a_layer_has_the_spec_of_its_name_else_of_a_pattern_else_the_global_one(module, expected):
    assert list(weight_specs(module, CONFIG)) == expected


def test_the_class_of_a_layer_takes_precedence_over_the_global_spec():
    config = CONFIG | {"layer_type_quant_config": {"Linear": {"weight": FP8}}}
    assert list(weight_specs("q_proj", config)) == [FP8]
    assert list(weight_specs("model.layers.7.up_proj", config)) == [MX]


@pytest.mark.parametrize(
    "change",
    [
        {"global_quant_config": None},
        {"global_quant_config": {"weight": "uint4"}},
        {"global_quant_config": {"weight": [GLOBAL] * 3}},
        {"layer_quant_config": ["*"]},
        {"layer_quant_config": {"*": "uint4"}},
        {"layer_quant_config": {"q_[pr]oj": {"weight": MX}}},
    ],
    ids=str,
)
def test_a_config_of_another_type_is_refused(change):
    with pytest.raises(FormatError, match=r"quantization_config is not supported. Nothing was loaded"):
        weight_specs("q_proj", CONFIG | {"layer_quant_config": {}} | change)


def test_codes_are_in_quarks_order_unless_the_config_says_otherwise():
    assert not packs_in_order({})
    assert not packs_in_order({"export": {"pack_method": "reorder"}})
    assert packs_in_order({"export": {"pack_method": "order"}})
    assert not packs_in_order({"export": {"pack_method": None}})
    for method in ("interleave", 0, []):
        with pytest.raises(FormatError, match="pack_method"):
            packs_in_order({"export": {"pack_method": method}})
    for export in (0, "order", [{"pack_method": "order"}]):
        with pytest.raises(FormatError, match="export"):
            packs_in_order({"export": export})


def test_activations_by_token_can_be_rounded_and_others_are_described():
    assert read_inputs("q_proj", CONFIG) is None
    by_token = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "is_dynamic": True}
    config = CONFIG | {"global_quant_config": {"weight": GLOBAL, "input_tensors": by_token}}
    assert read_inputs("q_proj", config) == ActivationScheme("token")
    other = {"dtype": "fp4", "qscheme": "per_group", "is_dynamic": True}
    config = CONFIG | {"global_quant_config": {"weight": GLOBAL, "input_tensors": other}}
    assert read_inputs("q_proj", config).dtype == "quark fp4 per_group"
