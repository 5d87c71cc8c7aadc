"""Runs the parts one after another, each in its own process with its own time limit."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import CEILINGS, Bench, Record, select
from benchmarks.gpu.report import Document, figures_of, headline
from hfq.tables import Table

__all__ = ["Part", "run_parts"]

ROOT = Path(__file__).parents[2]
MODELS_NBYTES = 40e9
"""Most bytes of models at a time."""

LOG_LINES = 40
"""Last lines of the output of a part that did not end."""

_TO_END = 5.0  # seconds between the request to end and the end by force


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        number: Its number in the page and in the order.
        name: Its name in `--only`.
        seconds: Its time limit.
        module: Module with `measure(bench)`, which yields records; `tables(records)`; and
            `values(records, ceilings)`, which returns the values of its acceptance numbers.
        models: Names of the models in the scratch folder that it uses. Each is deleted after its last part.
    """

    number: int
    name: str
    seconds: float
    module: str
    models: tuple[str, ...] = ()


def run_parts(
    parts: Sequence[Part],
    document: Document,
    out: Path,
    *,
    budget: float,
    is_wanted: Callable[[Part], bool],
    say: Callable[[str], None],
) -> None:
    """Runs all wanted parts that fit the budget, and puts each into the document when it ends.

    Args:
        parts: The parts in their order.
        document: Results of earlier runs; each part is added to it.
        out: Folder of the results.
        budget: Seconds for all parts together.
        is_wanted: Returns False for a part that shall not run.
        say: Function that receives the text of each part.
    """
    ends = time.time() + budget
    waiting = [part for part in parts if is_wanted(part)]
    with _folder(_in_memory(document.is_dry)) as scratch, _folder(tempfile.gettempdir()) as disk:
        while waiting:
            part, left = waiting.pop(0), ends - time.time()
            if part.seconds > left:
                entry = _entry(part, "skipped", f"it takes {part.seconds:g} s, and {left:.0f} s are left")
                if not document.records(part.name):
                    _put(document, part, entry, say)
                else:
                    say(f"\n== {part.number} {part.name}: {headline(entry)}; its earlier result stays")
                continue
            say(f"\n== {part.number} {part.name}: at most {part.seconds:g} s")
            bench = Bench(
                document.is_dry, scratch, disk, out.resolve(), time.time() + part.seconds, _ceilings(document)
            )
            _put(document, part, _run(part, bench), say)
            needed = {name for other in waiting for name in other.models}
            for name in set(part.models) - needed:
                shutil.rmtree(scratch / name, ignore_errors=True)


def _put(document: Document, part: Part, entry: dict[str, Any], say: Callable[[str], None]) -> None:
    """Makes the tables and figures of a part, puts them into the document, and says them."""
    tables, values, records = [], {}, entry["records"]
    try:
        module = importlib.import_module(part.module)
        ceilings = _rates(records) if part.number == 1 else _ceilings(document)
        tables, values = module.tables(records), module.values(records, ceilings)
    except Exception as error:
        if document.is_dry:  # which tests this code
            raise
        entry = entry | {"reason": f"{entry['reason']} (no tables: {type(error).__name__}: {error})".strip()}
    figures = figures_of(part.name, values, entry["reason"] or "the part did not measure it", document.is_dry)
    document.put(part.name, entry, tables, figures)
    said = [table.to_markdown() for table in tables]
    if figures:
        rows = [figure.cells() for figure in figures]
        said.append(Table("Acceptance", "", ("what", "measured", "accepted", ""), rows).to_markdown())
    said += entry.get("log", [])
    say("\n".join([*said, f"{part.number} {part.name}: {headline(entry)}"]))


def _run(part: Part, bench: Bench) -> dict[str, Any]:
    """Runs the process of a part, and returns its entry."""
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "records.jsonl"), Path(folder, "log")
        arguments = [sys.executable, "-m", "benchmarks.gpu.child", part.module, str(file), bench.to_json()]
        environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
        with (
            log.open("wb") as stream,
            _ended(
                subprocess.Popen(
                    arguments,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    start_new_session=True,
                )
            ) as process,
        ):
            try:
                process.wait(max(bench.seconds_left, 0))
                status = ""
            except subprocess.TimeoutExpired:
                status = f"stopped at its limit of {part.seconds:g} s"
        records, is_complete = _read_records(file)
        if is_complete:  # also if the device kept the process from ending
            return _entry(part, "done", "", records, time.time() - started)
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = "; ".join(filter(None, [status or _ending(process.returncode), _last_error(lines)]))
        entry = _entry(part, "timed out" if status else "failed", reason, records, time.time() - started)
        return entry | {"log": lines[-LOG_LINES:]}


@contextlib.contextmanager
def _ended(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """Ends the process and those that it started, however the context is left."""
    try:
        yield process
    finally:
        for number, seconds in ((signal.SIGTERM, _TO_END), (signal.SIGKILL, None)):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # processes that it left behind


def _read_records(file: Path) -> tuple[list[Record], bool]:
    """Returns the complete records of a file, and whether the part ran to its end."""
    records: list[Record] = []
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            if line == "null\n":
                return records, True
            if line.endswith("\n"):
                records.append(json.loads(line))
    return records, False


def _last_error(lines: list[str]) -> str:
    named = [line for line in lines if line[:1].isalpha() and ("Error" in line or "error" in line)]
    return (named or lines or [""])[-1].strip()[:400]


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"


def _entry(
    part: Part, status: str, reason: str, records: Sequence[Record] = (), seconds: float = 0.0
) -> dict[str, Any]:
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return {
        "number": part.number,
        "status": status,
        "reason": reason,
        "seconds": round(seconds, 1),
        "date": date,
        "records": list(records),
    }


def _ceilings(document: Document) -> dict[str, float]:
    return _rates(document.records("facts"))


def _rates(records: list[Record]) -> dict[str, float]:
    return {record["name"]: record["value"] for record in select(records, CEILINGS)}


def _in_memory(is_dry: bool) -> str:
    """Returns a folder in memory with room for the models, or the folder of temporary files."""
    shared = Path("/dev/shm")
    has_room = shared.is_dir() and (is_dry or shutil.disk_usage(shared).free > MODELS_NBYTES)
    return str(shared) if has_room else tempfile.gettempdir()


@contextlib.contextmanager
def _folder(parent: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hfq-gpu-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
