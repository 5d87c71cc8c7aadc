"""Every error hfq raises on purpose: what failed, where, what was expected, what was found, and how to fix
it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = [
    "CheckpointError",
    "FormatError",
    "HfqError",
    "PlacementError",
    "SetupError",
    "nearest",
    "raise_first",
]

_MOST_PROBLEMS = 20


class HfqError(Exception):
    """Base of all of hfq's errors; its text is one fixed form, so that it can be read, searched and pasted.

    Args:
        message: The failure in one sentence.
        fix: What the user can do about it, most likely remedy first.
        file: The file it concerns.
        tensor: The tensor it concerns.
        rank: The rank it happened on, in a distributed run.
        expected: What hfq expected there.
        found: What it found.
        problems: Further findings, one line each, when several were collected before giving up.
    """

    def __init__(
        self,
        message: str,
        *,
        fix: str,
        file: object = None,
        tensor: str | None = None,
        rank: int | None = None,
        expected: object = None,
        found: object = None,
        problems: Sequence[str] = (),
    ) -> None:
        self.message = message
        self.fix = fix
        self.file = file
        self.tensor = tensor
        self.rank = rank
        self.expected = expected
        self.found = found
        self.problems = tuple(problems)
        super().__init__(self._text())

    def _text(self) -> str:
        fields = {"file": self.file, "tensor": self.tensor, "rank": self.rank}
        fields |= {"expected": self.expected, "found": self.found}
        lines = [self.message]
        lines += [f"  {label}: {value}" for label, value in fields.items() if value is not None]
        lines += [f"  - {problem}" for problem in self.problems[:_MOST_PROBLEMS]]
        if len(self.problems) > _MOST_PROBLEMS:
            lines.append(f"  - … and {len(self.problems) - _MOST_PROBLEMS} more")
        return "\n".join(map(_printable, [*lines, f"Fix: {self.fix}"]))

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self), self.__dict__)


class CheckpointError(HfqError):
    """The files of a checkpoint are missing, damaged, or not what they claim to be."""


class FormatError(HfqError):
    """The quantized tensors of a checkpoint do not form a dialect that hfq can read exactly."""


class PlacementError(HfqError):
    """The requested placement names what does not exist, leaves something out, or does not fit."""


class SetupError(HfqError):
    """An option, a package version or the environment stands in the way."""


def _printable(line: str) -> str:
    """The line with control characters escaped: a checkpoint's own text must not steer a terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)


def _rebuild(cls: type[HfqError], state: dict) -> HfqError:
    error = cls.__new__(cls)
    error.__dict__.update(state)
    Exception.__init__(error, error._text())
    return error


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the sentence ` Did you mean 'x'?` for a mistyped name, or "" if no name is close."""
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def raise_first(errors: Iterable[HfqError]) -> None:
    """Raises the first of some errors; returns if there is none.

    A table of problems is checked so, in one expression:

        raise_first(
            SetupError(f"… {problem} …", fix=fix) for problem, (is_so, fix) in problems.items() if is_so
        )

    Raises:
        HfqError: The first of `errors`.
    """
    for error in errors:
        raise error
