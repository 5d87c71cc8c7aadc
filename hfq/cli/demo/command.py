"""`hfq demo`: runs a small model in three placements and compares logits, memory, and speed."""

from __future__ import annotations

import contextlib
import json
import signal
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfq.cli.fitting_table import FittingTable
from hfq.cli.progress_bar import ProgressBar, progress_bar
from hfq.errors import CheckpointError, SetupError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["demo"]

PLACEMENTS = ("resident", "half on disk", "all on disk")
_MEASURE = "hfq.cli.demo.measure"


def demo(
    folder: Annotated[
        Path, typer.Option(help="Folder with tiny-llama, tiny-llama-gptq, and tiny-llama-fp8.")
    ] = Path("tests/data"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Runs a GPTQ and an FP8 checkpoint in memory, half on disk, and all on disk."""
    paths = {name: folder / f"tiny-llama-{name}" for name in ("gptq", "fp8")}
    for path in (*paths.values(), folder / "tiny-llama"):
        if not path.is_dir():
            raise CheckpointError(
                "The demo's checkpoints are not here.",
                file=path,
                expected="a folder made by examples/",
                found="nothing",
                fix="Run hfq demo in a clone of the repository, or pass --folder.",
            )
    with progress_bar(1 + len(paths) * len(PLACEMENTS)) as bar:
        rows = _measured(folder, paths, as_json, bar)
    print(json.dumps({"measurements": rows}, indent=2)) if as_json else _print(rows)
    if not all(row.get("bit_equal", True) for row in rows):
        raise typer.Exit(1)


def _measured(folder: Path, paths: dict[str, Path], as_json: bool, bar: ProgressBar) -> list[dict]:
    """Returns the measurements of all placements, and prints the formats unless there is JSON."""
    from hfq.checkpoint import Checkpoint
    from hfq.cli.inspect import inspect_checkpoint

    def measured(path: Path, placement: str) -> dict:
        bar.update(f"{path.name}: {placement}")
        row = _in_a_process(path, folder / "tiny-llama" / "held_out.txt", placement)
        bar.advance()
        return row

    rows = []
    for name, path in paths.items():
        report = inspect_checkpoint(Checkpoint.open(path))
        if not as_json:
            variants = ", ".join(f"{count} × {variant}" for variant, count in report["formats"].items())
            print(
                f"{path}: {variants}, {report['bits_per_quantized_weight']} bits per quantized weight, "
                f"{report['nbytes']:,} bytes"
            )
        rows += [measured(path, placement) for placement in PLACEMENTS]
        exact = {row["logits_sha256"] for row in rows[-len(PLACEMENTS) :]}
        for row in rows[-len(PLACEMENTS) :]:
            row |= {"checkpoint": name, "bit_equal": len(exact) == 1}
    baseline = measured(folder / "tiny-llama", "plain transformers")
    return [*rows, baseline | {"checkpoint": "bf16, plain transformers"}]


def _in_a_process(path: Path, text: Path, placement: str) -> dict:
    """Runs each placement in a fork of a process with all imports, to measure its own memory."""
    import multiprocessing
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_MEASURE])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, path, text, placement))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process alone
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)
    process.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        found = "the process ended early"
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
    if not isinstance(found, dict):
        raise SetupError(
            f"The demo failed on {path} ({placement}).",
            expected="measurements",
            found=found,
            fix="Run `make test`, which tests this installation.",
        )
    return found


def _measure(sender: Connection, path: Path, text: Path, placement: str) -> None:
    """Sends the measurements of one placement, or the text of an error."""
    try:
        found = import_module(_MEASURE).measure(path, text, placement)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    with contextlib.suppress(BrokenPipeError):  # an interruption ended the reader
        sender.send(found)


def _print(rows: list[dict]) -> None:
    from hfq.cli.console import EscapingConsole

    table = FittingTable(
        "checkpoint",
        "placement",
        "file B",
        "resident B",
        "peak RSS growth",
        "perplexity",
        "tokens/s",
        "bit-identical logits",
        title="float32 activations on the CPU; each row in its own process",
    )
    for row in rows:
        equal = {True: "yes", False: "NO", None: "-"}[row.get("bit_equal")]
        table.add_row(
            row["checkpoint"],
            row["placement"],
            f"{row['file_nbytes']:,}",
            f"{row['resident_nbytes']:,}",
            f"{row['peak_rss_growth_nbytes']:,}",
            f"{row['perplexity']:.4f}",
            f"{row['tokens_per_second']:.1f}",
            equal,
        )
    console = EscapingConsole()
    console.print(table)
    for row in rows[:: len(PLACEMENTS)]:
        console.print(f"{row['checkpoint']}: {row['text']!r}")
