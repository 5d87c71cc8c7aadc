"""Tests that no text that users or developers read has a retired word or phrase."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest
from typer.main import get_command

import hfq
from hfq.cli.main import app

ROOT = Path(__file__).parents[2]

TERMS = {
    "homes?": "device or placement",
    "dialects?": "format or format variant",
    "lanes?": "copy stream",
    "rings?": "offload buffer",
    "slots?": "target module",
    "skeletons?": "meta model",
    "hollow": "headers-only",
    "backings?": "mmap, private, or shared memory",
    "arenas?": "private memory or offload buffer",
    "resting": "stored or offloaded",
    "streamers?": "offloader",
}
"""{retired word: its replacement}; in texts and in public names."""
PHRASES = {
    "at rest": "stored or offloaded",
    "(?:rests?|rested) (?:on|in) (?:disk|the disk|cpu|the cpu|memory|the host|a device|several)": "stored on",
    "(?:away|taken) parameters?": "offloaded parameter",
    "packed (?:linear|embedding|experts|module)s?": "quantized linear, embedding, experts, or module",
    "packed rows?": "flat buffer",
    "born sharded": "partitioned at creation",
    "calibration sets?": "calibration data",
    "stock transformers": "plain transformers",
    "(?:refus|reject|rais|skip|fail|unsupported|forbid)\\w* (?:[^.,;:]{1,20} )?by (?:its |their )?names?": "an error "
    "that names X",
    "(?:stands?|stood|standing|is|are|be|was|were) in (?:the|its|their) way": "prevents",
    "(?:take|takes|taking|taken|took) over": "the verb of the action",
    "anew": "again or regenerated",
    "beside": "next to, and, or in addition to",
    "wants": "requires",
    "alike": "identical or both",
    "for ever": "without end",
    "(?:deal|deals|dealing) out|dealt": "scatter or assign",
    "lend|lends|lending|lent": "onload",
    "somebody else's": "another program's or untrusted",
    "of so many": "of this many",
    "who(?:ever)? reads": "the reader",
    "whoever": "the user or the caller",
    "whatever": "any or every",
    "thus": "so",
    "correct (?:it|this value|this)": "the valid values or the command to run",
}
"""{phrase to delete: its replacement}; in texts."""
EXCEPTIONS = (
    ("home (?:folder|directory)s?", ".*", "the folder of a user"),
    ("simd lanes?", ".*", "an element of a SIMD register"),
    ("lanes?", "hfq/kernels/(?:cpp|cpu)/.*|docs/benchmarks/kernel_notes.md", "an element of a SIMD register"),
    ("per lane", "hfq/placement/estimate/.*", "a lane of PCI Express"),
    (
        "packed rows?",
        "hfq/kernels/cpp/.*|hfq/formats/quanto.py",
        "rows of bit-packed codes or of activations",
    ),
)
"""(allowed text, paths, other meaning). Code in backticks and addresses are allowed everywhere: names of
accelerate, DeepSpeed, and other upstream code are written in backticks.
"""

CODE = re.compile(r"``.+?``|`[^`]+`|\$\w+|https?://\S+|(?<=\])\([^)\s]*\)", re.DOTALL)
FENCE = re.compile(r"^( *)(```+|~~~+).*?^ *\2`*\s*?$|<!--.*?-->", re.DOTALL | re.MULTILINE)
ARGUMENT = re.compile(r"^ +\*{0,2}\w+(?: \([^)\n]*\))?:(?=\s)", re.MULTILINE)
CPP = re.compile(r'"(?:\\.|[^"\\\n])*"|(?P<comment>(?://[^\n]*\n?[ \t]*)+|/\*.*?\*/)', re.DOTALL)
Found = tuple[int, str, str]
"""Offset of a retired word in its text, the word, and its replacement."""


def as_pattern(words: str) -> re.Pattern:
    """Returns a pattern for words that may be split by the end of a line and the sign of a comment."""
    gap = r"(?:[ ]|[ ]*\n[ ]*(?:#:?|//|[*])?[ ]*)+"
    return re.compile(rf"(?<![\w-])(?:{words.replace(' ', gap)})(?![\w-])", re.IGNORECASE)


RETIRED = {as_pattern(old): new for old, new in {**TERMS, **PHRASES}.items()}
ALLOWED = [(as_pattern(words), re.compile(paths)) for words, paths, _ in EXCEPTIONS]


def retired_words(text: str, path: str) -> Iterator[Found]:
    """Yields the retired words and phrases of a text in a file."""
    text = CODE.sub(_blank, text)
    for words, paths in ALLOWED:
        if paths.fullmatch(path):
            text = words.sub(_blank, text)
    for pattern, new in RETIRED.items():
        for match in pattern.finditer(text):
            yield match.start(), " ".join(match[0].split()), new


def _blank(match: re.Match) -> str:
    return re.sub(r"[^\n]", "_", match[0])


def findings(path: Path, texts: Iterator[tuple[int, str]]) -> list[str]:
    """Returns `file:line: word` for the retired words in texts, each with the number of its first line."""
    name = path.relative_to(ROOT).as_posix()
    lines = sorted(
        (line + text.count("\n", 0, offset), word, new)
        for line, text in texts
        for offset, word, new in retired_words(text, name)
    )
    return [f"{name}:{line}: '{word}', say {new}" for line, word, new in lines]


def page_text(path: Path) -> Iterator[tuple[int, str]]:
    yield 1, FENCE.sub(_blank, path.read_text(encoding="utf-8"))


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the docstrings of a module without names of arguments, as they are in the file."""
    source = path.read_text(encoding="utf-8")
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and _is_text(node.value):
            text = FENCE.sub(_blank, "\n".join(lines[node.lineno - 1 : node.end_lineno]))
            yield node.lineno, ARGUMENT.sub(_blank, text)


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the comments of a module; consecutive lines are one comment."""
    first, last, text = 0, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield first, text
                first, text = token.start[0], ""
            last, text = token.start[0], f"{text}{token.string}\n"
    yield first, text


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the retired words of string literals that have a space and are no docstrings."""
    source = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    skipped = {
        id(part)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Expr) and _is_text(node.value)) or isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if not isinstance(part, ast.JoinedStr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if _is_text(part) else "{}" for part in node.values)
        elif _is_text(node) and id(node) not in skipped:
            text = node.value
        else:
            continue
        if " " in text.strip():
            own = lines[node.lineno - 1 : node.end_lineno]
            yield from _by_line(" ".join(text.split()), own, node.lineno)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _by_line(text: str, lines: list[str], first: int) -> Iterator[tuple[int, str]]:
    """Yields the retired words of a literal, each with its line: parts of a literal are on several lines."""
    at = 0
    for _, word, _ in sorted(retired_words(text, "")):
        start = word.split()[0]
        at = next((line for line in range(at, len(lines)) if start in lines[line]), at)
        yield first + at, word


