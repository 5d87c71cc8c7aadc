"""Environment variables that enable hfq in a program, and the lines that it prints there.

`hfq launch` sets the variables. Launchers such as `accelerate launch` pass them on to their ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from hfq.errors import SetupError, printable

__all__ = ["CONFIG", "ENABLE", "RECORD", "is_enabled", "read_options", "record", "say"]

ENABLE = "HFQ_ENABLE"
"""Variable that enables hfq for every load in a process. Unset, empty, or 0 does not."""

CONFIG = "HFQ_CONFIG"
"""Variable with the options of these loads: a JSON file, or a JSON object."""

RECORD = "HFQ_LAUNCH_RECORD"
"""Variable with the file to which processes append their loads, for `hfq launch`."""


def is_enabled() -> bool:
    """Returns True if the environment enables hfq for every load in this process."""
    return os.environ.get(ENABLE, "0") not in ("", "0")


def read_options(given: str, source: str = CONFIG) -> dict[str, Any]:
    """Returns the options of a JSON file, or of a JSON object.

    Args:
        given: Path of the file, or the object as text. Empty text is an empty object.
        source: Variable or option that `given` comes from, for messages.

    Raises:
        SetupError: The file cannot be read, or is not a JSON object.
    """
    if not given:
        return {}
    is_object = given.lstrip().startswith("{")
    file = None if is_object else given
    try:
        if file is not None:
            with open(file, encoding="utf-8") as opened:
                given = opened.read()
        options = json.loads(given)
    except (OSError, ValueError, RecursionError) as error:
        cannot = "cannot be read" if isinstance(error, OSError) else "are not valid JSON"
        raise SetupError(
            f"The options in {source} {cannot}.",
            file=file,
            expected='a JSON file, or an object such as {"device_map": "disk"}',
            found=error,
            fix=f"Pass a file or an object of this form in {source}.",
        ) from error
    if not isinstance(options, dict):
        raise SetupError(
            f"The options in {source} are not a JSON object.",
            file=file,
            expected='an object such as {"device_map": "disk"}',
            found=repr(options)[:80],
            fix="Write the options as one object.",
        )
    return options


def say(line: str) -> None:
    """Prints one line about a load on standard error, in the first rank only."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError, ValueError):  # the program may have closed it
            sys.stderr.write(f"hfq: {printable(line)}\n")
            sys.stderr.flush()


def record(line: str) -> None:
    """Appends a line to the record of `hfq launch`, if there is one.

    The file is not created: on another node, and after the end of `hfq launch`, there is none.
    """
    file = os.environ.get(RECORD)
    if file:
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, f"{line}\n".encode())
            finally:
                os.close(descriptor)
