"""docs/explanation/how_it_works.md names functions and classes that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "explanation" / "how_it_works.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`([\w/]+\.py): ([\w.]+)`", TEXT)))
"""Each file, relative to the package, and the name in it."""


def defined(file: str) -> set[str]:
    """The functions and classes of a file, and the methods of its classes as `Class.method`."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    tree = ast.parse((ROOT / "hfq" / file).read_text(encoding="utf-8"))
    outer = [node for node in tree.body if isinstance(node, kinds)]
    inner = {f"{node.name}.{child.name}" for node in outer for child in node.body if isinstance(child, kinds)}
    return {node.name for node in outer} | inner


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_a_name_on_the_page_exists(file: str, name: str) -> None:
    assert name in defined(file)


def test_each_of_the_nine_steps_names_a_function() -> None:
    steps = re.split(r"^\*\*(\d)\. ", TEXT, flags=re.MULTILINE)[1:]
    assert steps[::2] == [str(number) for number in range(1, 10)]
    assert all(re.search(r"`[\w/]+\.py: [\w.]+`", step) for step in steps[1::2])


def test_every_file_on_the_page_is_named_with_a_function() -> None:
    assert re.findall(r"`[\w/]+\.py`", TEXT) == []
