"""Pages of notebooks: each notebook is run, and its page shows the outputs.

The notebooks of the repository have no outputs, so a page never shows those of another version of hfq.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

__all__ = ["as_markdown"]

ROOT = Path(__file__).parents[2]
_SECONDS = 300
"""Time limit of each cell, in seconds."""
_PICTURE = "image/png"
_TERMINAL = re.compile(r"\x1b\[[0-9;]*m")
_FOLDERS = re.compile(r"/tmp/tmp[a-z0-9_]{8}")


def as_markdown(path: Path) -> str:
    """Runs a notebook and returns its text, code, and outputs.

    Raises:
        CellExecutionError: A cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    folder = {"metadata": {"path": str(path.parent)}}
    quiet = ["--IPKernelApp.log_level=40"]  # errors alone
    client = NotebookClient(notebook, timeout=_SECONDS, resources=folder, extra_arguments=quiet)
    client.execute(env=environment)
    return "\n\n".join(part for cell in notebook.cells for part in _cell(cell))


def fenced(text: str, language: str, title: str = "") -> str:
    """Returns a block of code."""
    head = f'{language} title="{title}"' if title else language
    return f"````{head}\n{text.rstrip()}\n````\n"


def _cell(cell: nbformat.NotebookNode) -> list[str]:
    if cell.cell_type == "markdown":
        return [cell.source]
    texts, pictures = "", []
    for output in cell.outputs:
        data = output.get("data", {})
        if _PICTURE in data:
            address = f"data:{_PICTURE};base64,{data[_PICTURE].strip()}"
            pictures.append(f'<img alt="Output of the cell above" src="{address}">')
        elif output.get("name") != "stderr":  # warnings of libraries about this process
            texts += output.get("text") or data.get("text/plain", "")
    plain = _FOLDERS.sub("/tmp/work", _TERMINAL.sub("", texts)).replace(f"{ROOT}/", "")
    outputs = [fenced(plain, "text", "Output")] if plain.strip() else []
    return [fenced(cell.source, "python"), *outputs, *pictures]
