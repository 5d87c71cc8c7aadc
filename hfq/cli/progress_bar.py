"""Progress bar on standard error, for commands that may take long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["ProgressBar", "progress_bar"]

_DELAY_SECONDS = 2.0


class ProgressBar:
    """Progress of a command: a bar on a terminal, or lines elsewhere.

    Args:
        bar: The bar, which starts later, or never if standard error is no terminal.
        total: Number of steps or bytes; None while it is unknown.
        has_lines: True to print a line for each text if standard error is no terminal.
    """

    def __init__(self, bar: Progress, total: float | None, has_lines: bool) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total)
        self._has_lines = has_lines and not bar.console.is_terminal
        self._text = ""

    def advance(self, amount: float = 1) -> None:
        """Adds finished steps or bytes."""
        self._bar.advance(self._task, amount)

    def update(self, text: str, done: float | None = None, total: float | None = None) -> None:
        """Shows the name of the current step, and the numbers of finished and of all steps.

        Args:
            text: Name of the step.
            done: Number of finished steps; None for the same as before.
            total: Number of all steps; None for the same as before.
        """
        self._bar.update(self._task, description=text, completed=done, total=total)
        if self._has_lines and text != self._text:
            console = self._bar.console
            console.print(f"[{done}/{total}] {text}", markup=False, highlight=False, soft_wrap=True)
        self._text = text


@contextmanager
def progress_bar(
    total: float | None = None, *, is_bytes: bool = False, has_lines: bool = False
) -> Iterator[ProgressBar]:
    """Shows a progress bar after two seconds, only on a terminal, until the `with` block ends.

    Args:
        total: Number of steps or bytes; None while it is unknown.
        is_bytes: True to count bytes, and to show their rate.
        has_lines: True to print a line for each step if standard error is no terminal.

    Yields:
        The bar.
    """
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    counts = (
        (progress.DownloadColumn(), progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
        if is_bytes
        else (progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
    )
    text = progress.TextColumn("{task.description}", markup=False)
    bar = progress.Progress(progress.BarColumn(), *counts, text, console=console, transient=True)
    timer = threading.Timer(_DELAY_SECONDS, bar.start)
    timer.daemon = True
    if console.is_terminal:
        timer.start()
    try:
        yield ProgressBar(bar, total, has_lines)
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        if bar.live.is_started:
            bar.stop()
