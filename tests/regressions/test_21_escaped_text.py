"""Tests that no control character of a checkpoint or of a path reaches the terminal."""

import json

import pytest
from typer.testing import CliRunner

from hfq.cli.console import EscapingConsole, escaped
from hfq.cli.fitting_table import FittingTable
from hfq.cli.main import app
from tests.support.model_copies import copy_model, edit_config

ODD = "\x1b]0;owned\x07\x1b[31m\u202eabc\u2066\x9b\r"
SHOWN = "\\x1b]0;owned\\x07\\x1b[31m\\u202eabc\\u2066\\x9b\\r"


def shown_by(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "4000"})
    return result.stdout + result.stderr


def is_printable(text):
    return text.replace("\n", "").isprintable()


@pytest.fixture
def odd(tmp_path):
    """Returns a checkpoint with an odd path and an odd method of quantization."""
    folder = copy_model("gptq", tmp_path)
    (folder / "quantize_config.json").unlink(missing_ok=True)
    edit_config(folder, {"quant_method": f"gptq{ODD}"})
    return folder.rename(tmp_path / f"model{ODD}")


@pytest.mark.parametrize("verb", [["inspect"], ["inspect", "--kernels"], ["doctor"]], ids=" ".join)
def test_a_checkpoint_is_shown_without_control_characters(odd, verb):
    text = shown_by(verb[0], odd, *verb[1:])
    assert is_printable(text)
    assert SHOWN in text or verb == ["doctor"]  # which does not show the path


def test_a_plan_is_shown_without_control_characters(tmp_path):
    folder = copy_model("gptq", tmp_path).rename(tmp_path / f"model{ODD}")
    text = shown_by("plan", folder, "--cpu", "8MB", "--max-model-len", "64")
    assert is_printable(text)
    assert f"model{SHOWN}: LlamaForCausalLM" in text


def test_json_is_plain_ascii(odd):
    result = CliRunner().invoke(app, ["inspect", str(odd), "--json"])
    assert result.stdout.isascii()
    assert json.loads(result.stdout)["quant_method"] == f"gptq{ODD}"


def test_lines_and_other_scripts_stay(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    console = EscapingConsole()
    console.print("a × é 日本\n\tb [bold] [red]x[/red]")
    table = FittingTable("name")
    table.add_row(ODD)
    console.print(table)
    text = capsys.readouterr().out
    assert text.startswith("a × é 日本\n")
    assert "[bold] [red]x[/red]" in text
    assert SHOWN in text
    assert escaped("a\tb\nc") == "a\tb\nc"
