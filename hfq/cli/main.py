"""The `hfq` command."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup

from hfq.cli import (
    compare,
    convert,
    evaluate,
    formats,
    inspect,
    plot,
    profile_machine,
    quantize,
    reshard,
)
from hfq.cli.bench.bench_command import bench
from hfq.cli.demo import command as demo
from hfq.cli.doctor import command as doctor
from hfq.cli.launch import serving
from hfq.cli.launch.launch_command import launch
from hfq.cli.plan import command as plan
from hfq.cli.typed_options import as_typed
from hfq.cli.usage_error import explain_file_error, explain_usage, typed_option
from hfq.errors import HfqError, SetupError, error_of_limit, nearest
from hfq.version import __version__

__all__ = ["VERBS", "Verb", "app", "main"]

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 plus the number of SIGINT, as in a shell."""


@dataclass(frozen=True)
class Verb:
    """One verb of the command.

    Attributes:
        name: The verb.
        run: The function that carries it out. Its parameters are the options.
        help: One line of help.
        example: A command line that ends the help page.
        resume: What to do after an interruption, in one sentence.
        synonyms: Names that other tools give the verb; hfq suggests the verb for them.
        runs_program: True if all words after the first argument are those of a program.
    """

    name: str
    run: Callable[..., None]
    help: str
    example: str
    resume: str = "Run the same command again."
    synonyms: tuple[str, ...] = ()
    runs_program: bool = False


VERBS = (
    Verb(
        "inspect",
        inspect.inspect,
        "Show formats, bits per weight, and size of a checkpoint.",
        "hfq inspect Qwen/Qwen3-8B-AWQ",
        synonyms=("info", "show"),
    ),
    Verb(
        "plan",
        plan.plan,
        "Predict memory use and speed before loading a model.",
        "hfq plan Qwen/Qwen3-8B-AWQ --gpu 8GiB --cpu 16GiB",
        synonyms=("estimate", "predict"),
    ),
    Verb("formats", formats.formats, "List supported and unsupported formats.", "hfq formats"),
    Verb(
        "doctor",
        doctor.doctor,
        "Check this machine, a checkpoint, or a launcher config for problems.",
        "hfq doctor Qwen3-8B-AWQ --config deepspeed.json",
        synonyms=("check",),
    ),
    Verb(
        "profile-machine",
        profile_machine.profile_machine,
        "Measure this machine so that `plan` can predict speed.",
        "hfq profile-machine --folder /mnt/nvme",
        "Run the same command again; no profile was written.",
        synonyms=("calibrate",),
    ),
    Verb(
        "bench",
        bench,
        "Measure load time, memory, and tokens per second.",
        "hfq bench Qwen/Qwen3-8B-AWQ --device-map disk -p 128 -n 16 -t 1,2",
    ),
    Verb(
        "quantize",
        quantize.quantize,
        "Quantize a checkpoint and save it in a standard format.",
        "hfq quantize Qwen/Qwen3-8B Qwen3-8B-GPTQ --method gptq --bits 4 --dataset wikitext2",
        "Run the same command again: it continues after the last finished decoder layer.",
    ),
    Verb(
        "convert",
        convert.convert,
        "Change the format without changing any weight.",
        "hfq convert Qwen3-8B-GPTQ Qwen3-8B-GPTQ-v2 --to gptq_v2",
        "Run the same command again; OUT was not created.",
    ),
    Verb(
        "reshard",
        reshard.reshard,
        "Write one aligned shard per decoder layer for faster offloading.",
        "hfq reshard Qwen3-8B-AWQ Qwen3-8B-AWQ-aligned",
        "Run the same command again; OUT was not created.",
        synonyms=("pack",),
    ),
    Verb(
        "evaluate",
        evaluate.evaluate,
        "Measure perplexity and divergence from a reference.",
        "hfq evaluate Qwen3-8B-GPTQ Qwen3-8B-AWQ --reference Qwen/Qwen3-8B --text held_out.txt",
        synonyms=("perplexity",),
    ),
    Verb(
        "compare",
        compare.compare,
        "Check whether two checkpoints or placements are the same model.",
        "hfq compare Qwen3-8B-GPTQ Qwen3-8B-GPTQ-v2",
        synonyms=("diff", "verify"),
    ),
    Verb(
        "plot",
        plot.plot,
        "Draw charts from JSON results.",
        "hfq plot plan.json evaluation.json --html --output-dir charts",
        synonyms=("draw", "report"),
    ),
    Verb("demo", demo.demo, "Run a model that does not fit in memory.", "hfq demo"),
    Verb(
        "launch",
        launch,
        "Run any program with hfq enabled.",
        "hfq launch --device-map auto --max-memory cpu=8GiB python generate.py",
        runs_program=True,
    ),
    Verb(
        "chat",
        serving.chat,
        "Chat with a model.",
        "hfq chat --device-map auto --max-memory cpu=8GiB Qwen/Qwen3-8B-AWQ",
        synonyms=("run",),
        runs_program=True,
    ),
    Verb(
        "serve",
        serving.serve,
        "Serve an OpenAI-compatible API.",
        "hfq serve --device-map disk Qwen/Qwen3-8B-AWQ",
        runs_program=True,
    ),
)
"""Every verb, in the order of the help page."""


