"""Part 9: the tests of the device."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.bench import Bench, Record, select
from benchmarks.gpu.report import Values
from benchmarks.gpu.runner import ROOT
from hfq.tables import Table

__all__ = ["measure", "read_results", "tables", "values"]

JUNIT = "gpu-junit.xml"
DRY_TESTS = ("tests/accelerator/test_counters.py", "-k", "cpu")
PROCESSES = 4
MARK = "mark.gpu"
_TO_WRITE = 10.0  # seconds in which an interrupted suite writes its results


def measure(bench: Bench) -> Iterator[Record]:
    """Yields the outcome of each test, failed ones first, with their messages.

    Raises:
        RuntimeError: No test ran, or one of a dry run failed.
    """
    if importlib.util.find_spec("pytest") is None:
        raise ModuleNotFoundError("pytest is not installed")
    file, arguments = bench.out / JUNIT, ["-m", "accelerator", *DRY_TESTS]
    if not bench.is_dry:
        spread = ["-n", str(PROCESSES)] if importlib.util.find_spec("xdist") is not None else []
        arguments = ["-m", "gpu", *spread, *_files_of_gpu()]
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"--junitxml={file}", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryFile("w+") as log:
        environment = {**os.environ, "TRITON_INTERPRET": "0"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            process.wait(max(bench.seconds_left - _TO_WRITE, 1))
            reason = ""
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait(max(bench.seconds_left - 1, 1))
            reason = "stopped at the time limit"
        log.seek(0)
        last = (log.read().strip().splitlines() or ["no output"])[-1]
    results = read_results(file) if file.exists() else []
    yield {"kind": "end", "status": process.returncode, "reason": reason, "last": last, "tests": len(results)}
    yield from sorted(results, key=lambda record: record["outcome"] != "failed")
    if not results:
        raise RuntimeError(f"no test ran: {last}")
    if bench.is_dry and process.returncode:
        raise RuntimeError(f"the tests did not pass: {last}")


def _files_of_gpu() -> list[str]:
    """Returns the files with tests for a GPU, since collecting all others takes long.

    Raises:
        RuntimeError: There is none.
    """
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text()]
    if not files:
        raise RuntimeError("no test is marked gpu")
    return files


def read_results(file: Path) -> list[Record]:
    """Returns the outcome of each test of a JUnit file."""
    found = []
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        parts = {child.tag: child for child in case}
        failed = parts.get("failure", parts.get("error"))
        outcome = "failed" if failed is not None else "skipped" if "skipped" in parts else "passed"
        said = failed if failed is not None else parts.get("skipped")
        message = "" if said is None else said.get("message", "").partition("\n")[0][:300]
        name = f"{case.get('classname')}::{case.get('name')}"
        found.append({"kind": "test", "name": name, "outcome": outcome, "message": message})
    return found


def tables(records: list[Record]) -> list[Table]:
    """Returns the counts, and the tests that failed."""
    outcomes = Counter(record["outcome"] for record in select(records, "test"))
    ends = [
        f"{end['last']}{' (' + end['reason'] + ')' if end['reason'] else ''}"
        for end in select(records, "end")
    ]
    failed = [(r["name"], r["message"].replace("|", "/")) for r in select(records, "test", outcome="failed")]
    skipped = Counter(record["message"] for record in select(records, "test", outcome="skipped"))
    counts = [(outcome, str(outcomes[outcome])) for outcome in ("failed", "passed", "skipped")]
    return [
        Table("Failed tests", f"{len(failed)} in all.", ("test", "message"), failed),
        Table("Tests", " ".join(ends), ("outcome", "tests"), counts),
        Table("Skipped tests", "", ("reason", "tests"), [(why, str(n)) for why, n in skipped.items()]),
    ]


def values(records: list[Record], ceilings: dict[str, float]) -> Values:
    """Returns the number of failed tests."""
    ends = list(select(records, "end"))
    if not ends or not ends[0]["tests"]:
        return {}
    return {"failed": sum(record["outcome"] == "failed" for record in select(records, "test"))}
