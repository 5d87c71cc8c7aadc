"""Tests of loads that round the output head: bits in every placement, bytes, saves, and errors."""

import pytest
import torch
from transformers import AutoModel

import hfq
from hfq import HfqConfig, PlacementError, SetupError
from hfq.formats.layouts.rounding import round_weight
from hfq.integrations.transformers import load_kinds
from hfq.loading.loaded_model import loader_of
from hfq.loading.quantize_on_load.requirements import refuse_quantize_on_load
from hfq.modules.linear import QuantizedLinear
from hfq.modules.output_head import OutputHead
from hfq.recipes.output_head import OUTPUT_HEAD_FORMATS
from tests.contract.cases import CASES
from tests.support import tiny_models
from tests.support.models import GPTQ, load, logits

TIED = GPTQ, tiny_models.DATA / "tiny-llama-fp8"
TOKENS = torch.arange(3, 40)[None]
PLACEMENTS = [
    {"": "disk"},
    {"": "cpu", "lm_head": "disk"},
    {"": "cpu", "model.embed_tokens": "disk", "model.layers.1": "disk"},
    "auto",  # with a limit that puts a part on disk
]
NAMES = pytest.mark.parametrize("name", OUTPUT_HEAD_FORMATS)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """A GPTQ model whose head is stored."""
    case = next(case for case in CASES if case.id == "gptq-v1-w4-sym")
    tensors = tiny_models.model_tensors(case.format)
    return tiny_models.write_model(tmp_path_factory.mktemp("untied"), tensors, case.config)


@pytest.fixture(params=["untied", "tied gptq", "tied fp8"])
def checkpoint(request, untied):
    return {"untied": untied, "tied gptq": TIED[0], "tied fp8": TIED[1]}[request.param]


