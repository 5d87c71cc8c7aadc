"""The documentation: made pages are what their sources say, code blocks run, printed commands print what the pages show."""

import re
from pathlib import Path

import pytest
import tiny_models
from generate import measured
from generate.__main__ import PAGES, WITH_TABLES
from typer.testing import CliRunner

import hfq
from hfq.cli.main import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUN = ("README.md", "docs/quickstart.md", "docs/how_it_works.md", "docs/offload.md")
"""The pages whose Python is run, one block after the other, with `path` a small GPTQ checkpoint."""


def blocks(page: str, language: str = "python") -> list[str]:
    """The fenced blocks of a page in one language; an opening fence and its closing one are matched in their order."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for found, text in fenced if found == language]


@pytest.mark.parametrize("page", PAGES)
def test_a_made_page_is_what_it_is_made_from(page):
    assert (ROOT / page).read_text(encoding="utf-8") == PAGES[page](), "run `make docs`"


@pytest.mark.parametrize("page", WITH_TABLES)
def test_numbers_of_a_page_are_those_of_the_benchmarks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count("made by `make docs` -->") > 0
    assert measured.filled(text) == text, "run `make docs`"


def test_a_table_of_the_benchmarks_is_read_by_its_title():
    rows = measured.read_table("stream", "Decoding")
    assert {row["mover"] for row in rows} == {"hfq", "accelerate"}
    assert {row["layers in"] for row in rows} == {"memory", "disk"}
    assert "cores" in measured.facts("load")["processor"]


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"path": str(tiny_models.DATA / "tiny-llama-gptq")}
    for block in blocks(page):
        exec(compile(block, page, "exec"), names)
    assert "model" in names


def test_the_first_screen_has_six_lines_of_code_and_two_commands():
    first, *_ = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")
    assert len(re.findall(r"^```", first, re.MULTILINE)) == 4
    code, commands = blocks("README.md")[0], blocks("README.md", "")[0]
    assert len([line for line in code.splitlines() if line]) == 6
    assert [line.split()[:2] for line in commands.splitlines()] == [["make", "demo"], ["make", "test"]]


def test_a_shown_command_prints_what_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = [block for page in RUN for block in blocks(page, "") if block.startswith("$ hfq ")]
    assert shown
    for block in shown:
        command, _, expected = block.partition("\n")
        done = CliRunner().invoke(app, command.split()[2:], env={"COLUMNS": "100", "XDG_CACHE_HOME": str(tmp_path)})
        assert done.exit_code == 0, done.exception
        assert done.stdout.startswith(expected)


def test_commands_that_pages_name_exist():
    verbs = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in (ROOT / "README.md", *(page for page in DOCS.glob("*.md") if page.stem != "troubleshooting")):
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"`hfq ([a-z]+)[ `]", text)) <= verbs, page
        assert set(re.findall(r"`make ([a-z]+)`", text)) <= targets, page


def test_the_reference_has_everything_that_hfq_exports():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)", text, re.MULTILINE)}
    assert set(hfq.__all__) - shown == {"fms"}  # a module: its functions are shown
    assert {"load", "register"} <= shown


def test_every_example_and_every_verb_is_run_by_a_test():
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    tests += "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "distributed").glob("*.py"))
    assert [path.name for path in (ROOT / "examples").glob("*.py") if path.stem not in tests] == []
    verbs = [command.name for command in app.registered_commands] + [group.name for group in app.registered_groups]
    assert [verb for verb in verbs if f'"{verb}"' not in tests] == []
