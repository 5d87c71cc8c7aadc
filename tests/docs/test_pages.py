"""The documentation: made pages are what their sources say, and what pages name is there. Their code:
test_blocks.py.
"""

import re
from pathlib import Path

import pytest
from generate import measured
from generate.__main__ import PAGES, WITH_TABLES

import hfq
from hfq.cli.main import app
from hfq.formats.base import FORMATS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


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


def test_the_readme_counts_the_format_variants():
    count = sum(len(each.variants) for each in FORMATS.values())
    assert f"({count} format variants and GGUF)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_commands_that_pages_name_exist():
    verbs = {command.name for command in app.registered_commands} | {
        group.name for group in app.registered_groups
    }
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in (
        ROOT / "README.md",
        *(page for page in DOCS.glob("*/*.md") if page.parent.name != "benchmarks"),
    ):
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"`hfq ([a-z][a-z-]*)[ `]", text)) <= verbs, page
        assert set(re.findall(r"`make ([a-z]+)`", text)) <= targets, page


def test_the_reference_has_everything_that_hfq_exports():
    text = (DOCS / "reference" / "python_api.md").read_text(encoding="utf-8")
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)", text, re.MULTILINE)}
    assert set(hfq.__all__) - shown == {"fms"}  # a module: its functions are shown
    assert {"load", "register"} <= shown


def test_every_example_and_every_verb_is_run_by_a_test():
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    tests += "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "distributed").glob("*.py")
    )
    assert [path.name for path in (ROOT / "examples").glob("*.py") if path.stem not in tests] == []
    verbs = [command.name for command in app.registered_commands] + [
        group.name for group in app.registered_groups
    ]
    assert [verb for verb in verbs if f'"{verb}"' not in tests] == []
