"""Tests that test files mirror the package.

tests/X/test_Y*.py tests hfq/X/Y.py, or the folder hfq/X/Y.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [
    path for path in (ROOT / "tests").rglob("*") if (ROOT / "hfq" / path.relative_to(ROOT / "tests")).is_dir()
]
SUBJECTS = {
    "cli/test_command": "what all verbs have in common",
    "cli/test_optimum": "the same verbs under optimum-cli",
    "cli/test_wrong_inputs": "messages of all verbs for wrong options and files",
    "cli/test_vocabulary": "the names of verbs and options",
    "formats/test_goldens": "files that other projects' tools wrote, of every format",
    "kernels/cuda/test_machine_code": "what the compiler makes of the Triton kernels",
    "plots/test_browser": "the page in a real browser",
}
"""Files that test something else, with their subject."""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_test_file_has_a_module_that_it_is_about(folder):
    rooms = folder.relative_to(ROOT / "tests")
    modules = tuple(
        f"test_{path.stem}_" for path in (ROOT / "hfq" / rooms).iterdir() if path.suffix in ("", ".py")
    )
    tests = {path.stem for path in folder.glob("test_*.py") if str(rooms / path.stem) not in SUBJECTS}
    assert [name for name in tests if not f"{name}_".startswith(modules)] == []


def test_no_folder_of_tests_is_found_as_a_package_of_its_own(tmp_path):
    """transformers checks if `kernels` of PyPI is installed, and must not find tests/kernels."""
    assert PathFinder.find_spec("kernels", [path for path in sys.path if "-packages" not in path]) is None
    installed = tmp_path / "kernels" / "__init__.py"
    installed.parent.mkdir()
    installed.touch()
    assert PathFinder.find_spec("kernels", [*sys.path, str(tmp_path)]).origin.endswith("kernels/__init__.py")
