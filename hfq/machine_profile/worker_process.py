"""Worker processes for measurements, which exchange one line of JSON per question."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from hfq.errors import SetupError

__all__ = ["Worker", "memory", "reset_peak", "serve"]

_FIELDS = {"VmHWM": "peak_rss", "VmRSS": "rss", "RssAnon": "anonymous"}


class Worker:
    """A new Python process that runs a module's `serve` until it is closed.

    Printed text is not part of the answers, so libraries may print. Use it as a context manager.

    Args:
        module: Module to run.
        options: Options that the module is started with, JSON-ready.
    """

    def __init__(self, module: str, **options: Any) -> None:
        self._module = module
        # closed in __exit__
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._log.close()

    def ask(self, question: str, **arguments: Any) -> dict:
        """Returns the worker's answer. An exception becomes {"error": "its type: its first line"}.

        Raises:
            SetupError: The worker has ended.
        """
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([question, arguments]) + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
            line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            self._log.seek(0)
            last = self._log.read().strip().rpartition("\n")[2]
            raise SetupError(
                f"The measuring process {self._module} ended without an answer.",
                expected=f"an answer to {question!r}",
                found=f"exit status {self._process.wait()}: {last}",
                fix="Check the line above. If memory ran out, measure a smaller model.",
            )
        return json.loads(line)


def serve(commands: Mapping[str, Callable[..., dict]]) -> None:
    """Answers questions from standard input until it ends. Only answers go to standard output."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            question, arguments = json.loads(line)
            try:
                answer = commands[question](**arguments)
            except Exception as error:  # measured libraries raise any type
                answer = {"error": _first_lines(error)}
            print(json.dumps(answer), file=answers, flush=True)


def memory() -> dict[str, int]:
    """Returns this process's memory, and the bytes that it has read from devices.

    Returns:
        Bytes by name: peak_rss, rss, anonymous, pss, device_read. Unknown values are absent.
    """
    found = {}
    for line in _lines("/proc/self/status"):
        key, _, value = line.partition(":")
        if key in _FIELDS:
            found[_FIELDS[key]] = int(value.split()[0]) * 1024
    for line in _lines("/proc/self/smaps_rollup"):
        if line.startswith("Pss:"):
            found["pss"] = int(line.split()[1]) * 1024
    for line in _lines("/proc/self/io"):
        if line.startswith("read_bytes:"):
            found["device_read"] = int(line.split()[1])
    return found


def reset_peak() -> None:
    """Resets the peak of the resident memory, if the system allows it."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as stream:
        stream.write("5")


def _first_lines(error: BaseException | None) -> str:
    """Returns the type and first line of an error and of its causes."""
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        error = error.__cause__
    return "; from ".join(texts)


def _lines(file: str) -> list[str]:
    try:
        with open(file, encoding="utf-8") as stream:
            return stream.readlines()
    except OSError:
        return []
