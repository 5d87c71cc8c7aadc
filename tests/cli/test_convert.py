"""`hfq convert`: what it prints, in text and JSON, and its errors."""

import json

from typer.testing import CliRunner

from hfq.cli.main import app
from hfq.tables import as_size
from tests.support import tiny_models
from tests.support.gguf_models import make_model, write_model

GPTQ = tiny_models.DATA / "tiny-llama-gptq"


def run(*arguments):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def test_it_converts_and_says_what_it_wrote(tmp_path):
    done = run(GPTQ, tmp_path / "v2", "--to", "gptq_v2")
    assert done.exit_code == 0, done.output
    files = list((tmp_path / "v2").iterdir())
    nbytes = sum(file.stat().st_size for file in files)
    told = (
        f"{tmp_path / 'v2'}: 28 layers as gptq_v2, each read back bit-identical; {len(files)} files, "
        f"{as_size(nbytes)}\n"
    )
    assert done.stdout == told
    assert done.stderr == ""


def test_json_says_the_same(tmp_path):
    report = json.loads(run(GPTQ, tmp_path / "packed", "--to", "pack-quantized", "--json").stdout)
    files = list((tmp_path / "packed").iterdir())
    assert report == {
        "path": str(tmp_path / "packed"),
        "url": None,
        "to": "pack-quantized",
        "layers": 28,
        "files": len(files),
        "nbytes": sum(file.stat().st_size for file in files),
        "source_nbytes": (GPTQ / "model.safetensors").stat().st_size,
        "left_out": ["quantize_config.json"],
    }


def test_what_cannot_be_held_is_an_error(tmp_path):
    done = run(GPTQ, tmp_path / "fp8", "--to", "fp8")
    assert done.exit_code == 1
    assert "without loss" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_and_back(tmp_path):
    source = write_model(tmp_path / "source", "qwen3", make_model("qwen3"))
    done = run(source / "model.gguf", tmp_path / "packed", "--to", "pack-quantized")
    assert done.exit_code == 0, done.output
    assert "16 layers as pack-quantized, each read back bit-identical; 2 files" in done.stdout
    done = run(tmp_path / "packed", tmp_path / "back", "--to", "gguf", "--template", source / "model.gguf")
    assert done.exit_code == 0, done.output
    assert {file.name for file in (tmp_path / "back").iterdir()} == {"config.json", "model.gguf"}


def test_the_name_of_a_file_is_no_folder(tmp_path):
    done = run(GPTQ, tmp_path / "out.gguf", "--to", "gguf", "--template", GPTQ)
    assert done.exit_code == 1
    assert f"Fix: Pass {tmp_path / 'out'}." in str(done.exception)
