"""Tests of properties of the whole package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "hfq").rglob("*.py"))
CPP = sorted((ROOT / "hfq" / "kernels" / "cpp" / "src").iterdir())


def body_start(function):
    """Returns the line of the first statement after the signature and the docstring."""
    is_documented = ast.get_docstring(function) is not None and len(function.body) > 1
    return function.body[1 if is_documented else 0].lineno


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small_and_documented(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 500
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - body_start(node) <= 55, node.name
        if isinstance(node, ast.Assert):
            pytest.fail(f"line {node.lineno}: raise, do not assert")


@pytest.mark.parametrize("path", CPP, ids=lambda path: path.name)
def test_cpp_files_stay_within_the_limits_and_include_themselves_nowhere(path):
    lines = path.read_text(encoding="utf-8").split("\n")
    assert len(lines) <= 500
    assert max(map(len, lines)) <= 110
    assert not any("__FILE__" in line for line in lines)


def test_importing_hfq_imports_no_large_module():
    code = "import sys; before = set(sys.modules); import hfq; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    large = {"importlib.abc", "inspect", "logging", "multiprocessing", "numpy", "tempfile", "torch", "typer"}
    assert "hfq.errors" in done.stdout.split()
    assert not large & set(done.stdout.split())


@pytest.mark.parametrize("module", ["hfq.loading.state", "hfq.integrations.transformers.patches"])
def test_a_module_that_imports_transformers_can_be_the_first(module):
    """transformers runs the import hook, which imports the patches before the module is complete."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_every_error_says_how_to_fix_it():
    errors = {"CheckpointError", "FormatError", "PlacementError", "SetupError", "HfqError"}
    found = 0
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in errors:
                assert any(keyword.arg == "fix" for keyword in node.keywords), f"{path}:{node.lineno}"
                found += 1
    assert found > 30


def test_test_data_stays_within_five_megabytes():
    assert (
        sum(file.stat().st_size for file in (ROOT / "tests" / "data").rglob("*") if file.is_file())
        < 5_000_000
    )


def test_there_is_no_utils_or_helpers():
    assert not [path for path in SOURCES if path.stem in ("utils", "helpers", "common")]
