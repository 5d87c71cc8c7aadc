"""The `hfq` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from hfq.cli import compare, convert, evaluate, formats, inspect, plot, profile_machine, quantize, reshard
from hfq.cli.bench.bench_command import EXAMPLE, bench
from hfq.cli.demo import command as demo
from hfq.cli.doctor import command as doctor
from hfq.cli.plan import command as plan
from hfq.errors import HfqError
from hfq.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="hfq",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Load any quantized checkpoint into any placement, or make one: packed everywhere, exact, nothing "
    "silent.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hfq {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
):
    pass


app.command("inspect")(inspect.inspect)
app.command("formats")(formats.formats)
app.command("demo")(demo.demo)
app.command("bench", epilog=EXAMPLE)(bench)
app.command("pack")(reshard.pack)
app.command("plan")(plan.plan)
app.command("convert")(convert.convert)
app.command("eval")(evaluate.evaluate)
app.command("verify")(compare.verify)
app.command("calibrate")(profile_machine.calibrate)
app.command("doctor")(doctor.doctor)
app.command("quantize")(quantize.quantize)
app.command("report")(plot.report)


def main(arguments: Sequence[str] | None = None, program: str | None = None) -> None:
    """Runs the command; an `HfqError` is printed without a traceback, and the exit status is 1.

    Args:
        arguments: The verb and its options; those of the process by default.
        program: What the command calls itself.
    """
    try:
        app(arguments, prog_name=program)
    except HfqError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
