"""`hfq quantize`: what it prints, in text and JSON, what it passes on, and its errors."""

import json

import pytest
from typer.testing import CliRunner

from hfq import FormatError
from hfq.checkpoint import Checkpoint
from hfq.cli.main import app
from hfq.formats.configs.source_config import source_config
from tests.support import tiny_models

pytest.importorskip("optimum.gptq")
SOURCE = tiny_models.DATA / "tiny-llama"


def run(*arguments):
    return CliRunner().invoke(app, ["quantize", str(SOURCE), *map(str, arguments)])


def test_it_says_what_it_wrote_and_how_far_it_is(tmp_path):
    done = run(
        tmp_path / "out",
        "--method",
        "rtn",
        "--bits",
        "3",
        "--group-size",
        "32",
        "--no-sym",
        "--modules-to-not-convert",
        "o_proj",
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{tmp_path / 'out'}: 24 layers as gptq v2 int3 g32 asym, ")
    lines = done.stderr.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [f"[{n}/4]", f"model.layers.{n - 1}"] for n in range(1, 5)
    ]
    assert all("loss" in line and "s left" in line for line in lines)
    config = source_config(Checkpoint.open(tmp_path / "out"))
    assert (config["bits"], config["group_size"], config["sym"]) == (3, 32, False)
    assert len(config["dynamic"]) == 4


def test_gptq_is_the_default_and_takes_its_text_from_a_file(tmp_path):
    done = run(
        tmp_path / "out",
        "--desc-act",
        "--distill-steps",
        1,
        "--dataset",
        SOURCE / "held_out.txt",
        "--num-calibration-samples",
        2,
        "--max-seq-length",
        32,
        "--json",
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["path"] == str(tmp_path / "out")
    assert {layer["tokens"] for layer in report["layers"]} == {64}
    assert len(report["distilled"]) == 4
    assert source_config(Checkpoint.open(tmp_path / "out"))["desc_act"] is True


def test_errors_are_the_library_s(tmp_path):
    done = CliRunner().invoke(
        app, ["quantize", str(tiny_models.DATA / "tiny-llama-gptq"), str(tmp_path / "out"), "--method", "rtn"]
    )
    assert isinstance(done.exception, FormatError)
    assert not list(tmp_path.iterdir())
