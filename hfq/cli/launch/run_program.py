"""Start of a program with hfq enabled in all its Python processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hfq.errors import SetupError
from hfq.launch_environment import CONFIG, ENABLE, RECORD, record, say

__all__ = [
    "enabling_environment",
    "exit_status",
    "find_program",
    "report_record",
    "run_enabled",
    "run_program",
]

STARTUP = str(Path(__file__).parent / "startup")
"""Folder of the `sitecustomize` that imports hfq."""

_HANDED_ON = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}

_POLL_SECONDS = 0.5


def run_enabled(program: Sequence[str], options: str) -> int:
    """Runs a program with hfq enabled; at the end of the outermost, says what ran without hfq.

    Args:
        program: Program and arguments.
        options: The value of `HFQ_CONFIG`.

    Returns:
        The exit status of the program, or 128 + n if signal n ended it.

    Raises:
        SetupError: There is no such program, or it cannot be started.
    """
    command = find_program(program)
    with tempfile.NamedTemporaryFile("r", prefix="hfq-launch-", encoding="utf-8", errors="replace") as file:
        status = run_program(command, enabling_environment(os.environ, options, file.name))
        lines = file.read().splitlines()
    if os.path.exists(os.environ.get(RECORD, "")):  # inside another `hfq launch`, which reports all lines
        for line in lines:
            record(line)
    else:
        report_record(program[0], lines)
    return status


def find_program(program: Sequence[str]) -> list[str]:
    """Returns the command of a Python file, or of a program of PATH or of hfq's environment.

    Raises:
        SetupError: There is no such program.
    """
    name, *arguments = program
    if name.endswith(".py") and os.path.isfile(name):
        return [sys.executable, name, *arguments]
    found = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
    if found is None:
        raise SetupError(
            f"The program {name} was not found. Nothing was started.",
            expected="a command of PATH, the path of a program, or a Python file",
            found=f"{name}, which is not executable" if os.path.isfile(name) else name,
            fix="Install the program, or pass its path.",
        )
    return [found, *arguments]


def enabling_environment(given: Mapping[str, str], options: str, record_file: str) -> dict[str, str]:
    """Returns an environment that enables hfq.

    Args:
        given: The environment of this process.
        options: The value of `HFQ_CONFIG`; empty for none.
        record_file: The file to which processes append their loads.
    """
    path = [folder for folder in given.get("PYTHONPATH", "").split(os.pathsep) if folder != STARTUP]
    path = [] if path == [""] else path
    environment = {**given, ENABLE: "1", CONFIG: options, RECORD: record_file}
    environment["PYTHONPATH"] = os.pathsep.join([STARTUP, *path])
    return environment


def run_program(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a program to its end, and hands on signals that this process receives.

    A terminal sends Ctrl-C to all processes in the foreground, so such a signal is not sent again. A terminal
    that is closed sends SIGHUP only to the leader of its session, which this process may be.

    Returns:
        The exit status of the program, or 128 + n if signal n ended it.

    Raises:
        SetupError: The program cannot be started.
    """
    received = _HANDED_ON | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, received)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL  # ignored, it loses the status

    def restore() -> None:
        signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        process = subprocess.Popen(command, env=environment, preexec_fn=restore, close_fds=False)
        while process.poll() is None:
            found = signal.sigtimedwait(received, _POLL_SECONDS)
            if found is None or found.si_signo == signal.SIGCHLD:
                continue
            # a code above 0 is that of the terminal
            if found.si_code <= 0 or found.si_signo == signal.SIGHUP:
                process.send_signal(found.si_signo)
    except OSError as error:
        raise SetupError(
            f"The program {command[0]} cannot be started.",
            expected="an executable program",
            found=error,
            fix="Pass another program, or start this one with its interpreter, such as bash.",
        ) from error
    finally:
        restore()
    return exit_status(process.returncode)


def exit_status(returncode: int) -> int:
    """Returns the exit status for a return code of `subprocess`: 128 + n after signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def report_record(name: str, lines: Sequence[str]) -> None:
    """Prints which Pythons of a program ran without hfq, and why it loaded nothing with hfq.

    Args:
        name: The program.
        lines: The record of its processes.
    """
    without = [line.removeprefix("without ") for line in lines if line.startswith("without ")]
    for line in dict.fromkeys(without):
        python, _, error = line.partition(": ")
        fix = f"Make `import hfq` work there, or start {sys.executable}"
        say(f"{python} ran without hfq: {error}. Fix: {fix}.")
    if any(line.startswith("loaded ") for line in lines):
        return
    if "python" in lines:
        reason = f"{name} loaded no quantized checkpoint with transformers"
    elif without:
        reason = f"no Python of {name} imported hfq"
    else:
        reason = f"{name} runs no Python that reads PYTHONPATH; python -I, -E, and -S do not"
    say(f"nothing was loaded with hfq: {reason}.")
