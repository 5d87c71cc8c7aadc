"""`--push-to-hub`: the repository, its files, and its model card; on a fake Hub."""

import json
import shutil

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from hfq import CheckpointError, SetupError
from hfq.cli.main import app
from tests.support import fake_hub, tiny_models

CARD = """---
license: apache-2.0
base_model: other/base
tags:
- llama
---
# Tiny
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with models `own/tiny`, a float one, and `own/tiny-gptq`."""
    models = {}
    for name in ("tiny-llama", "tiny-llama-gptq"):
        models[f"own/{name}"] = tmp_path / "models" / name
        shutil.copytree(tiny_models.DATA / name, tmp_path / "models" / name)
        (tmp_path / "models" / name / "README.md").write_text(CARD)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    with fake_hub.running(fake_hub.FakeHub(models), monkeypatch) as found:
        yield found


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_a_quantized_model_names_its_source(hub, tmp_path):
    out = tmp_path / "new"
    done = run("quantize", "own/tiny-llama", out, "--method", "rtn", "--push-to-hub", "me/tiny", "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    assert json.loads(done.stdout)["url"] == f"{hub.url}/me/tiny"
    assert hub.created == {"me/tiny": False}
    files = hub.uploaded["me/tiny"]
    assert files == {file.name: file.read_bytes() for file in out.iterdir()}
    data = ModelCard(files["README.md"].decode()).data
    assert (data.base_model, data.base_model_relation) == ("own/tiny-llama", "quantized")
    assert (data.license, data.library_name, data.tags) == (
        "apache-2.0",
        "transformers",
        ["llama", "hfq", "gptq"],
    )
    assert "## Quantization with hfq" in files["README.md"].decode()


@pytest.mark.parametrize("verb", [("convert", "--to", "gptq_v2"), ("reshard",)], ids=lambda verb: verb[0])
def test_other_verbs_upload_too_and_keep_a_relation_that_the_card_names(hub, tmp_path, verb):
    named = CARD.replace("base_model: other/base", "base_model: other/base\nbase_model_relation: quantized")
    (hub.models["own/tiny-llama-gptq"] / "README.md").write_text(named)
    out = tmp_path / "new"
    done = run(verb[0], "own/tiny-llama-gptq", out, *verb[1:], "--push-to-hub", "me/tiny", "--private")
    assert done.exit_code == 0, (done.output, done.exception)
    assert done.stdout.endswith(f"uploaded to {hub.url}/me/tiny\n")
    assert hub.created == {"me/tiny": True}
    data = ModelCard(hub.uploaded["me/tiny"]["README.md"].decode()).data
    assert (data.base_model, data.base_model_relation) == ("other/base", "quantized")


def test_a_local_source_adds_no_base_model_and_says_so(hub, tmp_path):
    done = run("reshard", tiny_models.DATA / "tiny-llama-gptq", tmp_path / "new", "--push-to-hub", "me/tiny")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "MODEL is not a Hub id" in done.stderr
    data = ModelCard(hub.uploaded["me/tiny"]["README.md"].decode()).data
    assert data.base_model is None
    assert data.tags == ["hfq", "gptq"]


def test_a_missing_permission_is_found_before_anything_is_written(hub, tmp_path):
    hub.faults.add("read-only")
    done = run("reshard", tiny_models.DATA / "tiny-llama-gptq", tmp_path / "new", "--push-to-hub", "me/tiny")
    assert isinstance(done.exception, CheckpointError)
    assert done.exception.message == "The Hub denies the upload. Nothing was written."
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("options", [("--push-to-hub", "tiny"), ("--private",)])
def test_options_that_name_no_repository_are_errors(tmp_path, options):
    done = run("reshard", tiny_models.DATA / "tiny-llama-gptq", tmp_path / "new", *options)
    assert isinstance(done.exception, SetupError)
    assert "--push-to-hub" in done.exception.fix
    assert not (tmp_path / "new").exists()
