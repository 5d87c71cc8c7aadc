"""What MkDocs calls while it builds the site: the README is its first page, and files that pages link to are
pages, too.

So a link that works in the repository works on the site, and one that does not fails the build (`make site`).
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from generate import troubleshooting

__all__ = ["on_config", "on_files", "on_page_markdown"]

ROOT = Path(__file__).parents[2]
_FIRST, _DOCS, _OTHERS = "README.md", "docs", "repository"
_NOTEBOOKS = "examples/notebooks"
_ERRORS = "reference/errors.md"
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts notebooks, measurements and whatever page the file does not name into the navigation."""
    sections = {name: items for entry in config.nav for name, items in entry.items()}
    sections["Notebooks"] += [_uri(path) for path in _found(_NOTEBOOKS, "*.ipynb")]
    sections["Benchmarks"] += [_uri(path) for path in _found("docs/benchmarks", "*.md")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the README, the notebooks, and every file of the repository that a page links to."""
    waiting = [
        _FIRST,
        *_found(_NOTEBOOKS, "*.ipynb"),
        *(f"{_DOCS}/{file.src_uri}" for file in files.documentation_pages()),
    ]
    errors = troubleshooting.as_markdown()
    files.append(File.generated(config, _ERRORS, content=errors, inclusion=InclusionLevel.INCLUDED))
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(_uri(path)) is None:
            in_navigation = path == _FIRST or path.startswith(_NOTEBOOKS)
            level = InclusionLevel.INCLUDED if in_navigation else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, _uri(path), content=_as_page(path), inclusion=level))
        new = [target for target in _targets(path) if target not in seen]
        seen.update(new)
        waiting += new
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files of the repository into links to their pages."""
    source = _source(page.file.src_uri)

    def replaced(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        if not (ROOT / target).is_file():
            return link[0]  # MkDocs says that there is no such page
        return f"]({posixpath.relpath(_uri(target), posixpath.dirname(page.file.src_uri) or '.')}{link[2] or ''})"

    return _LINK.sub(replaced, markdown)


def _found(folder: str, pattern: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).glob(pattern))]


def _targets(path: str) -> Iterator[str]:
    """The files of the repository that a page links to and that are no pages of the site by themselves."""
    if path.endswith(".md"):
        for link in _LINK.finditer((ROOT / path).read_text(encoding="utf-8")):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))
            if (ROOT / target).is_file() and not target.startswith(f"{_DOCS}/"):
                yield target


def _uri(path: str) -> str:
    """The page of a file of the repository."""
    if path == _FIRST:
        return "index.md"
    if path.startswith(f"{_DOCS}/"):
        return path.removeprefix(f"{_DOCS}/")
    return f"{_OTHERS}/{path}" if path.endswith(".md") else f"{_OTHERS}/{path}.md"


def _source(uri: str) -> str:
    """The file of the repository that a page shows."""
    if uri == "index.md":
        return _FIRST
    if uri.startswith(f"{_OTHERS}/"):
        path = uri.removeprefix(f"{_OTHERS}/")
        return path if (ROOT / path).is_file() else path.removesuffix(".md")
    return f"{_DOCS}/{uri}"


def _as_page(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return "\n\n".join(map(_cell, json.loads(text)["cells"]))
    return f"# `{path}`\n\n{_fenced(text, _LANGUAGES.get(Path(path).suffix, 'text'))}"


def _cell(cell: dict) -> str:
    text = "".join(cell["source"])
    return text if cell["cell_type"] == "markdown" else _fenced(text, "python")


def _fenced(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````\n"
