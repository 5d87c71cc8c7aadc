"""Errors that hfq raises, with their location, expected and found values, and a fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = [
    "CheckpointError",
    "FormatError",
    "HfqError",
    "PlacementError",
    "SetupError",
    "error_of_limit",
    "nearest",
    "printable",
    "raise_first",
]

_MOST_PROBLEMS = 20
_FREE_MEMORY = (
    "Free memory, or put more of the model on disk. If a size in config.json is wrong, restore the file."
)
_RAISE_MEMORY = "Free memory, or raise the limit of the process, such as that of ulimit -v."
_LIMITS = {
    "Too many open files": "Close files, or raise the limit of open files with ulimit -n.",
    "can't start new thread": "End other processes, or raise their limit with ulimit -u.",
    "failed to map segment": _RAISE_MEMORY,
    "MemoryError": _FREE_MEMORY,
    "allocate memory": _FREE_MEMORY,
    "out of memory": _FREE_MEMORY,
}
"""The fix for each limit of a machine, by the text of its error in Python or a library."""


class HfqError(Exception):
    """Base class of all errors of hfq.

    The text of every error has the same layout, so that people can read, search, and paste it.

    Args:
        message: The failure in one sentence.
        fix: The remedy that is most likely to work, as one or two imperative sentences.
        file: The file that the error concerns.
        tensor: The tensor that the error concerns.
        rank: The rank that raised the error, in a distributed run.
        expected: The value that hfq expected.
        found: The value that hfq found.
        problems: Further findings, one line each. The text shows the first 20.
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
        return "\n".join(map(printable, [*lines, f"Fix: {self.fix}"]))

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self), self.__dict__)


class CheckpointError(HfqError):
    """Error for checkpoint files that are missing, damaged, or contradict their headers."""


class FormatError(HfqError):
    """Error for quantized tensors that do not form a format that hfq can read exactly."""


class PlacementError(HfqError):
    """Error for a placement that names unknown modules, omits modules, or does not fit."""


class SetupError(HfqError):
    """Error for an unusable option, package version, or environment."""


def printable(line: str) -> str:
    """Returns the line with control characters escaped.

    Text from a checkpoint must not send control sequences to a terminal.
    """
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


def error_of_limit(error: BaseException, file: object = None) -> SetupError | None:
    """Returns the error for a used-up limit of the machine, or None if another cause failed.

    Such limits are open files, threads, and memory.

    Args:
        error: The error that was caught.
        file: The file or checkpoint that it concerns.
    """
    causes, cause = "", error
    while cause is not None:
        causes += f"{type(cause).__name__}: {cause}\n"
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    for limit, fix in _LIMITS.items():
        if limit in causes:
            return SetupError(
                "A limit of this machine or process was reached.",
                file=file,
                found=f"{type(error).__name__}: {error}",
                fix=fix,
            )
    return None


def raise_first(errors: Iterable[HfqError]) -> None:
    """Raises the first error of an iterable, or returns if there is none.

    Callers use it to check a table of problems in one expression:

        raise_first(
            SetupError(f"… {problem} …", fix=fix) for problem, (is_so, fix) in problems.items() if is_so
        )

    Raises:
        HfqError: The first of `errors`.
    """
    for error in errors:
        raise error