def cpp_comments(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text(encoding="utf-8")
    for match in CPP.finditer(source):
        if match["comment"]:
            yield source.count("\n", 0, match.start()) + 1, match[0]


def files(*patterns: str) -> list:
    """Returns one parameter for each file, named after it."""
    paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    return [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in paths]


def is_page(path: Path) -> bool:
    """True if people write the page: a record of a benchmark has a JSON file of the same name."""
    return not path.with_suffix(".json").exists()


PAGES = [
    page
    for page in files("*.md", "docs/**/*.md", "configs/**/*.md", "examples/**/*.md")
    if is_page(page.values[0])
]
MODULES = files("hfq/**/*.py", "benchmarks/**/*.py", "examples/**/*.py", "docs/generate/*.py", "setup.py")


@pytest.mark.parametrize("page", PAGES)
def test_pages(page: Path) -> None:
    assert findings(page, page_text(page)) == []


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module: Path) -> None:
    assert findings(module, docstrings(module)) == []


@pytest.mark.parametrize("module", MODULES)
def test_comments(module: Path) -> None:
    assert findings(module, comments(module)) == []


@pytest.mark.parametrize("module", MODULES)
def test_messages_and_help(module: Path) -> None:
    assert findings(module, messages(module)) == []


@pytest.mark.parametrize("source", files("hfq/**/*.cpp", "hfq/**/*.h"))
def test_cpp_comments(source: Path) -> None:
    assert findings(source, cpp_comments(source)) == []


def public_names() -> Iterator[tuple[str, str]]:
    """Yields the public names of the library and of the command, each with its owner."""
    for name in hfq.__all__:
        yield "hfq", name
    for owner in (hfq.HfqConfig, hfq.Recipe):
        for name in signature(owner).parameters:
            yield owner.__name__, name
    for verb, command in get_command(app).commands.items():
        yield "hfq", verb
        for parameter in command.params:
            for name in (*parameter.opts, *parameter.secondary_opts):
                yield f"hfq {verb}", name


def test_public_names() -> None:
    names = [*public_names()]
    retired = re.compile("|".join(TERMS), re.IGNORECASE)
    assert len(names) > 100
    assert [
        (owner, name)
        for owner, name in names
        for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)
        if retired.fullmatch(word)
    ] == []


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def words(texts: Iterator[tuple[int, str]], path: str = "hfq/a.py") -> list[tuple[int, str]]:
    return sorted(
        (line + text.count("\n", 0, offset), word)
        for line, text in texts
        for offset, word, _ in retired_words(text, path)
    )


def test_words_are_found_in_every_kind_of_text(tmp_path: Path) -> None:
    page = write(tmp_path / "a.md", "A ring.\n\n```\na lane\n```\n`slot` at\nrest, [x](home.md) string\n")
    assert words(page_text(page)) == [(1, "ring"), (6, "at rest")]
    module = write(
        tmp_path / "a.py",
        '"""The\n    arena."""\nx = 1  # one\n# is in the\n# way\ny: int = 2\n"""A slot."""\n'
        'raise ValueError(\n    f"The {x} "\n    f"of {y} is made anew.")\nz = "home"\n',
    )
    assert words(docstrings(module)) == [(2, "arena"), (7, "slot")]
    assert words(comments(module)) == [(4, "is in the # way")]
    assert words(messages(module)) == [(10, "anew")]
    source = write(
        tmp_path / "a.h",
        '#include "ring.h"\n// The home folder takes\n// over a lane.\nint x;  /* hollow */\n',
    )
    assert words(cpp_comments(source)) == [(2, "takes // over"), (3, "lane"), (4, "hollow")]
    assert words(cpp_comments(source), "hfq/kernels/cpp/src/a.h") == [(2, "takes // over"), (4, "hollow")]
