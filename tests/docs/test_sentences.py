"""Tests of the length of sentences and lines on the pages."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS, COLUMNS = 30, 100
_OWN_WIDTH = {"benchmarks", "generate"}
READ_ONCE = ["README.md", "docs/tutorials/*.md", "docs/how_to/*.md"]
"""Pages whose sentences have at most `WORDS` words."""
WRAPPED = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md")))
    if not _OWN_WIDTH & set(path.relative_to(ROOT).parts)
]
"""Pages whose prose has at most `COLUMNS` characters per line."""


def prose_lines(text: str) -> list[str]:
    """Returns the lines of a page, with code, comments, tables, and headings emptied."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return ["" if re.match(r" *(\||#|!\[|:::)", line) else line for line in text.splitlines()]


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a page's prose; each list item starts a new one."""
    lines = "\n".join(prose_lines(text))
    for paragraph in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", lines):
        plain = re.sub(r"\]\([^)]*\)|\[|\]", " ", " ".join(paragraph.split()))
        plain = re.sub(r"`[^`]*`", "`code`", plain)
        for sentence in re.split(r"(?<=[.!?])[\"*)]* +(?=[A-Z`\"*(])", plain):
            if sentence.strip(" -*"):
                yield sentence.strip(" -")


def page_paths() -> list[Path]:
    return sorted(path for pattern in READ_ONCE for path in ROOT.glob(pattern))


@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in page_paths()])
def test_sentences_are_short(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [found for found in sentences(text) if len(re.findall(r"\w[\w'’.-]*", found)) > WORDS] == []


@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in WRAPPED])
def test_prose_is_wrapped(page: str) -> None:
    lines = prose_lines((ROOT / page).read_text(encoding="utf-8"))
    assert [line for line in lines if len(line) > COLUMNS and "](" not in line] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_sentences_are_split_as_people_read_them() -> None:
    text = "# A title\n\nOne two. `Three` four [five](six.md).\n\n- a b\n- c\n\n| not | prose |\n"
    assert list(sentences(text)) == ["One two.", "`code` four  five .", "a b", "c"]
