"""`hfq evaluate` and `hfq compare`: tables, JSON, files, and exit statuses."""

import json

import pytest
from typer.testing import CliRunner

from hfq.cli.main import app
from tests.support import tiny_models

LLAMA, GPTQ, FP8 = (tiny_models.DATA / name for name in ("tiny-llama", "tiny-llama-gptq", "tiny-llama-fp8"))


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text((LLAMA / "held_out.txt").read_text(encoding="utf-8")[:1500], encoding="utf-8")
    return file


def test_evaluate_prints_json_and_writes_a_page_and_a_plot(text, tmp_path):
    done = run(
        "evaluate",
        GPTQ,
        "--text",
        text,
        "--reference",
        LLAMA,
        "--max-seq-length",
        32,
        "--json",
        "--output-dir",
        tmp_path,
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "evaluation.json").read_text())
    reference, gptq = report["records"]
    assert reference["is_reference"]
    assert gptq["kl_mean"] > 0
    page = (tmp_path / "evaluation.md").read_text()
    assert "| tiny-llama-gptq | gptq v1 int4 g128 sym | 6.528 | 4.329 | 869,056 |" in page
    assert "Targets" not in page
    assert (tmp_path / "evaluation.png").exists() == ("![" in page)
    assert "(reference)\n" in done.stderr


def test_evaluate_prints_a_table(text):
    done = run("evaluate", GPTQ, "--text", text, "--max-seq-length", 32)
    assert done.exit_code == 0, done.output
    assert "6.528" in done.stdout
    assert "perplexity" in done.stdout


def test_evaluate_of_a_text_that_is_not_there_is_an_error(tmp_path):
    done = run("evaluate", GPTQ, "--text", tmp_path / "none.txt")
    assert done.exit_code == 1
    assert "cannot be read" in str(done.exception)


def test_compare_of_two_placements_ends_with_0():
    done = run("compare", GPTQ, GPTQ, "--device-map-b", '{"": "cpu", "model.layers.2": "disk"}')
    assert done.exit_code == 0, done.output
    assert "the same model" in done.stdout
    assert "38 of 38 weights have the same bytes" in done.stdout
    assert "bit-identical" in done.stdout


def test_compare_of_two_models_ends_with_1(text):
    done = run("compare", LLAMA, GPTQ, "--text", text, "--json")
    assert done.exit_code == 1, done.output
    report = json.loads(done.stdout)
    assert not report["equal"]
    assert "28 weights quantized" in report["verdict"]
    assert len(report["differences"]) == 28
    table = run("compare", LLAMA, GPTQ, "--no-logits")
    assert table.exit_code == 1
    assert "28 differ: 28 quantized" in table.stdout


@pytest.mark.parametrize(
    "arguments", [("compare", GPTQ, "/nowhere"), ("compare", GPTQ, GPTQ, "--device-map-b", "dsik")]
)
def test_compare_of_what_cannot_be_compared_ends_with_2(arguments):
    done = run(*arguments)
    assert done.exit_code == 2
    assert "Fix:" in done.stderr


def test_an_output_that_cannot_be_written_is_found_before_the_evaluation(text, tmp_path, monkeypatch):
    monkeypatch.setattr("hfq.evaluation.evaluate.evaluate", lambda *_, **__: pytest.fail("it was evaluated"))
    (tmp_path / "evaluation.json").mkdir()
    done = run("evaluate", GPTQ, "--text", text, "--output-dir", tmp_path)
    assert "found: Is a directory" in str(done.exception)
