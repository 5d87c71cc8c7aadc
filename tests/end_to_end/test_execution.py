"""Tests of quantized activations, and of wrong options of execution."""

import functools

import pytest
import torch

import hfq
from hfq import HfqConfig, SetupError
from hfq.errors import FormatError
from hfq.modules.linear import QuantizedLinear
from tests.contract.cases import CASES
from tests.support import models, tiny_models

TOKENS = torch.arange(1, 21)[None]
load = functools.partial(models.load, device_map="cpu")


def linears(model):
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


@pytest.mark.parametrize(
    ("option", "value"),
    [("execute_cpu_layers_on", "gpu"), ("llm_int8_threshold", -1.0), ("llm_int8_threshold", "6")],
)
def test_a_wrong_option_is_named(option, value):
    with pytest.raises(SetupError, match=option):
        HfqConfig(**{option: value})


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """write(case, more) → a model whose layers all have one format variant.

    `more` adds entries to its config.
    """

    def write(name: str, more=None):
        case = next(case for case in CASES if case.id == name)
        config = {**case.config, **(more or {})}
        return tiny_models.write_model(
            tmp_path_factory.mktemp(name),
            tiny_models.model_tensors(case.format),
            config,
            tiny_models.schemas(tiny_models.model_tensors(case.format), case.schema),
            case.kind,
        )

    return write


W8A8 = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}


@pytest.fixture(scope="module")
def smoothquant(write):
    """A model in the form that llmcompressor writes for W8A8."""
    config = next(case for case in CASES if case.id == "int-quantized-channel").config
    groups = {name: {**group, "input_activations": W8A8} for name, group in config["config_groups"].items()}
    return write("int-quantized-channel", {"config_groups": groups})


def test_int8_activations_are_multiplied_as_such_where_that_is_asked_for(smoothquant):
    asked, exact = load(smoothquant, quantize_activations=True), load(smoothquant)
    assert {linear.kernel.name for linear in linears(asked)} == {"int8"}
    assert "int8" not in {linear.kernel.name for linear in linears(exact)}
    rounded = load(smoothquant, quantize_activations=True, kernel="reference")
    assert {linear.kernel.name for linear in linears(rounded)} == {"reference"}
    with torch.no_grad():
        found, expected, plain = (model(TOKENS).logits for model in (asked, rounded, exact))
    # float32 on both sides; the order of a sum may change how an activation rounds
    assert (found - expected).norm() <= 1e-3 * expected.norm()
    assert (found - plain).norm() > 1e-3 * plain.norm()


def test_llm_int8_is_done_where_that_is_asked_for_and_tells_its_outliers(write):
    path = write("bitsandbytes-int8", {"llm_int8_threshold": 2.5})
    model, exact = load(path, quantize_activations=True), load(path)
    assert {linear.scheme.outlier_threshold for linear in linears(model)} == {2.5}
    assert all(linear.scheme is None and linear.outliers is None for linear in linears(exact))
    with torch.no_grad():
        found, plain = model(TOKENS).logits, exact(TOKENS).logits
    assert not torch.equal(found, plain)
    report = hfq.report(model)
    channels = sum(linear.in_features for linear in linears(model))
    assert report.outliers.channels == channels
    assert 0 < report.outliers.share < 1
    assert report.to_dict()["outliers"]["channels"] == channels
    assert "outlier channels" in str(report)
    assert hfq.report(exact).outliers is None
    every = load(path, quantize_activations=True, llm_int8_threshold=0.0)
    none = load(
        path, quantize_activations=True, llm_int8_threshold=1e-30
    )  # every channel is an outlier, so nothing is quantized
    with torch.no_grad():
        assert not torch.equal(every(TOKENS).logits, found)
        assert torch.equal(none(TOKENS).logits, plain)
    assert hfq.report(none).outliers.share == 1


@pytest.mark.parametrize("threshold", [-1, "6", True, float("inf")])
def test_an_unusable_threshold_of_a_checkpoint_is_refused(write, threshold):
    with pytest.raises(FormatError, match="llm_int8_threshold"):
        load(write("bitsandbytes-int8", {"llm_int8_threshold": threshold}))
