"""Safe execution of the regular expressions of a checkpoint's config, which are untrusted.

A pattern is matched without backtracking, in a limited number of steps. All patterns and modules of one
checkpoint share a second limit.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from contextvars import ContextVar

from hfq.errors import FormatError
from hfq.formats.configs.linear_regex import Node, Text, TooManyStepsError, UnsupportedError, parse

__all__ = ["limited_matching", "matches"]

_LONGEST = 1000
_MOST_STEPS = 100_000
_MOST_STEPS_OF_A_CHECKPOINT = 10_000_000
_STEPS_TO_PARSE_A_LETTER = 10
_MOST_CACHED = 1 << 14

_steps_left: ContextVar[list[int] | None] = ContextVar("_steps_left", default=None)


@contextlib.contextmanager
def limited_matching() -> Iterator[None]:
    """Limits the steps of all matches in this context together."""
    token = _steps_left.set([_MOST_STEPS_OF_A_CHECKPOINT])
    try:
        yield
    finally:
        _steps_left.reset(token)


def matches(pattern: str, name: str, key: str) -> bool:
    """Returns True if a pattern of the config option `key` matches the start of a module's name.

    Raises:
        FormatError: The pattern is not a regular expression, requires backtracking, or exceeds a limit of
            steps.
    """
    try:
        return _match(pattern, name)
    except UnsupportedError as error:
        expected = str(error)
    except TooManyStepsError as error:
        expected = f"at most {error}"
    except (re.error, RecursionError, OverflowError) as error:
        expected = f"a regular expression: {error}"
    raise FormatError(
        f"A pattern in {key} is not a regular expression that hfq can run safely. Nothing was loaded.",
        file="config.json",
        expected=expected,
        found=repr(pattern)[:80],
        fix=f"Replace the pattern in {key} of config.json with module names or a simpler pattern.",
    )


@functools.lru_cache(maxsize=4096)
def _match(pattern: str, name: str) -> bool:
    node, text = _parsed(pattern), _text(name)
    text.steps = 0
    found = bool(node.ends(1, text))
    _spend(text.steps)
    return found


def _spend(steps: int) -> None:
    left = _steps_left.get()
    if left is not None:
        left[0] -= steps
        if left[0] < 0:
            raise TooManyStepsError(f"{_MOST_STEPS_OF_A_CHECKPOINT} steps for all patterns and modules")


@functools.lru_cache(maxsize=1)
def _text(name: str) -> Text:
    return Text(name, _MOST_STEPS)


@functools.lru_cache(maxsize=_MOST_CACHED)
def _parsed(pattern: str) -> Node:
    if len(pattern) > _LONGEST:
        raise UnsupportedError(f"at most {_LONGEST} letters")
    _spend(len(pattern) * _STEPS_TO_PARSE_A_LETTER)
    return parse(pattern)
