"""Safe execution of the regular expressions of a checkpoint's config, which are untrusted."""

from __future__ import annotations

import math
import re

from hfq.errors import FormatError

__all__ = ["matches"]

_LONGEST = 1000
_MOST_STEPS = 50_000_000
_ATOMS = re.compile(r"\\.|\[\^?\]?[^]]*\]")
_GROUP_KINDS = re.compile(r"\(\?(?:[:=!>]|<[=!]|P<\w+>|[a-zA-Z-]+:)")
_INNERMOST = re.compile(r"\(([^()]*)\)([*+{]?)")


def matches(pattern: str, name: str, key: str) -> bool:
    """Returns True if a pattern of the config option `key` matches the start of a module's name.

    Three kinds of patterns can run for a very long time and are rejected: a choice within a repetition, a
    repetition within a repetition, and many repetitions in sequence.

    Raises:
        FormatError: The pattern is not a regular expression, or is rejected.
    """
    try:
        why = _danger(pattern, len(name))
        if why is None:
            return re.match(pattern, name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        why = f"a regular expression: {error}"
    raise FormatError(
        f"A pattern in {key} is not a regular expression that hfq can run safely. Nothing was loaded.",
        file="config.json",
        expected=why,
        found=repr(pattern)[:80],
        fix=f"Replace the pattern in {key} of config.json with module names or a simpler pattern.",
    )


def _danger(pattern: str, name_length: int) -> str | None:
    """Returns the requirement that a pattern violates, or None if it runs in short time."""
    if len(pattern) > _LONGEST:
        return f"at most {_LONGEST} letters"
    plain = _GROUP_KINDS.sub("(", _ATOMS.sub("c", pattern))
    repetitions = len(re.findall(r"[*+]|\{\d*,\d*\}", plain))
    if math.comb(name_length + repetitions, repetitions) > _MOST_STEPS:
        return f"fewer than {repetitions} repetitions for a name of {name_length} letters"
    while group := _INNERMOST.search(plain):
        if group[2] and re.search(r"[|*+?{]", group[1]):
            return "no choice and no repetition within a repetition"
        plain = plain[: group.start()] + group[1] + plain[group.end(1) + 1 :]
    return None