class _Group(TyperGroup):
    """The group of all verbs; errors and interruptions end it with a message and a status."""

    def make_context(self, info_name: Any, args: list[str], *rest: Any, **options: Any) -> Any:
        """Returns the context of a command line."""
        self._arguments = list(args)
        try:
            return super().make_context(info_name, args, *rest, obj=self._arguments, **options)
        except Exception as error:
            raise _ended(error, self._arguments) from error

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the verb of a command line, or suggests one for a name of another tool."""
        name, verbs = args[0], [verb.name for verb in VERBS]
        if name not in self.commands and not ctx.resilient_parsing:
            verb = next((verb.name for verb in VERBS if name in verb.synonyms), None)
            hint = nearest(name, verbs) if verb is None else f" Did you mean {verb!r}?"
            raise SetupError(
                f"hfq has no verb {name!r}.{hint}",
                fix="Run hfq -h, which describes the verbs.",
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb of a command line."""
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()  # an error at the end of Python would not have a message of hfq
            return result
        except HfqError as error:
            if ctx.invoked_subcommand is None:
                raise _ended(error, ()) from None
            raise as_typed(error, *self._options(ctx)) from error
        except KeyboardInterrupt:
            resume = {verb.name: verb.resume for verb in VERBS}.get(ctx.invoked_subcommand or "", Verb.resume)
            print(f"Interrupted. {resume}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except OSError as error:
            explained = None if error.errno == errno.EPIPE else explain_file_error(error)
            if explained is None:
                raise
            if error.filename is None:
                _drop_output()
            raise explained from error
        except Exception as error:
            raise error_of_limit(error) or _ended(error, self._arguments) from error

    def _options(self, ctx: Any) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
        """Returns {name in Python: option} of the verb, and {name: (option, value)} as typed."""
        options: dict[str, str] = {}
        typed: dict[str, tuple[str, str]] = {}
        for parameter in self.commands[ctx.invoked_subcommand].params:
            if parameter.param_type_name == "option" and parameter.name:
                options[parameter.name] = next(name for name in parameter.opts if name.startswith("--"))
                found = typed_option(parameter.opts, self._arguments)
                typed |= {} if found is None else {parameter.name: found}
        return options, typed


def _drop_output() -> None:
    """Drops the rest of stdout, which Python would otherwise write at its end."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


def _ended(error: Exception, arguments: Sequence[str]) -> Exception:
    """Prints the error of a wrong command line and returns its exit; other errors return."""
    explained = error if isinstance(error, HfqError) else explain_usage(error, arguments)
    if explained is None:
        return error
    print(f"{type(explained).__name__}: {explained}", file=sys.stderr)
    return typer.Exit(2)


app = typer.Typer(
    name="hfq",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run, quantize, and check quantized models that do not fit in memory.",
    epilog="\b\nExample:\n  hfq plan Qwen/Qwen3-8B-AWQ --cpu 8GiB",
)


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"hfq {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def _add(verb: Verb, name: str | None = None) -> None:
    add = app.command(
        name or verb.name,
        help=verb.help,
        short_help=verb.help,
        epilog=f"\b\nExample:\n  {verb.example}",
        hidden=name is not None,
        context_settings={"allow_interspersed_args": not verb.runs_program},
    )
    add(verb.run)


for _verb in VERBS:
    _add(_verb)
    if _verb.name == "doctor":
        _add(_verb, "env")  # the name that transformers uses for its own check of a machine


def main(arguments: Sequence[str] | None = None, program: str | None = None) -> None:
    """Runs the command; an `HfqError` prints without a traceback and exits with status 1.

    Args:
        arguments: The verb and its options; None for those of the process.
        program: Name of the command in help and messages.
    """
    try:
        app(arguments, prog_name=program)
    except HfqError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
