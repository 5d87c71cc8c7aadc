"""Asks every verb for its help, which must import no large module; prints the verbs."""

import contextlib
import io
import sys

import typer

LARGE = {
    "torch",
    "transformers",
    "numpy",
    "multiprocessing",
    "concurrent.futures",
    "asyncio",
    "logging",
    "rich",
}


def import_help_of_typer() -> None:
    """Imports what typer itself needs for a help page; old versions print it by rich."""
    probe = typer.Typer(add_completion=False, rich_markup_mode=None)
    probe.command()(lambda name="a default": None)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        probe(["--help"])


import_help_of_typer()
LARGE -= set(sys.modules)

from hfq.cli.main import app, main

verbs = [command.name for command in app.registered_commands]
for verb in [None, *verbs]:
    sys.argv = ["hfq", *([verb] if verb else []), "--help"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, verb
    assert not LARGE & set(sys.modules), (verb, LARGE & set(sys.modules))
print(*verbs)
