"""Errors of a wrong command line and of files, in the layout of hfq's other errors."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from typing import Any

from hfq.errors import HfqError, SetupError, error_of_limit, nearest

__all__ = ["explain_file_error", "explain_usage", "typed_option"]

_KINDS = {
    errno.ENOENT: ("a path that exists", "nothing"),
    errno.EEXIST: ("a folder, or nothing", "a file"),
    errno.ENOTDIR: ("a folder", "a file"),
    errno.EISDIR: ("a file", "a folder"),
}
"""{errno: what is expected at a path, and what is found}."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def explain_usage(error: Exception, arguments: Sequence[str]) -> HfqError | None:
    """Returns the error to show for a wrong command line, or None for an error of another kind.

    typer raises errors of click, or of its own copy of click, so that their classes are known by name.

    Args:
        error: The error that was caught.
        arguments: The command line after the program's name.
    """
    if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
        return None
    ctx: Any = getattr(error, "ctx", None)
    path = " ".join(["hfq", *arguments[:1]]) if ctx is None else ctx.command_path
    param = getattr(error, "param", None)
    advice = f"Run {path} -h, which ends with an example."
    text = error.format_message()
    if type(error).__name__ == "NoSuchOption":
        option = getattr(error, "option_name", "")
        known = [name for each in ctx.command.params for name in each.opts] if ctx is not None else []
        return SetupError(f"{path} has no option {option}.{nearest(option, known)}", fix=advice)
    if type(error).__name__ == "BadOptionUsage" and "requires" in text:
        return SetupError(f"{getattr(error, 'option_name', '')} has no value.", fix=advice)
    if type(error).__name__ == "MissingParameter" and param is not None:
        if param.param_type_name == "argument":
            return SetupError(f"{path} requires {param.metavar.rstrip('.')}.", fix=advice)
        return SetupError(
            f"{path} requires {param.opts[-1]}.", expected=param.help.rstrip("."), found="nothing", fix=advice
        )
    if type(error).__name__ == "BadParameter" and param is not None:
        option, value = typed_option(param.opts, arguments) or (param.opts[-1], "")
        valid = _values(text)
        fix = f"Pass {option} with such a value." if valid else advice
        return SetupError(f"{option} {value} is not valid.", expected=valid, found=value, fix=fix)
    extra = re.search(r"unexpected extra argument.*\((.*)\)", text)
    if extra is not None:
        return SetupError(f"{path} takes no argument {extra[1]}.", fix=advice)
    return SetupError(f"The command line is not valid: {text}", fix=advice)


def typed_option(names: Sequence[str], arguments: Sequence[str]) -> tuple[str, str] | None:
    """Returns an option and its value as typed, or None if it was not typed.

    Args:
        names: Names of the option, such as `-p` and `--n-prompt`.
        arguments: The command line.
    """
    for index, text in enumerate(arguments):
        name, equals, value = text.partition("=")
        if name in names and equals and text.startswith("--"):
            return name, value
        if text in names and index + 1 < len(arguments):
            return text, arguments[index + 1]
    return None


def explain_file_error(error: OSError) -> HfqError | None:
    """Returns the error for a file or folder that cannot be used; None for another cause."""
    if error.filename is None and error.errno in _FULL:
        return SetupError(
            "The output could not be written.",
            expected="free space where the output goes",
            found=error.strerror,
            fix="Free space, or redirect the output to another disk.",
        )
    limit = error_of_limit(error, error.filename)
    if limit is not None or error.filename is None:
        return limit
    expected, found = _KINDS.get(error.errno or 0, ("a path that hfq can use", error.strerror))
    return SetupError(
        "A file or folder cannot be used.",
        file=error.filename,
        expected=expected,
        found=found,
        fix="Pass another path, or change its permissions.",
    )


def _values(text: str) -> str | None:
    """Returns the valid values that a message of typer or click names, or None if it names none."""
    least = re.search(r"(?:equal to |>=)(-?[0-9]+)", text)
    if least is not None:
        return f"at least {least[1]}"
    nouns = {"integer": "an integer", "number": "a number", "float": "a number"}
    return next((noun for word, noun in nouns.items() if word in text), None)
