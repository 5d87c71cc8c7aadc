"""Runs the programs of tests/programs, each in a separate process.

So a signal, a blocked call, or a changed environment does not affect the tests. Every program can import hfq
and the tests.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def path(name: str) -> Path:
    """Returns the file of a program, which is named without `.py`."""
    return ROOT / "tests" / "programs" / f"{name}.py"


def command(name: str, *arguments: object) -> list[str]:
    """Returns the command that runs a program with these arguments."""
    return [sys.executable, str(path(name)), *map(str, arguments)]


def environment(**variables: str) -> dict[str, str]:
    """Returns the environment of a program: that of this process, and these variables."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **variables}


def run(
    name: str, *arguments: object, text: str = "", timeout: float = 240, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end.

    Args:
        name: The program.
        arguments: Its `sys.argv[1:]`.
        text: Its standard input.
        timeout: Seconds until it is killed.
        variables: Additional environment variables.
    """
    return _run(command(name, *arguments), text, timeout, variables)


def run_line(
    code: str, *arguments: object, timeout: float = 240, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program of one line; otherwise as `run`."""
    return _run([sys.executable, "-c", code, *map(str, arguments)], "", timeout, variables)


def start(name: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    """Starts a program that is written to and read from by lines."""
    return subprocess.Popen(
        command(name, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(**variables),
    )


def _run(
    words: list[str], text: str, timeout: float, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=environment(**variables),
    )
