"""The regular expressions of a checkpoint's config, run with care: they are somebody else's."""

from __future__ import annotations

import re

from hfq.errors import FormatError

__all__ = ["matches"]

_LONGEST = 1000
_NESTED = re.compile(r"[*+}]\)*[*+{]|[*+}][^()]*\)+[*+{]")


def matches(pattern: str, name: str, key: str) -> bool:
    """Whether a pattern of the config option `key` matches the front of a module's name.

    A repetition within a repetition can take time without end, and is refused.

    Raises:
        FormatError: The pattern is no regular expression, is too long, or nests repetitions.
    """
    why = None
    if len(pattern) > _LONGEST:
        why = f"at most {_LONGEST} letters"
    elif _NESTED.search(re.sub(r"\\.|\[[^]]*\]|\?", "c", pattern)):
        why = "no repetition within a repetition"
    else:
        try:
            return re.match(pattern, name) is not None
        except (re.error, RecursionError, OverflowError) as error:
            why = f"not a regular expression: {error}"
    raise FormatError(
        f"A pattern in {key} is not a regular expression that hfq runs; nothing was loaded.", file="config.json", expected=why,
        found=repr(pattern)[:80], fix=f"correct {key} in config.json",
    )  # fmt: skip
