"""Tests of the driver: standard checkpoints, complete, equal after a kill, readable by all."""

import hashlib
import json
import os
import signal

import pytest
import torch

import hfq
from hfq import Recipe
from hfq.checkpoint import Checkpoint
from hfq.formats import FORMATS
from hfq.formats.configs.source_config import source_config
from hfq.formats.gptq import Gptq
from tests.quantization.conftest import LENGTH, SAMPLES, SOURCE
from tests.support import programs, tiny_models
from tests.support.models import load, logits
from tests.support.tiny_models import digests


def files_of(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_the_output_is_a_gptq_checkpoint_that_says_how_it_was_made(gptq):
    folder, report, seen = gptq
    config = source_config(Checkpoint.open(folder))
    expected = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
    }
    assert expected.items() <= config.items()
    assert config["meta"]["quantizer"] == [f"hfq:{hfq.__version__}"]
    assert json.loads((folder / "quantize_config.json").read_text()) == config
    assert (folder / "tokenizer.json").read_bytes() == (SOURCE / "tokenizer.json").read_bytes()
    assert (folder / "generation_config.json").read_bytes() == (
        SOURCE / "generation_config.json"
    ).read_bytes()
    card = (folder / "README.md").read_text()
    assert card.startswith((SOURCE / "README.md").read_text().rstrip())
    assert "## Quantization with hfq" in card
    assert f"{SAMPLES} sequences of {LENGTH} tokens" in card
    assert report.nbytes == sum(info.nbytes for info in Checkpoint.open(folder).tensors.values())
    assert len(report.layers) == 28
    assert {layer.tokens for layer in report.layers} == {SAMPLES * LENGTH}
    assert [(entry.decoder_layer, entry.done) for entry in seen] == [
        (f"model.layers.{n}", n + 1) for n in range(4)
    ]
    assert all(0 < entry.loss < 1 for entry in seen)
    assert seen[0].eta_seconds > 0 == seen[-1].eta_seconds


def test_everything_else_is_as_it_was(gptq):
    found, before = digests(gptq[0]), digests(SOURCE)
    kept = {name: digest for name, digest in before.items() if "_proj" not in name}
    assert len(kept) == 10
    assert {name: found[name] for name in kept} == kept


def test_it_computes_the_same_in_every_placement_and_close_to_the_floats(gptq, tokens):
    batch = torch.stack(tokens[:2])
    resident = logits(load(gptq[0]), batch)
    assert torch.equal(logits(load(gptq[0], device_map={"": "disk"}), batch), resident)
    floats = logits(load(SOURCE), batch)
    agreement = (floats.argmax(-1) == resident.argmax(-1)).float().mean()
    assert agreement > 0.8


def test_every_layer_is_better_than_rounding_to_nearest(gptq, tokens, tmp_path):
    """Compares the first decoder layer, whose inputs are those of the float model."""
    nearest = hfq.quantize(SOURCE, Recipe("rtn", group_size=64), output_dir=tmp_path / "rtn")
    assert all(layer.method == "rtn" and layer.tokens is None for layer in nearest.layers)
    models = [load(path).model for path in (SOURCE, gptq[0], tmp_path / "rtn")]
    batch = torch.stack(tokens)
    with torch.no_grad():
        states = [model(input_ids=batch, output_hidden_states=True).hidden_states[1] for model in models]
    better, worse = [float((state - states[0]).square().mean()) for state in states[1:]]
    assert better < 0.75 * worse


def test_rounding_is_the_format_s_own(tmp_path):
    hfq.quantize(SOURCE, Recipe("rtn", bits=3, group_size=32, sym=False), output_dir=tmp_path / "rtn")
    stored, name = tiny_models.stored_tensors(tmp_path / "rtn"), "model.layers.1.mlp.down_proj"
    weight = tiny_models.stored_tensors(SOURCE)[f"{name}.weight"]
    expected = Gptq(3, 32, False, "stored", g_idx_length=2).quantize(weight)
    for local, tensor in expected.items():
        assert torch.equal(stored[f"{name}.{local}"], tensor)
    assert source_config(Checkpoint.open(tmp_path / "rtn"))["checkpoint_format"] == "gptq_v2"
    assert torch.isfinite(logits(load(tmp_path / "rtn"), torch.arange(8)[None])).all()


