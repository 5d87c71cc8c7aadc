"""The progress bar: when it appears, what it counts, and lines where there is no terminal."""

import io
import threading

import pytest
from rich.console import Console

from hfq.cli import progress_bar


@pytest.fixture
def console(monkeypatch):
    """console(is_terminal) → the text that the bar writes."""

    def made(is_terminal):
        written = io.StringIO()
        found = Console(file=written, force_terminal=is_terminal, width=80)
        monkeypatch.setattr("rich.console.Console", lambda **_: found)
        return written

    return made


@pytest.mark.parametrize(("is_terminal", "delay"), [(True, 0.0), (True, 60.0), (False, 0.0)])
def test_a_bar_appears_after_a_while_on_a_terminal_alone(monkeypatch, console, is_terminal, delay):
    written = console(is_terminal)
    monkeypatch.setattr(progress_bar, "_DELAY_SECONDS", delay)
    with progress_bar.progress_bar(2) as bar:
        for name in ("loading", "decode"):
            bar.update(name)
            for thread in threading.enumerate():
                if delay == 0.0 and isinstance(thread, threading.Timer):
                    thread.join(5)
            bar.advance()
    shown = written.getvalue()
    assert ("decode" in shown) == ("2/2" in shown) == (is_terminal and delay == 0.0)


def test_bytes_are_counted_with_their_unit(monkeypatch, console):
    written = console(True)
    monkeypatch.setattr(progress_bar, "_DELAY_SECONDS", 0.0)
    with progress_bar.progress_bar(4_000_000, is_bytes=True) as bar:
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join(5)
        bar.advance(3_000_000)
    assert "3.0/4.0 MB" in written.getvalue()


def test_lines_take_the_place_of_the_bar_elsewhere(console):
    written = console(False)
    with progress_bar.progress_bar(has_lines=True) as bar:
        for done, name in enumerate(("a [red]", "a [red]", "b")):
            bar.update(name, done, 3)
    assert written.getvalue() == "[0/3] a [red]\n[2/3] b\n"
    written = console(True)
    with progress_bar.progress_bar(has_lines=True) as bar:
        bar.update("a", 0, 3)
    assert "[0/3]" not in written.getvalue()
