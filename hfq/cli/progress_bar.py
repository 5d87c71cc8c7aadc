"""Progress bar on standard error, for commands that may take long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]

_DELAY_SECONDS = 2.0


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Shows a progress bar after two seconds, only on a terminal, until the `with` block ends.

    Args:
        total: Number of steps.

    Yields:
        A function that completes the current step and names the next one.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("", total=total)
    timer = threading.Timer(_DELAY_SECONDS, bar.start)
    timer.daemon = True
    begun = False

    def advance(name: str) -> None:
        nonlocal begun
        bar.update(task, advance=int(begun), description=name)
        begun = True

    if console.is_terminal:
        timer.start()
    try:
        yield advance
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        if bar.live.is_started:
            bar.stop()
