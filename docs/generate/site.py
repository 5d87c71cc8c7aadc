"""Hooks of MkDocs: they add the README, notebooks, and linked files of the repository as pages.

A link that works in the repository works on the site, and a broken link fails the build (`make site`).
"""

from __future__ import annotations

import ast
import logging
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from generate import notebooks, troubleshooting
from hfq.version import __version__

__all__ = ["on_config", "on_files", "on_page_content", "on_page_markdown"]

ROOT = Path(__file__).parents[2]
_FIRST, _DOCS, _OTHERS = "README.md", "docs", "repository"
_NOTEBOOKS = "examples/notebooks"
_ERRORS = "reference/errors.md"
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_PRE_OR_CODE = re.compile(r"<pre.*?</pre>|<code[^>]*>(.*?)</code>", re.DOTALL)
_BREAKABLE = re.compile(r"(?<![\w&;-])[\w.]*[-/][\w./-]*(?![^<]*>)")
_LONGEST = 40
"""Maximum length of an option's name; longer paths may break at the end of a line."""
_LOG = logging.getLogger("mkdocs.hooks")
_LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sets the version, and adds notebooks and measurements to the navigation."""
    config.copyright = f"hfq {__version__}, Apache-2.0"
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
    """Replaces links to files of the repository by links to their pages, and requires a title."""
    source = _source(page.file.src_uri)
    if not re.search(r"^# \S", markdown, re.MULTILINE):
        _LOG.warning("%s has no title", source)  # the navigation would show the name of the file

    def replaced(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        if not (ROOT / target).is_file():
            return link[0]  # MkDocs reports the broken link
        return f"]({posixpath.relpath(_uri(target), posixpath.dirname(page.file.src_uri) or '.')}{link[2] or ''})"

    return _LINK.sub(replaced, markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Marks names in inline code, so that `--max-model-len` does not break at its hyphens."""

    def marked(name: re.Match) -> str:
        return f'<span class="name">{name[0]}</span>' if len(name[0]) <= _LONGEST else name[0]

    def code(match: re.Match) -> str:
        return match[0] if match[1] is None else _BREAKABLE.sub(marked, match[0])

    return _PRE_OR_CODE.sub(code, html)


def _found(folder: str, pattern: str) -> list[str]:
    paths = sorted((ROOT / folder).glob(pattern), key=lambda path: path.stem)
    return [str(path.relative_to(ROOT)) for path in paths]


def _targets(path: str) -> Iterator[str]:
    """Yields the linked files of a page that are not in the folder of the documentation."""
    if path.endswith(".md"):
        for link in _LINK.finditer((ROOT / path).read_text(encoding="utf-8")):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1]))
            if (ROOT / target).is_file() and not target.startswith(f"{_DOCS}/"):
                yield target


def _uri(path: str) -> str:
    """Returns the page of a file of the repository."""
    if path == _FIRST:
        return "index.md"
    if path.startswith(f"{_DOCS}/"):
        return path.removeprefix(f"{_DOCS}/")
    return f"{_OTHERS}/{path}" if path.endswith(".md") else f"{_OTHERS}/{path}.md"


def _source(uri: str) -> str:
    """Returns the file of the repository that a page shows."""
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
        return notebooks.as_markdown(ROOT / path)
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"# {_title(path, text)}\n\nFile `{path}`\n\n{notebooks.fenced(text, language)}"


def _title(path: str, text: str) -> str:
    """Returns the first sentence of a program's docstring; other files have their path as title."""
    summary = ast.get_docstring(ast.parse(text)) if path.endswith(".py") else None
    return re.split(r"[.:](?:\s|$)", " ".join(summary.split()))[0] if summary else f"`{path}`"
