"""Tests of the import hook: it registers hfq in any import order, and changes no other load."""

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hfq import import_hook
from tests.support import programs
from tests.support.zero_launch import once

PACKAGE = Path(import_hook.__file__).parent
CHECK, PLAIN, GUARD, BOTH_SIDES = "registration", "stock_loads", "guard", "both_sides_of_a_fork"
"""Programs of tests/programs/import_hook."""
RUNS = {
    "alone": ("from transformers import AutoModelForCausalLM", (PLAIN,)),
    "hfq": ("import hfq", (CHECK,)),
    "a name of hfq": ("from hfq import HfqConfig", (CHECK,)),
    "a module of hfq": ("from hfq.loading.model_loader import ModelLoader", (CHECK,)),
    "hfq, a model": ("import hfq\nfrom transformers import LlamaForCausalLM", (CHECK,)),
    "hfq first": ("import hfq\nfrom transformers import AutoModelForCausalLM", (CHECK, PLAIN, GUARD)),
    "hfq after": ("from transformers import AutoModelForCausalLM\nimport hfq", (CHECK, PLAIN, GUARD)),
    "forked": ("import hfq\nfrom transformers import AutoModelForCausalLM", (BOTH_SIDES,)),
}
"""Runs by name: their imports, and the programs that run after them, each in one process."""


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> Callable[[str, str], str]:
    """said(run, program) → output of the program in that run.

    All runs are executed together, once.
    """

    def make() -> list[list]:
        runs = [
            (imports, [str(programs.path(f"import_hook/{name}")) for name in names])
            for imports, names in RUNS.values()
        ]
        done = programs.run("import_hook/fork_each", text=json.dumps(runs), timeout=900)
        assert done.returncode == 0, done.stderr[-2000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    results = dict(zip(RUNS, once(tmp_path_factory, "registration-order", make), strict=True))

    def said(name: str, program: str) -> str:
        found, error = results[name][RUNS[name][1].index(program)]
        assert not error, error
        return found

    return said


@pytest.mark.parametrize("name", [name for name, (_, names) in RUNS.items() if CHECK in names])
def test_every_order_of_imports_registers_once(said, name):
    assert said(name, CHECK) == ""


def test_importing_hfq_imports_neither_torch_nor_transformers():
    code = "import sys, hfq; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    done = programs.run_line(code)
    assert done.returncode == 0, done.stderr


def test_stock_loads_are_the_same_with_and_without_hfq(said):
    digests = [said(name, PLAIN).split() for name in ("alone", "hfq first", "hfq after")]
    assert len(set(digests[0])) == 2
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.parametrize("name", ["hfq first", "hfq after"])
def test_the_guard_stands_whichever_is_imported_first(said, name):
    assert said(name, GUARD).split() == ["CheckpointError", "SetupError"]


def test_both_sides_of_a_fork_after_the_import_load(said):
    assert said("forked", BOTH_SIDES) == ""


def definitions(file: Path) -> set[str]:
    """Yields the functions, classes, and methods of a source file."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return {
        node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


@pytest.mark.parametrize("library", import_hook._CALLBACKS)
def test_each_callback_exists_and_is_described(library):
    module, function = import_hook._CALLBACKS[library]
    file = PACKAGE.parent / Path(*module.split(".")).with_suffix(".py")
    assert function in {
        node.name
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert f"`{function}`" in import_hook.__doc__
    assert f"- `{function}` " in Path(import_hook.__file__).read_text(encoding="utf-8")


def test_the_docstring_names_what_exists():
    files = [PACKAGE / name for name in re.findall(r"[a-z0-9_/]+\.py", import_hook.__doc__)]
    known = set().union(*map(definitions, files), definitions(Path(import_hook.__file__)))
    known |= {function for _, function in import_hook._CALLBACKS.values()}
    named = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", import_hook.__doc__)}
    assert len(files) >= 5
    assert named - known == {"HfqConfig", "_CALLBACKS"}
