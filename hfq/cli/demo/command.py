"""`hfq demo`: runs a model at a memory limit that plain transformers exceeds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from hfq.cli.demo.limited_process import peak_memory, run_limited
from hfq.cli.fitting_table import FittingTable
from hfq.cli.progress_bar import ProgressBar, progress_bar
from hfq.errors import SetupError
from hfq.tables import as_size

__all__ = ["demo", "run_all"]

_PREFIX = "hfq-demo-"
_ENDING = signal.SIGTERM, signal.SIGHUP
_LEAST_SIZE = 100_000_000
_LIBRARIES = 100_000_000  # of a run: activations, threads, and pages of libraries
_NEEDED = 3, 500_000_000  # for plain transformers without a limit: sizes of the model, and bytes for all else

RUNS = (("plain transformers", True), ("hfq", True), ("plain transformers", False), ("hfq", False))
"""Tool of each run, and whether its memory is limited. The last one is the reference."""


def demo(
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of the model's files.")] = "1GB",
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder for the model, which is deleted afterwards (default: user cache)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Runs a random FP8 model with and without a memory limit, in plain transformers and in hfq."""
    from hfq.checkpoint.private_folder import user_cache
    from hfq.placement.estimate.hardware import parse_size

    nbytes = parse_size(size, "--size")
    if nbytes < _LEAST_SIZE:
        raise SetupError(
            "The demo's model is too small to show differences of memory.",
            expected=f"--size of at least {_LEAST_SIZE:,} bytes",
            found=size,
            fix="Pass --size 100MB or more, or no --size.",
        )
    _check_memory(nbytes)
    parent = folder or user_cache() / "demo"
    parent.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all runs compute on the CPU
    os.environ.pop("HFQ_ENABLE", None)  # plain transformers stays plain
    with _exits_on_signals(), _new_folder(parent, folder is None) as path, progress_bar(1 + len(RUNS)) as bar:
        rows = run_all(path, nbytes, bar, not as_json)
    print(json.dumps({"measurements": rows}, indent=2)) if as_json else _print(rows)
    if not all(row["bit_identical"] for row in rows if row["tool"] == "hfq"):
        raise typer.Exit(1)


def run_all(folder: Path, nbytes: int, bar: ProgressBar, is_shown: bool) -> list[dict]:
    """Makes the model, and returns the measurements of all runs.

    Args:
        folder: New folder for the model.
        nbytes: Size of its files, about.
        bar: Bar of all steps.
        is_shown: True to print what is made before it is made.
    """
    import shutil

    from hfq.machine_profile.probe_models import FP8, architecture_of_size, make_checkpoint

    architecture = architecture_of_size(nbytes, FP8)
    nbytes = sum(tensor.nbytes for tensor in architecture.tensors(FP8).values())
    if is_shown:
        free = shutil.disk_usage(folder).free
        print(
            f"Making a random Llama in FP8, {as_size(nbytes)} in {architecture.layers} layers, in {folder} "
            f"({as_size(free)} free). It is deleted afterwards.",
            flush=True,
        )
    bar.update("making the model")
    path = make_checkpoint(folder, architecture, FP8)
    bar.advance()
    rows = []
    for tool, is_limited in RUNS:
        bar.update(tool + (" at a memory limit" if is_limited else ""))
        rows.append(_run(path, nbytes, tool, is_limited))
        bar.advance()
    reference = rows[-1]["answer_sha256"]
    for row in rows:
        row["bit_identical"] = row["answer_sha256"] == reference if "answer_sha256" in row else None
    return rows


def _run(path: Path, nbytes: int, tool: str, is_limited: bool) -> dict:
    most = nbytes * 6 // 10
    limit = most + _LIBRARIES if is_limited else None
    arguments = (path, tool, most if is_limited and tool == "hfq" else None)
    outcome = run_limited("hfq.cli.demo.measure", arguments, limit, f"{tool}, limit {limit}")
    return {
        "tool": tool,
        "limit_nbytes": limit,
        "is_killed": outcome.found is None,
        "file_nbytes": nbytes,
        "imports_nbytes": outcome.imports_nbytes,
        "peak_nbytes": outcome.peak_nbytes,
        **(outcome.found or {}),
    }


@contextlib.contextmanager
def _exits_on_signals() -> Iterator[None]:
    """Makes SIGTERM, and the SIGHUP of a closed terminal, exit, so that the model is deleted."""
    handled = [each for each in _ENDING if signal.getsignal(each) is signal.SIG_DFL]
    for each in handled:
        signal.signal(each, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for each in handled:
            signal.signal(each, signal.SIG_DFL)


@contextlib.contextmanager
def _new_folder(parent: Path, is_cache: bool) -> Iterator[Path]:
    """Yields a new folder, which is deleted afterwards.

    In the user cache, this deletes folders that killed commands left, unless another command runs.
    """
    import fcntl
    import shutil

    running = os.open(parent, os.O_RDONLY)
    try:
        if is_cache:
            with contextlib.suppress(OSError):  # another command runs, or there are no locks
                fcntl.flock(running, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for left in parent.glob(f"{_PREFIX}*"):
                    shutil.rmtree(left, ignore_errors=True)
        with contextlib.suppress(OSError):
            fcntl.flock(running, fcntl.LOCK_SH)
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent) as temporary:
            yield Path(temporary)
    finally:
        os.close(running)


def _check_memory(nbytes: int) -> None:
    from hfq.checkpoint.memory_limit import available_memory

    if not peak_memory(os.getpid()):
        raise SetupError(
            "The demo cannot measure memory here.",
            file="/proc/self/status",
            expected="a line VmHWM, as Linux has it",
            found="none",
            fix="Mount /proc, or run the demo outside of a sandbox that replaces the kernel.",
        )
    times, fixed = _NEEDED
    free, needed = available_memory(), nbytes * times + fixed
    if free is not None and free < needed:
        smaller = (free - fixed) // (times * 1_000_000) - 10
        fits = smaller * 1_000_000 >= _LEAST_SIZE
        raise SetupError(
            "This machine has too little free memory for the demo's largest run.",
            expected=f"{needed:,} bytes, for plain transformers without a limit",
            found=f"{free:,} bytes",
            fix=f"Pass --size {smaller}MB, or free memory." if fits else "Free memory.",
        )


def _print(rows: list[dict]) -> None:
    from hfq.cli.console import EscapingConsole

    table = FittingTable(
        "run",
        "memory limit",
        "peak memory",
        "weights on disk",
        "tokens/s",
        "bit-identical to the last row",
        title=f"Memory beyond the {as_size(rows[0]['imports_nbytes'])} of Python and its libraries",
    )
    for row in rows:
        limit = "none" if row["limit_nbytes"] is None else as_size(row["limit_nbytes"])
        peak = as_size(row["peak_nbytes"])
        if row["is_killed"]:
            table.add_row(row["tool"], limit, f"killed at {peak}", "-", "-", "-")
            continue
        equal = "yes" if row["bit_identical"] else "no"
        weights = as_size(row["disk_nbytes"])
        table.add_row(row["tool"], limit, peak, weights, f"{row['tokens_per_second']:.2f}", equal)
    console = EscapingConsole()
    console.print(table)
    console.print("Plain transformers dequantizes FP8 to bfloat16 on a CPU; hfq keeps it in FP8.")
