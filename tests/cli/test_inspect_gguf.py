"""The verbs on the path of a GGUF file."""

import json

import pytest
from typer.testing import CliRunner

from hfq import FormatError
from hfq.cli.main import app
from tests.support.gguf_models import write_random_llama


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_random_llama(tmp_path_factory.mktemp("gguf"), "Q4_K") / "model.gguf"


def run(*arguments, code=0):
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_inspect_names_the_type_of_the_blocks(file):
    found = json.loads(run("inspect", file, "--json").stdout)
    assert (found["path"], found["formats"]) == (str(file), {"gguf Q4_K": 16})
    assert found["bits_per_quantized_weight"] == 4.5
    assert found["nbytes"] == file.stat().st_size
    assert found["alignment"].keys() <= {"32", "64", "256", "4096"}


def test_a_plan_counts_the_blocks_as_they_are_stored(file):
    found = json.loads(run("plan", file, "--cpu", "1GB", "--json").stdout)
    weights = 2 * (64 * 256 + 2 * 128 * 256 + 2 * 256 * 256 + 3 * 512 * 256)
    assert sum(entry["quantized_nbytes"] for entry in found["modules"]) == weights * 9 // 16
    assert found["model"]["formats"] == "gguf Q4_K"


def test_a_model_is_the_same_as_itself(file):
    assert "the same model" in run("compare", file, file.parent).stdout


@pytest.mark.parametrize("verb", [("reshard",), ("quantize", "--method", "rtn")])
def test_verbs_that_write_safetensors_name_the_file(file, tmp_path, verb):
    done = CliRunner().invoke(app, [verb[0], str(file), str(tmp_path / "out"), *verb[1:]])
    assert isinstance(done.exception, FormatError)
    assert "does not support GGUF files" in done.exception.message
    assert not (tmp_path / "out").exists()
