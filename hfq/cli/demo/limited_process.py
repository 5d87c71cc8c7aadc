"""Processes that are killed when they take more memory than they may, without root."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfq.errors import SetupError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["Outcome", "peak_memory", "run_limited"]

_SAMPLE_SECONDS = 0.005
_LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""Most bytes of the path of a temporary folder for the socket of a forkserver."""


@dataclass(frozen=True)
class Outcome:
    """End of a process.

    Attributes:
        found: What the function returned; None if the process was killed at its limit.
        peak_nbytes: Most memory, beyond `imports_nbytes`.
        imports_nbytes: Memory that the imported modules took before.
    """

    found: Any
    peak_nbytes: int
    imports_nbytes: int


def run_limited(module: str, arguments: tuple, limit: int | None, what: str) -> Outcome:
    """Runs a module's `measure` in a fork of a process with all its imports.

    The peak is that of resident memory, mapped files included. This process reads it every 5 ms. Limits of
    the kernel do not fit: RLIMIT_AS and RLIMIT_DATA also count mappings that take no memory, and a control
    group requires root.

    Args:
        module: Name of the module. It and its imports take part of `imports_nbytes`.
        arguments: Arguments of `measure`.
        limit: Most bytes beyond the imports. At more, the process is killed. None sets no limit.
        what: Description of the run, for errors.

    Raises:
        SetupError: The function raised an error, or the process ended early.
    """
    import multiprocessing
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, module, arguments))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process alone
    try:
        with _short_temporary_folder():
            forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)
    process.start()
    sender.close()
    try:
        outcome = _watched(receiver, process.pid or 0, limit)
    except EOFError:
        outcome = Outcome("the process ended early", 0, 0)
    finally:
        process.kill()
        process.join()
    if outcome.found is not None and not isinstance(outcome.found, dict):
        raise SetupError(
            f"The demo failed: {what}.",
            expected="measurements",
            found=outcome.found,
            fix="Pass a smaller --size. If that fails, too, run hfq doctor.",
        )
    return outcome


@contextlib.contextmanager
def _short_temporary_folder() -> Iterator[None]:
    """Makes `/tmp` the temporary folder if the path of another is too long for a socket."""
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = before


def peak_memory(pid: int) -> int:
    """Returns the peak of a process's resident memory in bytes; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


def _watched(receiver: Connection, pid: int, limit: int | None) -> Outcome:
    """Returns the outcome of a process; without `found` as soon as it exceeds its limit."""
    imports, peak = receiver.recv(), 0
    while not receiver.poll(_SAMPLE_SECONDS):
        peak = max(peak, peak_memory(pid) - imports)
        if limit is not None and peak > limit:
            return Outcome(None, peak, imports)
    found, last = receiver.recv()
    peak = max(peak, last - imports)
    return Outcome(None if limit is not None and peak > limit else found, peak, imports)


def _run(sender: Connection, module: str, arguments: tuple) -> None:
    """Sends the memory of the imports, then the result, or the text of an error, with the peak."""
    with contextlib.suppress(BrokenPipeError):  # an interruption ended the reader
        sender.send(peak_memory(os.getppid()))
        try:
            found = import_module(module).measure(*arguments)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        sender.send((found, peak_memory(os.getpid())))
