"""Hub ids as MODEL: verbs that read weights download them once into the Hub's cache."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from hfq.cli.main import app
from tests.support import fake_hub, tiny_models

GPTQ = tiny_models.DATA / "tiny-llama-gptq"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with the model `own/tiny`, whose revisions are main and v1."""
    model = tmp_path / "model"
    shutil.copytree(GPTQ, model)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    with fake_hub.running(fake_hub.FakeHub({"own/tiny": model}), monkeypatch) as found:
        yield found


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_evaluate_names_the_model_as_typed_and_downloads_it_once(hub, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text((tiny_models.DATA / "tiny-llama" / "held_out.txt").read_text(encoding="utf-8")[:600])
    arguments = ("evaluate", "own/tiny", "--text", text, "--max-seq-length", 32, "--json")
    done = run(*arguments, "--revision", "v1")
    assert done.exit_code == 0, (done.output, done.exception)
    assert [record["path"] for record in json.loads(done.stdout)["records"]] == ["own/tiny"]
    sent = hub.sent
    assert run(*arguments, "--revision", "v1").exit_code == 0
    assert hub.sent == sent


def test_compare_takes_revisions_of_both(hub):
    done = run("compare", "own/tiny", GPTQ, "--revision-a", "v1", "--no-logits", "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    report = json.loads(done.stdout)
    assert (report["first"], report["second"], report["equal"]) == ("own/tiny", str(GPTQ), True)
    done = run("compare", "own/tiny", GPTQ, "--revision-a", "v2", "--no-logits")
    assert done.exit_code == 2
    assert "The model on the Hub has no such revision." in done.stderr
    assert "found: 'v2'" in done.stderr


def test_a_model_that_the_hub_does_not_have_is_an_error(hub, tmp_path):
    done = run("reshard", "own/other", tmp_path / "new")
    assert done.exit_code == 1
    assert done.exception.message == "The model is neither a folder nor an accessible model on the Hub."
    assert not (tmp_path / "new").exists()
