"""`hfq launch PROGRAM…`: any program with hfq enabled."""

from __future__ import annotations

from typing import Annotated

import typer

from hfq.cli.launch.load_options import with_load_options
from hfq.cli.launch.run_program import run_enabled

__all__ = ["launch"]


@with_load_options
def launch(
    program: Annotated[
        list[str], typer.Argument(metavar="PROGRAM...", help="Program or Python file, and its arguments.")
    ],
    options: str,
) -> None:
    """Runs a program in which every quantized checkpoint loads with hfq.

    Options of hfq come before the program. Nothing on disk is changed.
    """
    raise typer.Exit(run_enabled(program, options))