def test_fp8_is_written_as_transformers_writes_it(tmp_path, tokens):
    hfq.quantize(
        SOURCE, Recipe("fp8"), output_dir=tmp_path / "fp8", modules_to_not_convert=["model.layers.0.mlp"]
    )
    config = source_config(Checkpoint.open(tmp_path / "fp8"))
    assert config["quant_method"] == "fp8"
    assert config["weight_block_size"] == [128, 128]
    assert sorted(config["modules_to_not_convert"]) == [
        "lm_head",
        *(f"model.layers.0.mlp.{name}" for name in ("down_proj", "gate_proj", "up_proj")),
    ]
    found, reference = digests(tmp_path / "fp8"), digests(tiny_models.DATA / "tiny-llama-fp8")
    same = [name for name in reference if found.get(name) == reference[name]]
    assert len(same) == len(reference) - 6  # the three unquantized layers, by weight and scale
    assert {found[f"model.layers.0.mlp.{name}.weight"][0] for name in ("up_proj", "down_proj")} == {"BF16"}


def test_fp8_of_other_sizes_is_written_by_channel(tmp_path):
    source = tiny_models.write_model(tmp_path / "floats", tiny_models.model_tensors(FORMATS["dense"]()), None)
    hfq.quantize(source, Recipe("fp8"), output_dir=tmp_path / "fp8")
    checkpoint = Checkpoint.open(tmp_path / "fp8")
    config = source_config(checkpoint)
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "float-quantized")
    assert checkpoint.tensors[f"{tiny_models.FIRST}.weight_scale"].dtype == "BF16"
    assert checkpoint.tensors[f"{tiny_models.FIRST}.weight_scale"].shape == (128, 1)
    batch = torch.arange(12)[None]
    exact, found = logits(load(source), batch), logits(load(tmp_path / "fp8"), batch)
    assert (found - exact).norm() < 0.1 * exact.norm()


def test_after_a_kill_it_goes_on_and_gives_the_same_bytes(gptq, tokens, tmp_path):
    torch.save(torch.stack(tokens), tmp_path / "tokens.pt")
    target, begun = tmp_path / "gptq", tmp_path / ".gptq.quantizing"
    killed = programs.run("quantize_until_killed", SOURCE, target, tmp_path / "tokens.pt")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert not target.exists()
    shards = sorted(begun.glob("model-*.safetensors"))
    assert len(shards) == 3  # one outside the decoder layers, and two decoder layers
    with open(shards[2], "r+b") as stream:  # like a write that never reached the disk
        stream.seek(-4, os.SEEK_END)
        stream.write(b"torn")
    times = shards[1].stat().st_mtime_ns
    (begun / "model-00004-of-00005.safetensors").write_bytes(b"half")
    (begun / ".model-00004-of-00005.safetensors.x.tmp").write_bytes(b"half")
    recipe = Recipe("gptq", bits=4, group_size=64)
    with pytest.raises(hfq.SetupError, match="unfinished quantization"):
        hfq.quantize(SOURCE, Recipe("rtn"), output_dir=target)
    report = hfq.quantize(
        SOURCE,
        recipe,
        output_dir=target,
        dataset=tokens,
        num_calibration_samples=SAMPLES,
        max_seq_length=LENGTH,
    )
    assert report.resumed == 1
    assert files_of(target) == files_of(gptq[0])
    assert (target / shards[1].name).stat().st_mtime_ns == times
    assert not begun.exists()
    assert report.layers == gptq[1].layers
