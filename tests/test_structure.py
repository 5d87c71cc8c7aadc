"""Tests of the package structure: no import cycles, one seam to accelerators, and no large folders."""

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "hfq").rglob("*.py"))
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
}


def imports_of(module: str) -> set[str]:
    """Returns the modules of hfq that a module imports, also within functions.

    Imports for type checking only are left out.
    """
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    typing = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    skipped = {id(inner) for node in typing for inner in ast.walk(node)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found & MODULES.keys() if name != module and not module.startswith(f"{name}.")}


def test_no_module_imports_itself_through_others():
    TopologicalSorter({module: imports_of(module) for module in MODULES}).prepare()  # raises CycleError


def test_only_the_folder_of_cuda_asks_torch_for_cuda():
    others = (path for path in FILES if "cuda" not in path.relative_to(ROOT).parts)
    assert [str(path) for path in others if "torch.cuda" in path.read_text(encoding="utf-8")] == []


def test_folders_and_file_names_can_be_searched():
    assert max(Counter(path.parent for path in FILES).values()) <= 25
    names = Counter(path.stem for path in FILES if path.stem not in ("__init__", "__main__"))
    assert sum(count > 2 for count in names.values()) <= 3
