"""Tests that no load runs code of a checkpoint, or asks to, unless the caller trusts it."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils
from typer.testing import CliRunner

import hfq
from hfq import HfqConfig, Recipe, SetupError
from hfq.cli.main import app
from hfq.loading.custom_code import load_tokenizer
from tests.support import tiny_models

SOURCE = tiny_models.DATA / "tiny-llama"
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}


@pytest.fixture(autouse=True)
def _answers_yes(monkeypatch, tmp_path):
    """Someone who answers yes to every question, and an empty cache for custom code."""
    monkeypatch.setattr("builtins.input", lambda *arguments: "y")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture(params=["model", "tokenizer"])
def checkpoint(request, tmp_path):
    """A checkpoint whose model or tokenizer is its own code."""
    folder = shutil.copytree(SOURCE, tmp_path / request.param)
    (folder / "own.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    if request.param == "model":
        change(folder / "config.json", model_type="own", auto_map=MAP)
    else:
        auto_map = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
        change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=auto_map)
    return folder


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def run(verb, checkpoint, out, *options):
    """Runs a verb for someone who answers yes to every question; returns the exit status and the text."""
    text = checkpoint / "held_out.txt"
    calibration = ["--dataset", text, "--num-calibration-samples", 1, "--max-seq-length", 32]
    arguments = {
        "quantize": [checkpoint, out, "--group-size", 64, *calibration],
        "evaluate": [checkpoint, "--text", text],
        "compare": [checkpoint, checkpoint, "--text", text],
    }[verb]
    done = CliRunner().invoke(app, [verb, *map(str, arguments), *options], input="y\n" * 9)
    return done.exit_code, f"{done.output}\n{done.exception}"


@pytest.mark.parametrize("verb", ["quantize", "evaluate", "compare"])
def test_verbs_refuse_it(verb, checkpoint, tmp_path):
    status, told = run(verb, checkpoint, tmp_path / "out")
    assert status != 0
    assert "requires custom code" in told
    assert "--trust-remote-code" in told
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["quantize", "evaluate", "compare"])
def test_verbs_run_it_for_those_who_trust_it(verb, checkpoint, tmp_path):
    status, told = run(verb, checkpoint, tmp_path / "out", "--trust-remote-code")
    assert status == 0, told
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("given", [{}, {"trust_remote_code": None}, {"trust_remote_code": False}], ids=str)
def test_python_functions_refuse_it(checkpoint, given, tmp_path):
    text = checkpoint / "held_out.txt"
    calls = [lambda: load_tokenizer(checkpoint)]
    if checkpoint.name == "model":
        calls = [
            lambda: AutoModelForCausalLM.from_pretrained(
                checkpoint, quantization_config=HfqConfig(), device_map={"": "disk"}, **given
            ),
            lambda: hfq.pretrained_config(checkpoint, **given),
            lambda: hfq.quantize(checkpoint, Recipe("rtn", group_size=64), tmp_path / "out"),
        ]
    for call in [*calls, lambda: hfq.evaluate([checkpoint], text)]:
        with pytest.raises(SetupError, match="requires custom code"):
            call()
    assert not (tmp_path / "ran").exists()


def test_token_ids_need_no_tokenizer(tmp_path):
    folder = shutil.copytree(SOURCE, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text("[]")
    tokens = [torch.arange(32)[None]]
    report = hfq.quantize(folder, Recipe("gptq", group_size=64), tmp_path / "out", tokens, 1, 32)
    assert len(report.layers) == 28
