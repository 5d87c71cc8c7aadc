"""Tests of distillation: lower errors, better prediction of unseen text, and equal codes."""

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

import hfq
from hfq import SetupError
from hfq.formats.awq import Awq
from hfq.formats.gptq import Gptq
from hfq.quantization.decoder_layer import as_weight
from hfq.quantization.distillation import _Layer
from hfq.quantization.gptq import factorize, solve
from hfq.recipes.recipe import Recipe
from tests.quantization.conftest import LENGTH, SAMPLES, SOURCE
from tests.quantization.test_awq_scales import perplexity
from tests.quantization.test_driver import files_of
from tests.support import tiny_models
from tests.support.models import load

ROUNDED = {"method": "rtn", "bits": 2, "group_size": 64, "sym": False}


@pytest.fixture(scope="module")
def recovered(tmp_path_factory, tokens):
    """Folder of a stopped run, an uninterrupted one, and one without distillation; and the report."""

    class Stopped(Exception):
        pass

    def stop(progress):
        if progress.done == 2:
            raise Stopped

    out, calibration = (
        tmp_path_factory.mktemp("recovered"),
        {"dataset": tokens, "num_calibration_samples": SAMPLES, "max_seq_length": LENGTH},
    )
    recipe = Recipe(**ROUNDED, distill_steps=12)
    with pytest.raises(Stopped):
        hfq.quantize(SOURCE, recipe, output_dir=out / "stopped", on_progress=stop, **calibration)
    resumed = hfq.quantize(SOURCE, recipe, output_dir=out / "stopped", **calibration)
    report = hfq.quantize(SOURCE, recipe, output_dir=out / "trained", **calibration)
    hfq.quantize(SOURCE, Recipe(**ROUNDED), output_dir=out / "rounded")
    assert (resumed.resumed, resumed.distilled) == (2, report.distilled)
    return out, report


def test_after_a_stop_it_gives_the_same_bytes(recovered):
    assert files_of(recovered[0] / "stopped") == files_of(recovered[0] / "trained")


def test_the_error_of_each_block_falls_and_so_does_the_perplexity_of_other_text(recovered, text):
    out, report = recovered
    assert list(report.distilled) == [f"model.layers.{number}" for number in range(4)]
    assert all(after < 0.97 * before for before, after in report.distilled.values())
    card = (out / "trained" / "README.md").read_text()
    before, after = report.distilled["model.layers.2"]
    assert (
        f"Distillation of model.layers.2: the mean squared error of its outputs fell from {before:.3g} to "
        f"{after:.3g}." in card
    )
    ids = torch.tensor(AutoTokenizer.from_pretrained(SOURCE)(text[-16000:])["input_ids"])
    windows = ids[: len(ids) // 128 * 128].view(-1, 128)
    rounded, trained = (perplexity(load(out / name), windows) for name in ("rounded", "trained"))
    print(f"perplexity: rounded {rounded:.3f}, recovered {trained:.3f}")
    assert trained < 0.97 * rounded


def test_scales_norms_and_nothing_else_are_trained(recovered):
    before, after = (
        tiny_models.digests(recovered[0] / "rounded"),
        tiny_models.digests(recovered[0] / "trained"),
    )
    assert {name: entry[:2] for name, entry in before.items()} == {
        name: entry[:2] for name, entry in after.items()
    }
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        name for name in before if name.endswith(".scales") or (".layers." in name and "norm" in name)
    }


@pytest.mark.parametrize("kind", ["groups", "act_order", "awq"])
def test_rounded_scales_give_the_weight_that_readers_see(kind):
    weight, recipe = (
        torch.randn(64, 96),
        Recipe("awq" if kind == "awq" else "gptq", 4, 32, desc_act=True if kind == "act_order" else None),
    )
    if kind == "act_order":
        inputs = torch.randn(200, 96) * torch.rand(96)
        solved = solve(weight, factorize(inputs.t() @ inputs, recipe, ""), Gptq(4, 32), recipe)
        weight_format = Gptq(4, 32, zero_reading="stored", g_idx_length=2)
        quantized = weight_format.pack(solved.codes, solved.scales, solved.zeros, solved.g_idx)
    else:
        weight_format = Awq(group_size=32) if kind == "awq" else Gptq(4, 32, g_idx_length=2)
        quantized = weight_format.quantize(weight)
    linear = nn.Linear(96, 64)
    layer = _Layer(linear, quantized, weight_format, recipe)
    layer.ratio.data.uniform_(0.5, 1.5)
    with torch.no_grad():
        layer.put(rounded=True)
    assert torch.equal(
        linear._parameters["weight"],
        as_weight(weight_format, recipe, {**quantized, "scales": layer.rounded()}),
    )
    assert not torch.equal(layer.rounded(), quantized["scales"])


@pytest.mark.parametrize(
    "options",
    [
        {"method": "fp8", "distill_steps": 4},
        {"method": "gptq", "distill_steps": -1},
        {"method": "rtn", "distill_steps": True},
    ],
)
def test_what_cannot_be_recovered_is_refused(options, tmp_path):
    with pytest.raises(SetupError, match="distill_steps"):
        Recipe(**options)


def test_it_needs_a_calibration_set(tmp_path):
    with pytest.raises(SetupError, match="distill_steps requires calibration data"):
        hfq.quantize(SOURCE, Recipe("rtn", distill_steps=1), output_dir=tmp_path / "out")
