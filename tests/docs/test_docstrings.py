"""Tests of the form of docstrings in the package."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "hfq").rglob("*.py"))
OPENINGS = ("What", "Where", "Which", "How", "Whether")


@pytest.mark.parametrize("file", FILES)
def test_summaries_fit_on_one_line_of_90_characters(file):
    found = []
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            summary = text.partition("\n\n")[0]
            if len(summary) > 90 or "\n" in summary or summary.split(" ")[0] in OPENINGS:
                found.append(summary)
    assert found == []
