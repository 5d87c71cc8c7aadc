"""Asks every verb for its help, which must import no large module; prints the verbs."""

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
LARGE -= set(sys.modules)  # of the interpreter's own start, or of typer
if tuple(map(int, typer.__version__.split(".")[:2])) < (0, 20):
    LARGE -= {"rich", "logging"}  # old versions print help by rich

from hfq.cli.main import app, main

verbs = [command.name for command in app.registered_commands]
for verb in [None, *verbs]:
    sys.argv = ["hfq", *([verb] if verb else []), "--help"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, verb
    assert not LARGE & set(sys.modules), verb
print(*verbs)
