"""Regular expressions of Python that match in bounded time, without backtracking.

The bits of one integer are a set of positions in the text. Each part of a pattern maps the positions where it
may start to all positions where it may end, so that no position is visited twice. Lookarounds are supported;
back-references, conditions, and atomic groups are not, since they require backtracking.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Text", "TooManyStepsError", "UnsupportedError", "parse"]

_DEEPEST = 20
_ANCHORS = ("^", "$", r"\A", r"\Z", r"\b", r"\B")
_FLAGS = re.compile(r"\(\?([ims]+)\)")
_TOKEN = re.compile(
    r"(?P<open>\((?!\?)|\(\?(?:(?P<flags>[ims]+):|(?P<look><?[=!])|:|P<\w+>))"
    r"|(?P<close>\))"
    r"|(?P<choice>\|)"
    r"|(?P<repeat>[*+?]|\{(?!\})(?P<least>[0-9]*)(?P<range>,(?P<most>[0-9]*))?\})\??(?P<atomic>\+?)"
    r"|(?P<leaf>\\[AZbBdDsSwW]|\\[!-/:-@[-`{-~]|\[\^?\]?(?:\\[!-/:-@[-`bdDsSwW{-~]|(?![]\\])[ -~])*\]"
    r"|(?![()|*+?[\\])[ -~])",
    re.ASCII,
)


class UnsupportedError(ValueError):
    """Error for a construct that requires backtracking or that no module name requires."""


class TooManyStepsError(ValueError):
    """Error for a pattern whose nested repetitions exceed the limit of steps."""


class Text:
    """A text that patterns are matched with.

    Args:
        text: The text.
        most_steps: Limit on `steps`.

    Attributes:
        steps: Number of operations so far; each takes time proportional to the length of the text at most.
    """

    def __init__(self, text: str, most_steps: int) -> None:
        self.text, self.most_steps, self.steps = text, most_steps, 0
        self.everywhere = (2 << len(text)) - 1
        self._letters: dict[str, int] = {}
        for position, letter in enumerate(text):
            self._letters[letter] = self._letters.get(letter, 0) | 1 << position
        self._found: dict[object, int] = {}

    def positions_of_letter(self, leaf: _Leaf) -> int:
        """Returns the positions at which a leaf matches."""
        if leaf not in self._found:
            if leaf.is_anchor:
                at = (1 << i for i in range(len(self.text) + 1) if leaf.compiled.match(self.text, i))
            else:
                at = (bits for letter, bits in self._letters.items() if leaf.compiled.match(letter))
            self._found[leaf] = sum(at)
        return self._found[leaf]

    def positions_of_word(self, word: _Word) -> int:
        """Returns the positions at which a word begins."""
        if word not in self._found:
            at = self.everywhere
            for index, leaf in enumerate(word.leaves):
                at &= self.positions_of_letter(leaf) >> index
            self._found[word] = at
            self.steps += len(word.leaves)
        return self._found[word]

    def check_steps(self) -> None:
        """Raises an error if the limit is exceeded."""
        if self.steps > self.most_steps:
            raise TooManyStepsError(f"{self.most_steps} steps for one name")


class Node(Protocol):
    """A part of a pattern."""

    def ends(self, starts: int, text: Text) -> int:
        """Returns all positions where the part ends, if it may start at any of `starts`."""


@dataclass(frozen=True, eq=False)
class _Leaf:
    """A pattern of one letter, or an anchor."""

    source: str
    flags: str

    @functools.cached_property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(f"(?{self.flags}:{self.source})")

    @functools.cached_property
    def is_anchor(self) -> bool:
        return self.source in _ANCHORS

    def ends(self, starts: int, text: Text) -> int:
        text.steps += 1
        found = starts & text.positions_of_letter(self)
        return found if self.is_anchor else found << 1


@dataclass(frozen=True, eq=False)
class _Word:
    """Several letters in sequence."""

    leaves: tuple[_Leaf, ...]

    def ends(self, starts: int, text: Text) -> int:
        text.steps += 1
        return (starts & text.positions_of_word(self)) << len(self.leaves)


_leaf = functools.lru_cache(maxsize=4096)(_Leaf)
_word = functools.lru_cache(maxsize=4096)(_Word)


@dataclass(frozen=True)
class _Sequence:
    parts: Sequence[Node]

    @classmethod
    def of(cls, parts: Sequence[Node]) -> _Sequence:
        """Returns a sequence in which adjacent letters are words."""
        joined: list[Node] = []
        for are_letters, group in itertools.groupby(parts, _is_letter):
            run = tuple(group)
            joined += [_word(run)] if are_letters else run
        return cls(tuple(joined))

    def ends(self, starts: int, text: Text) -> int:
        text.steps += 1
        for part in self.parts:
            if not starts:
                break
            starts = part.ends(starts, text)
        return starts


@dataclass(frozen=True)
class _Choice:
    options: Sequence[Node]

    def ends(self, starts: int, text: Text) -> int:
        return functools.reduce(int.__or__, (option.ends(starts, text) for option in self.options))


@dataclass(frozen=True)
class _Repeat:
    part: Node
    least: int
    most: int | None

    def ends(self, starts: int, text: Text) -> int:
        for _ in range(self.least):
            text.check_steps()
            before, starts = starts, self.part.ends(starts, text)
            if starts == before:
                break
        if self.most is None and _is_letter(self.part):
            text.steps += 1
            letters = text.positions_of_letter(self.part)  # type: ignore[arg-type]
            # the carry of the addition runs through adjacent letters
            return starts | ((starts & letters) + letters) ^ letters
        reached = new = starts
        left = len(text.text) if self.most is None else self.most - self.least
        while new and left:
            text.check_steps()
            new = self.part.ends(new, text) & ~reached
            reached |= new
            left -= 1
        return reached


@dataclass(frozen=True)
class _Look:
    part: Node
    is_behind: bool
    is_negative: bool

    def ends(self, starts: int, text: Text) -> int:
        text.check_steps()
        if self.is_behind:
            found = starts & self.part.ends(text.everywhere, text)
        else:
            found = sum(start for start in _each(starts) if self.part.ends(start, text))
        return starts ^ found if self.is_negative else found


def _is_letter(node: Node) -> bool:
    return isinstance(node, _Leaf) and not node.is_anchor


def _each(positions: int) -> Iterator[int]:
    while positions:
        yield positions & -positions
        positions &= positions - 1


@dataclass
class _Group:
    """An open group while its pattern is read."""

    flags: str
    look: str | None = None
    options: list[list[Node]] = field(default_factory=lambda: [[]])

    def close(self) -> Node:
        options = [_Sequence.of(parts) for parts in self.options]
        node: Node = options[0] if len(options) == 1 else _Choice(tuple(options))
        return _Look(node, "<" in self.look, "!" in self.look) if self.look else node


def parse(pattern: str) -> Node:
    """Returns the parts of a pattern.

    Raises:
        re.error: It is not a regular expression.
        UnsupportedError: It has a construct that cannot be matched in bounded time.
    """
    opening = _FLAGS.match(pattern)
    tokens = list(_tokens(pattern, opening.end() if opening else 0))
    re.compile(pattern)  # from here on, groups are balanced, and each repetition has something to repeat
    groups = [_Group("".join(sorted(set(opening[1]))) if opening else "")]
    for token in tokens:
        group = groups[-1]
        if token["open"]:
            flags = "".join(sorted({*group.flags, *(token["flags"] or "")}))
            groups.append(_Group(flags, token["look"]))
        elif token["close"]:
            groups.pop()
            groups[-1].options[-1].append(group.close())
        elif token["choice"]:
            group.options.append([])
        elif token["repeat"]:
            group.options[-1].append(_Repeat(group.options[-1].pop(), *_bounds(token)))
        else:
            group.options[-1].append(_leaf(token["leaf"], group.flags))
        if len(groups) > _DEEPEST:
            raise UnsupportedError(f"at most {_DEEPEST} nested groups")
    return groups[-1].close()


def _tokens(pattern: str, position: int) -> Iterator[re.Match[str]]:
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None or token["atomic"]:
            raise UnsupportedError(f"a regular expression with a simpler construct at letter {position + 1}")
        yield token
        position = token.end()


def _bounds(token: re.Match[str]) -> tuple[int, int | None]:
    fixed = {"*": (0, None), "+": (1, None), "?": (0, 1)}
    if token["repeat"] in fixed:
        return fixed[token["repeat"]]
    least = int(token["least"] or 0)
    if not token["range"]:
        return least, least
    return least, int(token["most"]) if token["most"] else None
