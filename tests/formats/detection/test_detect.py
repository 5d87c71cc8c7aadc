"""Tests of the detection of formats from tensors, and of errors for unquantized checkpoints."""

import pytest

from hfq.errors import FormatError
from hfq.formats import FORMATS, Format, detect_formats, tensors_by_module
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq

GPTQ_LAYER = {
    "qweight": ("I32", (32, 64)),
    "qzeros": ("I32", (2, 8)),
    "scales": ("F16", (2, 64)),
    "g_idx": ("I32", (256,)),
}
FP8_LAYER = {"weight": ("F8_E4M3", (64, 256)), "weight_scale": ("F32", (64, 1))}
NORM = {"weight": ("F16", (256,))}
DENSE = {"weight": ("BF16", (64, 256)), "bias": ("F16", (64,))}
BNB_LAYER = {"weight": ("U8", (8192, 1))}
BNB_STATE = {
    "absmax": ("F32", (256,)),
    "quant_map": ("F32", (16,)),
    "quant_state.bitsandbytes__nf4": ("U8", (85,)),
}


@pytest.fixture
def modules(describe):
    """modules(name=layer, …) → the groups of `tensors_by_module`; `__` in a name means a dot."""

    def modules(**layers):
        stored = {}
        for name, layer in layers.items():
            stored |= {info.name: info for info in describe(name.replace("__", "."), **layer).values()}
        return tensors_by_module(stored)

    return modules


def refusal(modules, config) -> FormatError:
    with pytest.raises(FormatError) as caught:
        detect_formats(modules, config)
    return caught.value


def test_tensors_are_grouped_by_the_module_they_stand_beside(modules):
    grouped = modules(model__layers__0__q=GPTQ_LAYER, model__norm=NORM)
    assert {module: sorted(tensors) for module, tensors in grouped.items()} == {
        "model.layers.0.q": ["g_idx", "qweight", "qzeros", "scales"],
        "model.norm": ["weight"],
    }
    assert grouped["model.norm"]["weight"].name == "model.norm.weight"


def test_a_tensor_without_a_module_stands_beside_the_model_itself(describe):
    info = describe("", logit_scale=("F32", ()))["logit_scale"]
    assert list(tensors_by_module({"logit_scale": info})) == [""]


def test_older_names_of_quark_are_those_of_today(describe):
    names = ("weight", "weight_quantizer.scale", "weight_quantizer.1.zero_point", "input_quantizer.scale")
    stored = {info.name: info for info in describe("m.q", **dict.fromkeys(names, ("I32", (8, 1)))).values()}
    grouped = tensors_by_module(stored)
    assert {local: info.name for local, info in grouped["m.q"].items()} == {
        "weight": "m.q.weight",
        "weight_scale": "m.q.weight_quantizer.scale",
        "weight_zero_point_2": "m.q.weight_quantizer.1.zero_point",
        "input_scale": "m.q.input_quantizer.scale",
    }


def test_a_tensor_under_an_older_and_todays_name_is_not_lost(describe):
    names = ("weight_scale", "weight_quantizer.scale")
    stored = {info.name: info for info in describe("m.q", **dict.fromkeys(names, ("F32", (8,)))).values()}
    grouped = tensors_by_module(stored)
    assert [info.name for tensors in grouped.values() for info in tensors.values()] == list(stored)


def test_each_module_has_its_own_format_and_dense_ones_have_none(modules):
    found = detect_formats(modules(a__q=GPTQ_LAYER, a__k=FP8_LAYER, a__norm=NORM, lm_head=DENSE), {})
    assert {module: type(weight_format) for module, weight_format in found.items()} == {
        "a.q": Gptq,
        "a.k": Fp8,
    }


def test_a_config_of_another_method_does_not_overrule_the_tensors(modules):
    found = detect_formats(modules(a__k=FP8_LAYER, a__norm=NORM), {"quant_method": "awq"})
    assert {module: type(weight_format) for module, weight_format in found.items()} == {"a.k": Fp8}


def test_a_dense_checkpoint_is_told_that_it_is_not_quantized(modules):
    error = refusal(modules(lm_head=DENSE, norm=NORM), {})
    assert error.message == "The checkpoint is not quantized."
    assert (
        error.expected == f"tensors quantized as {' or '.join(name for name in FORMATS if name != 'dense')}"
    )
    assert error.found == "3 tensors of BF16, F16, named bias, weight; no quantization_config"
    assert "with HfqConfig()" in error.fix


def test_a_dense_checkpoint_with_other_layers_is_told_that_it_is_not_quantized(modules):
    batch_norm = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), ("F32", (64,)))
    assert refusal(modules(conv=DENSE, norm=batch_norm), {}).message == "The checkpoint is not quantized."


def test_a_dense_checkpoint_with_a_config_is_told_of_the_contradiction(modules):
    error = refusal(modules(lm_head=DENSE, norm=NORM), {"quant_method": "gptq", "bits": 4})
    assert error.message.startswith(
        "The checkpoint (quant_method='gptq') contains no module in a format that hfq reads"
    )


@pytest.mark.parametrize("config", [{"quant_method": "bitsandbytes"}, {}])
def test_tensors_below_weight_belong_to_the_module_above_it(modules, config):
    state = {f"weight__{name.replace('.', '__')}": spec for name, spec in BNB_STATE.items()}
    grouped = modules(
        a__q=BNB_LAYER | {name.replace("__", "."): spec for name, spec in state.items()}, a__norm=NORM
    )
    assert sorted(grouped) == ["a.norm", "a.q"]
    assert detect_formats(grouped, config)["a.q"].describe() == "bitsandbytes nf4"


@pytest.mark.parametrize("config", [{"quant_method": "squeeze"}, {}])
def test_the_tensors_of_an_unknown_dialect_are_named(modules, config):
    error = refusal(modules(a__q={"codes": ("U8", (64, 128)), "rows": ("I32", (64,))}, a__norm=NORM), config)
    assert error.message.startswith(
        f"The checkpoint (quant_method={config.get('quant_method')!r}) contains no module"
    )
    assert error.found == "3 tensors of F16, I32, U8, named codes, rows, weight"
    assert "the library that wrote it" in error.fix


def test_a_contradiction_in_one_module_ends_the_detection(modules):
    with pytest.raises(FormatError, match=r"contradicts the tensors of b\.q"):
        detect_formats(modules(a__q=GPTQ_LAYER, b__q=GPTQ_LAYER), {"bits": 4, "dynamic": {"b": {"bits": 8}}})


def test_a_format_registers_itself_under_a_name_of_its_own():
    assert (FORMATS["fp8"], FORMATS["gptq"]) == (Fp8, Gptq)
    with pytest.raises(TypeError, match="two formats are named 'gptq'"):
        type("Other", (Format,), {"name": "gptq"})
    assert FORMATS["gptq"] is Gptq
