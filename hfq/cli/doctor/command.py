"""`hfq doctor [MODEL]`: checks the machine, a checkpoint, and launcher configs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hfq.cli.doctor.findings import Finding
from hfq.cli.model_argument import Revision, model_headers

__all__ = ["TESTED", "doctor"]

TESTED = {
    "torch": ("2.13.0", "2.13.0"),
    "transformers": ("5.17.0", "5.23.0"),
    "accelerate": ("1.10.0", "1.15.0"),
    "safetensors": ("0.8.0", "0.8.0"),
    "deepspeed": ("0.19.8", "0.19.8"),
    "peft": ("0.21.2", "0.21.2"),
}
"""The oldest and newest versions that are tested: constraints-oldest.txt and constraints.txt."""

_OPTIONAL = ("deepspeed", "peft")


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder or Hub id of a checkpoint to check.")
    ] = None,
    revision: Revision = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(help="DeepSpeed (.json) or accelerate (.yaml) config to check; repeatable."),
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Remove leftover files of killed runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Reports what this machine has and which problems it finds.

    The exit status is 1 if there is an error.
    """
    with contextlib.nullcontext() if model is None else model_headers(model, revision) as found:
        checkpoint = None if found is None else Path(found.folder)
        is_local = found is not None and found.commit is None
        folder = checkpoint if checkpoint is not None and is_local else Path()
        findings = list(_findings(folder, checkpoint, config or [], clean))
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print(findings)
    if any(finding.status == "error" for finding in findings):
        raise typer.Exit(1)


def _findings(folder: Path, checkpoint: Path | None, configs: list[Path], clean: bool) -> Iterator[Finding]:
    """Yields all findings; `folder` is on the disk to check."""
    from hfq.cli.doctor.checkpoint import checkpoint_findings, disk_findings
    from hfq.cli.doctor.machine import (
        device_findings,
        environment_findings,
        kernel_findings,
        operator_findings,
    )

    yield from environment_findings(folder)
    yield from version_findings()
    yield from device_findings()
    yield from kernel_findings()
    yield from operator_findings()
    yield from disk_findings(folder)
    yield from checkpoint_findings(checkpoint)
    yield from config_findings(configs)
    yield from leftover_findings(folder, clean)


def version_findings() -> Iterator[Finding]:
    """Yields the versions of related packages, compared with those that hfq is tested with."""
    import importlib.metadata

    for package, (oldest, newest) in TESTED.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            fix = (
                f"pip install 'hfq[{package}]', if you need it"
                if package in _OPTIONAL
                else f"pip install {package}"
            )
            yield Finding(
                "versions", "note" if package in _OPTIONAL else "error", f"{package} is not installed", fix
            )
            continue
        tested = oldest if oldest == newest else f"{oldest} to {newest}"
        if _numbers(version) < _numbers(oldest):
            yield Finding(
                "versions",
                "warning",
                f"{package} {version}; tested: {tested}",
                f"pip install '{package}>={oldest}'",
            )
        elif _numbers(version) > _numbers(newest):
            yield Finding("versions", "note", f"{package} {version} is newer than what is tested: {tested}")
        else:
            yield Finding("versions", "ok", f"{package} {version} (tested: {tested})")


def config_findings(files: list[Path]) -> Iterator[Finding]:
    """Yields the problems of configs, as a load would report them."""
    if not files:
        return
    from hfq.integrations.deepspeed.config_check import check_config

    for file in files:
        errors = check_config(file)
        for error in errors:
            found = f" (found: {error.found})" if error.found is not None else ""
            yield Finding("configs", "error", f"{file.name}: {error.message}{found}", error.fix)
        if not errors:
            yield Finding("configs", "ok", f"{file.name} leaves quantized weights unchanged")


def leftover_findings(folder: Path, clean: bool) -> Iterator[Finding]:
    """Yields leftovers of killed runs: next to the checkpoint, in the cache, in shared memory."""
    from hfq.checkpoint.cleanup import find_leftovers

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfq"
    found = find_leftovers([folder, folder.resolve().parent, cache / "bench", cache / "headers"])
    for leftover in found:
        text = f"{leftover.path.name}, {leftover.nbytes:,} bytes, of {leftover.what}"
        if clean:
            leftover.remove()
            yield Finding("leftovers", "ok", f"removed {text}")
        else:
            yield Finding("leftovers", "warning", text, "hfq doctor --clean")
    if not found:
        yield Finding("leftovers", "ok", "no leftover files of killed runs")


def _numbers(version: str) -> tuple[int, ...]:
    """Returns (2, 13, 0) for `2.13.0+cpu`."""
    parts = version.partition("+")[0].split(".")[:3]
    return tuple(int("".join(letter for letter in part if letter.isdecimal()) or 0) for part in parts)


def _print(findings: list[Finding]) -> None:
    from hfq.cli.console import escaped

    print("```")
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            print(f"{section}:")
        mark = {"ok": " ", "note": " ", "warning": "!", "error": "X"}[finding.status]
        print(escaped(f" {mark} {finding.text}"))
        if finding.fix:
            print(escaped(f"     fix: {finding.fix}"))
    print("```")
