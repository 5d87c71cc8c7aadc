"""Detection of the result in a JSON file, and the files drawn from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hfq.errors import SetupError
from hfq.output_file import write_output_file
from hfq.plots.benches import bench_section
from hfq.plots.drawing import draw_png
from hfq.plots.fields import Fields, read_json
from hfq.plots.page import make_page
from hfq.plots.plans import plan_section
from hfq.plots.runs import run_section
from hfq.plots.section import Section

__all__ = ["read_section", "write_report"]

_KINDS = {
    ("devices", "offload", "modules"): run_section,
    ("model", "workload", "machine"): plan_section,
    ("title", "facts", "records"): bench_section,
}
"""Fields that identify a kind of file, and the function that makes its section."""


def read_section(file: Path) -> Section:
    """Reads one JSON file and returns its section.

    Raises:
        SetupError: The file cannot be read, is not JSON, or is not a complete result of hfq.
    """
    value = read_json(file)
    keys = set(value) if isinstance(value, dict) else set()
    for names, make in _KINDS.items():
        if keys >= set(names):
            section = make(Fields(value, file))
            return replace(section, title=f"{section.title} ({file.name})")
    found = (
        f"an object of {', '.join(sorted(keys)[:8]) or 'no fields'}"
        if isinstance(value, dict)
        else f"{type(value).__name__} {str(value)[:60]}"
    )
    raise SetupError(
        "This file contains no result that hfq plot can draw.",
        file=file,
        found=found,
        expected="a report, a plan, a benchmark, or an evaluation",
        fix="Pass a file from hfq.report(model).save(file), hfq plan --json, hfq evaluate --json, "
        "or a benchmark.",
    )


def write_report(files: Sequence[Path], out: Path, as_page: bool) -> list[Path]:
    """Draws all charts of the files, and writes all timelines as `NAME.trace.json`.

    Nothing is written unless all files can be read.

    Args:
        files: JSON files.
        out: Output folder. It is created if missing.
        as_page: True to also write `report.html`, which contains everything.

    Returns:
        Paths of the written files.

    Raises:
        SetupError: A file cannot be drawn, matplotlib is not installed, or the folder is not writable.
    """
    sections = {name: read_section(file) for name, file in zip(_names(files), files, strict=True)}
    made: dict[str, bytes] = {}
    for name, section in sections.items():
        made |= {f"{name}-{picture.name}.png": draw_png(picture) for picture in section.pictures}
        if section.trace is not None:
            made[f"{name}.trace.json"] = json.dumps(section.trace).encode()
    if as_page:
        made["report.html"] = make_page(list(sections.values())).encode("utf-8")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in made.items():
            write_output_file(out / name, content)
    except OSError as error:
        raise SetupError(
            "The charts cannot be written.",
            file=out,
            expected="a writable folder",
            found=error.strerror or error,
            fix="Pass another --output-dir.",
        ) from error
    return [out / name for name in made]


def _names(files: Sequence[Path]) -> list[str]:
    """Returns the files' names without suffixes, numbered if they repeat."""
    found: list[str] = []
    for file in files:
        count, name = 1, file.stem
        while name in found:
            count += 1
            name = f"{file.stem}-{count}"
        found.append(name)
    return found
