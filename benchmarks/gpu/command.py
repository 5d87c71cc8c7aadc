"""The command line of `python -m benchmarks.gpu`."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.report import Document
from benchmarks.gpu.runner import ROOT, Part, run_parts
from hfq.errors import HfqError, SetupError, nearest

__all__ = ["main"]

BUDGET = 540.0
SOURCES = (".py", ".cpp", ".h")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command. An HfqError is printed without a traceback, with exit status 1.

    The exit status of a dry run is 1 also if a part did not run to its end.

    Args:
        arguments: Options. None means those of the process.
    """
    try:
        failed = _run(_parser().parse_args(arguments))
    except HfqError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(bool(failed))


def _run(options: argparse.Namespace) -> list[str]:
    """Runs the parts, and returns the names of those that did not end, in a dry run."""
    only = _names(options.only, [part.name for part in PARTS])
    _refuse_interpreter(options.dry_run)
    device = "the simulated accelerator" if options.dry_run else _find_device()
    document = Document(options.out, device, options.dry_run, _fingerprint())

    def is_wanted(part: Part) -> bool:
        if only:
            return part.name in only
        if options.again or not document.is_finished(part.name):
            return True
        _say(f"== {part.number} {part.name}: finished earlier (--again repeats it)")
        return False

    run_parts(
        PARTS,
        document,
        options.out,
        budget=options.budget,
        is_wanted=is_wanted,
        say=_say,
    )
    _say(f"\nWritten: {options.out / 'gpu.json'}, {options.out / 'gpu.md'}")
    tried = only or [part.name for part in PARTS]
    return [name for name in tried if not document.is_finished(name)] if options.dry_run else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description="Measure hfq on one GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu.json and gpu.md")
    parser.add_argument("--only", default="", help="parts to run, also finished ones, separated by commas")
    parser.add_argument("--again", action="store_true", help="run finished parts, too")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all parts together")
    parser.add_argument(
        "--dry-run", action="store_true", help="small sizes on a simulated accelerator: no measurement"
    )
    return parser


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise SetupError(
                f"--only {name!r} is not a part.{nearest(name, known)}",
                expected=", ".join(known),
                found=name,
                fix="Pass names of parts, separated by commas.",
            )
    return names


def _refuse_interpreter(is_dry: bool) -> None:
    found = os.environ.get("TRITON_INTERPRET", "0")
    if not is_dry and found not in ("", "0"):
        raise SetupError(
            "Triton's interpreter is on, so that no kernel would run on the GPU. Nothing was run.",
            expected="TRITON_INTERPRET unset",
            found=f"TRITON_INTERPRET={found}",
            fix="Unset TRITON_INTERPRET.",
        )


def _fingerprint() -> str:
    """Returns a fingerprint of the code that is measured, and of that which measures."""
    found = hashlib.sha256()
    for folder in ("hfq", "benchmarks/gpu"):
        for file in sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES):
            found.update(file.read_bytes())
    return found.hexdigest()[:10]


def _find_device() -> str:
    """Returns the name of the GPU. Another process asks for it, so that this one holds no memory of it.

    Raises:
        SetupError: There is none.
    """
    code = "import torch; print(torch.get_device_module().get_device_name(0))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    name = done.stdout.strip()
    if done.returncode or not name:
        raise SetupError(
            "This machine has no GPU that torch can use. Nothing was run.",
            expected="a GPU",
            found=(done.stderr.strip().splitlines() or ["no device"])[-1],
            fix="Run on a machine with a GPU, or pass --dry-run.",
        )
    return name


def _say(text: str) -> None:
    print(text, flush=True)