def rounded(path, name, device_map=None, folder=None, **options):
    limit = {"cpu": loader_of(load(path)).plan.nbytes_by_device()["cpu"] * 9 // 10}
    max_memory = limit if device_map == "auto" else None
    return load(
        path, device_map, offload_folder=folder, max_memory=max_memory, quantize_output_head=name, **options
    )


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@NAMES
def test_only_the_head_differs_and_is_the_rounded_weight(checkpoint, name):
    plain, model = load(checkpoint), rounded(checkpoint, name)
    assert type(plain.lm_head) is OutputHead
    assert type(model.lm_head) is QuantizedLinear
    expected = round_weight("lm_head", plain.lm_head.weight.float(), OUTPUT_HEAD_FORMATS[name])
    held = model.lm_head.state_dict()
    assert {local: held[local].dtype for local in expected} == {k: v.dtype for k, v in expected.items()}
    assert all(torch.equal(held[local].float(), expected[local].float()) for local in expected)
    assert torch.equal(model.get_input_embeddings().weight, plain.get_input_embeddings().weight)
    with torch.no_grad():
        states = plain.model(TOKENS).last_hidden_state
        assert torch.equal(model.model(TOKENS).last_hidden_state, states)
        assert torch.equal(model.lm_head(states), logits(model, TOKENS))
    error = (logits(model, TOKENS) - logits(plain, TOKENS)).norm() / logits(plain, TOKENS).norm()
    assert 0 < error < 0.04  # codes of 8 bits; FP8 e4m3 rounds by up to 1/16


@NAMES
@pytest.mark.parametrize("device_map", PLACEMENTS, ids=str)
def test_every_placement_has_the_same_bits_and_saves_the_checkpoint(checkpoint, name, device_map, tmp_path):
    (tmp_path / "offload").mkdir()
    expected = logits(rounded(checkpoint, name), TOKENS)
    model = rounded(checkpoint, name, device_map, tmp_path / "offload")
    assert torch.equal(logits(model, TOKENS), expected)
    assert not list((tmp_path / "offload").iterdir())
    model.save_pretrained(tmp_path / "saved")
    load(checkpoint).save_pretrained(tmp_path / "plain")
    assert files_of(tmp_path / "saved") == files_of(tmp_path / "plain")
    assert torch.equal(logits(model, TOKENS), expected)


@pytest.mark.parametrize(
    "options", [{"cpu_memory": "private"}, {"cpu_memory": "shared"}, {"disk_io": "direct"}], ids=str
)
def test_options_of_memory_and_disk_apply(checkpoint, options, tmp_path):
    device_map = {"": "disk"} if "disk_io" in options else None
    model = rounded(checkpoint, "fp8", device_map, tmp_path, **options)
    assert torch.equal(logits(model, TOKENS), logits(rounded(checkpoint, "fp8"), TOKENS))
    model.save_pretrained(tmp_path / "saved")
    load(checkpoint).save_pretrained(tmp_path / "plain")
    assert files_of(tmp_path / "saved") == files_of(tmp_path / "plain")


def test_bytes_and_the_change_are_in_plan_and_report(checkpoint):
    plain, model = load(checkpoint), rounded(checkpoint, "int8")
    count, rows = plain.lm_head.weight.numel(), plain.lm_head.out_features
    head = {entry.name: entry for entry in loader_of(model).plan.entries if entry.name.startswith("lm_head")}
    assert {name: entry.nbytes for name, entry in head.items()} == {
        "lm_head.weight": count,
        "lm_head.weight_scale": 2 * rows,
    }
    totals = [sum(loader_of(each).plan.nbytes_by_device().values()) for each in (plain, model)]
    is_tied = plain.config.tie_word_embeddings
    assert totals[1] - totals[0] == count + 2 * rows - (0 if is_tied else plain.lm_head.weight.nbytes)
    found = hfq.report(model)
    assert "results are not those of the checkpoint" in str(found)
    assert "lm_head is rounded to int-quantized int8 channel" in found.to_dict()["model"]["changes"]
    assert "int8" in found.to_dict()["model"]["formats"]
    assert hfq.report(plain).to_dict()["model"]["changes"] == ""


def test_gradients_reach_the_activations(untied):
    model = rounded(untied, "fp8")
    inputs = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    model(inputs_embeds=inputs).logits.square().mean().backward()
    assert inputs.grad.isfinite().all()
    assert inputs.grad.any()


def test_a_float_checkpoint_may_have_a_rounded_head(tmp_path):
    path = tiny_models.DATA / "tiny-llama"
    model = rounded(path, "fp8")
    assert list(loader_of(model).quantized) == ["lm_head"]
    model.save_pretrained(tmp_path / "saved")
    load(path).save_pretrained(tmp_path / "plain")
    assert files_of(tmp_path / "saved") == files_of(tmp_path / "plain")


def test_a_head_on_disk_needs_a_folder(untied):
    with pytest.raises(PlacementError, match=r"(?s)on disk, without offload_folder.*lm_head"):
        rounded(untied, "fp8", {"": "cpu", "lm_head": "disk"})


def test_a_head_that_cannot_be_rounded_is_an_error(untied, tmp_path):
    case = next(case for case in CASES if case.id == "gptq-v1-w4-sym")
    tensors = tiny_models.model_tensors(case.format)
    weight = tensors.pop("lm_head.weight")
    quantized = {f"lm_head.{local}": part for local, part in case.format.quantize(weight.float()).items()}
    stored = tiny_models.write_model(tmp_path / "quantized", tensors | quantized, case.config)
    with pytest.raises(
        SetupError, match=r"(?s)lm_head.weight.*stores as floats.*found: gptq.*Leave quantize"
    ):
        load(stored, quantize_output_head="fp8")
    with pytest.raises(SetupError, match=r"(?s)with an output head.*LlamaModel, which has none"):
        load(untied, cls=AutoModel, quantize_output_head="fp8")
    with pytest.raises(SetupError, match="modules_to_not_convert does not name"):
        load(untied, quantize_output_head="fp8", modules_to_not_convert=["lm_head"])
    with pytest.raises(SetupError, match="quantize_output_head='fp4' is not valid"):
        HfqConfig(quantize_output_head="fp4")
    weight[5, 7] = float("nan")
    broken = tiny_models.write_model(tmp_path / "broken", tensors | {"lm_head.weight": weight}, case.config)
    with pytest.raises(SetupError, match=r"(?s)a weight is not finite.*lm_head"):
        load(broken, quantize_output_head="int8")


def test_other_kinds_of_load_are_an_error():
    path = tiny_models.DATA / "tiny-llama"
    with pytest.raises(SetupError, match="does not combine quantize on load and quantize_output_head"):
        load(path, quantize_weights="fp8", quantize_output_head="fp8")
    with pytest.raises(SetupError, match=r"(?s)hfq\.fms\.load.*quantize_output_head='fp8'"):
        refuse_quantize_on_load(HfqConfig(quantize_output_head="fp8"), "hfq.fms.load")


@pytest.mark.parametrize("kind", ["ZeRO-3", "tensor parallelism"])
def test_several_ranks_are_an_error(kind, monkeypatch):
    monkeypatch.setattr(load_kinds, "is_zero3", lambda: kind == "ZeRO-3")
    monkeypatch.setattr(load_kinds, "tensor_parallel_size", lambda model: 1 + (kind != "ZeRO-3"))
    monkeypatch.setattr(load_kinds, "check_alone", lambda: None)
    with pytest.raises(SetupError, match=f"(?s)does not combine {kind} and quantize_output_head.*Leave out"):
        load_kinds.choose_loader(HfqConfig(quantize_output_head="fp8"), None)
