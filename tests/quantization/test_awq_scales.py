"""Tests of AWQ: lower error than plain rounding, standard files, and equal bytes after a stop."""

import json
import math
import shutil

import pytest
import torch
from transformers import AutoTokenizer

import hfq
from hfq import Recipe, SetupError
from hfq.checkpoint import Checkpoint
from hfq.formats.awq import Awq
from hfq.formats.configs.source_config import source_config
from tests.quantization.conftest import LENGTH, SAMPLES, SOURCE
from tests.quantization.test_driver import files_of
from tests.quantization.test_driver_families import IDS, source  # noqa: F401
from tests.support import tiny_models
from tests.support.models import load, logits

AWQ = {"method": "awq", "bits": 3, "group_size": 64}
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


@pytest.fixture(scope="module")
def outliers(tmp_path_factory):
    """Trained model with four channels 32 times larger after each norm, compensated in the weights."""
    folder, tensors = tmp_path_factory.mktemp("outliers") / "floats", dict(tiny_models.stored_tensors(SOURCE))
    shutil.copytree(SOURCE, folder)
    (folder / "model.safetensors").unlink()
    channels = [5, 40, 77, 100]
    for layer in range(4):
        for norm, readers in READERS.items():
            tensors[f"model.layers.{layer}.{norm}.weight"][channels] *= 32
            for reader in readers:
                tensors[f"model.layers.{layer}.{reader}.weight"][:, channels] /= 32
    config = json.loads((folder / "config.json").read_text())
    tiny_models.write_model(folder, tensors, None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def awq(outliers, tmp_path_factory, tokens):
    """(folder, report) of a run stopped after two decoder layers, and of one that was not."""

    class Stopped(Exception):
        pass

    def stop(progress):
        if progress.done == 2:
            raise Stopped

    out, calibration = (
        tmp_path_factory.mktemp("awq"),
        {"dataset": tokens, "num_calibration_samples": SAMPLES, "max_seq_length": LENGTH},
    )
    with pytest.raises(Stopped):
        hfq.quantize(outliers, Recipe(**AWQ), output_dir=out / "stopped", on_progress=stop, **calibration)
    resumed = hfq.quantize(outliers, Recipe(**AWQ), output_dir=out / "stopped", **calibration)
    report = hfq.quantize(outliers, Recipe(**AWQ), output_dir=out / "awq", **calibration)
    assert (resumed.resumed, resumed.layers) == (2, report.layers)
    return out, report


def test_after_a_stop_it_gives_the_same_bytes(awq):
    assert files_of(awq[0] / "stopped") == files_of(awq[0] / "awq")


def test_it_is_better_than_rounding_with_the_same_grid(awq, outliers, text, tmp_path):
    nearest = tiny_models.stored_tensors(outliers)
    for name in [name for name in nearest if "_proj" in name]:
        rounding = Awq(group_size=64, num_bits=3)
        nearest[name] = rounding.dequantize(rounding.quantize(nearest[name]))
    shutil.copytree(outliers, tmp_path / "nearest")
    for file in (tmp_path / "nearest").glob("model*"):
        file.unlink()
    tiny_models.write_model(tmp_path / "nearest", nearest, None)
    (tmp_path / "nearest" / "config.json").write_text((outliers / "config.json").read_text())
    ids = torch.tensor(AutoTokenizer.from_pretrained(SOURCE)(text[-16000:])["input_ids"])
    windows = ids[: len(ids) // 128 * 128].view(-1, 128)
    floats, rounded, scaled = (
        perplexity(load(path), windows) for path in (outliers, tmp_path / "nearest", awq[0] / "awq")
    )
    print(f"perplexity: floats {floats:.3f}, rounded {rounded:.3f}, AWQ {scaled:.3f}")
    assert floats < scaled < rounded - 0.5 * (rounded - floats)


def test_its_files_are_standard_ones_that_compute_the_same_everywhere(awq, outliers, tokens):
    folder, report = awq[0] / "awq", awq[1]
    config = source_config(Checkpoint.open(folder))
    assert config.pop("meta") == {"quantizer": [f"hfq:{hfq.__version__}"]}
    expected = {"quant_method": "awq", "bits": 3, "group_size": 64, "zero_point": True, "version": "gemm"}
    assert config == {**expected, "modules_to_not_convert": ["lm_head"]}
    assert not (folder / "quantize_config.json").exists()
    assert [layer.name for layer in report.layers] == list(
        dict.fromkeys(layer.name for layer in report.layers)
    )
    assert {layer.method for layer in report.layers} == {"awq"}
    assert all(layer.exponent > 0.5 for layer in report.layers if layer.name.endswith(("q_proj", "up_proj")))
    found, before = Checkpoint.open(folder).tensors, Checkpoint.open(outliers).tensors
    norms = {name for name in before if "layers" in name and "norm" in name}
    assert all(str(found[name]) == str(before[name]) for name in norms)
    after, was = tiny_models.digests(folder), tiny_models.digests(outliers)
    assert {name for name in was if "_proj" not in name and after[name] != was[name]} == norms
    batch = torch.stack(tokens[:2])
    resident = logits(load(folder), batch)
    assert torch.equal(logits(load(folder, device_map={"": "disk"}), batch), resident)


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_other_blocks_are_scaled_where_that_is_possible(source, tmp_path):  # noqa: F811
    tokens = [
        torch.randint(0, 96, (40,), generator=torch.Generator().manual_seed(index)) for index in range(6)
    ]
    recipe = Recipe("awq", bits=8, group_size=32, distill_steps=2)
    report = hfq.quantize(
        source,
        recipe,
        output_dir=tmp_path / "awq",
        dataset=tokens,
        num_calibration_samples=6,
        max_seq_length=40,
    )
    with torch.no_grad():
        found, exact = load(tmp_path / "awq")(IDS).logits, load(source)(IDS).logits
    assert (found - exact).norm() < 0.02 * exact.norm()
    assert all(after <= before for before, after in report.distilled.values())
    plain = [layer.name for layer in report.layers if layer.exponent is None]
    card = (tmp_path / "awq" / "README.md").read_text()
    assert (
        f"Rounded without scaling, because no preceding module can absorb a scale: {', '.join(plain)}."
        in card
    )
    ends = {name.rpartition(".")[2] if "experts" in name else name.partition("h.")[2][2:] for name in plain}
    assert ends in (
        {"mlp.c_proj"},
        {"gate_proj", "up_proj"},
    )  # GELU; experts whose norm the router reads as well


@pytest.mark.parametrize("option", ["sym", "desc_act"])
def test_what_its_files_cannot_say_is_refused(option):
    with pytest.raises(SetupError, match=f"{option}"):
        Recipe(**{"method": "awq", option: True})


def perplexity(model, windows):
    with torch.no_grad():
        scores = model(windows).logits[:, :-1].log_softmax(-1)
    return math.exp(-scores.gather(2, windows[:, 1:, None]).mean())
