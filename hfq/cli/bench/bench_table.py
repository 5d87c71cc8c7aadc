"""Table that `hfq bench` prints: measured and predicted, one row for each quantity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hfq.cli.console import EscapingConsole
from hfq.cli.fitting_table import FittingTable
from hfq.tables import as_size

__all__ = ["print_table"]

_NONE = "-"


def print_table(found: dict[str, Any]) -> None:
    """Prints the measurements of `run_bench`."""
    console = EscapingConsole()
    model, first = found["model"], found["runs"][0]
    formats = model["formats"] or "unquantized"
    console.print(
        f"{model['path']}: {model['class']}, {formats}, {_size(model['file_nbytes'])}, {model['dtype']}"
    )
    devices = ", ".join(f"{_size(nbytes)} on {device}" for device, nbytes in first["devices"].items())
    console.print(f"weights: {devices}; computed on {first['execution_device']}")
    table = FittingTable("threads", "test", "measured", "predicted")
    for run in found["runs"]:
        for row in _rows(run):
            table.add_row(str(run["threads"]), *row)
    console.print(table)
    for note in _notes(found):
        console.print(note)


def _rows(run: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields (test, measured, predicted)."""
    predicted = run["predicted"] or {}
    rate = f", {run['load_nbytes'] / run['load_seconds'] / 1e9:.3g} GB/s" if run["load_nbytes"] else ""
    yield "load", f"{run['load_seconds']:.3g} s{rate}", _text(predicted.get("load_seconds"), ".3g", " s")
    yield "peak memory", _size(run["peak_memory_nbytes"]), _size(predicted.get("peak_memory_nbytes"))
    on_devices = predicted.get("peak_device_memory_nbytes", {})
    for device, nbytes in run["peak_device_memory_nbytes"].items():
        yield f"peak memory of {device}", _size(nbytes), _size(on_devices.get(device))
    for name in ("prefill", "decode"):
        key = f"{name}_tokens_per_second"
        if key in run:
            measured = f"{run[key]:.2f} ± {run[f'{key}_std']:.2f} tokens/s"
            expected = predicted.get(key) if _has_same_threads(run) else None
            yield f"{name} {run[f'{name}_tokens']}", measured, _text(expected, ".2f", " tokens/s")
    for name, what in (("generate", "static cache"), ("compiled", "compiled")):
        key = f"decode_{name}_tokens_per_second"
        if key in run:
            rate = f"{run[key]:.2f} ± {run[f'{key}_std']:.2f} tokens/s"
            yield f"decode {run[f'decode_{name}_tokens']}, {what}", rate, _NONE
    if "compile_seconds" in run:
        yield "compiling, and one generation", f"{run['compile_seconds']:.3g} s", _NONE
    if run["host_seconds_per_layer"] is not None:
        yield "host time per layer", f"{run['host_seconds_per_layer'] * 1e6:.3g} µs", _NONE


def _notes(found: dict[str, Any]) -> Iterator[str]:
    runs, repetitions = found["runs"], found["options"]["repetitions"]
    share = runs[0]["cached_share"]
    cached = (
        "" if share is None else f"; {share:.0%} of the files were in the page cache before the first load"
    )
    yield f"± is the standard deviation over {repetitions} repetitions{cached}"
    yield "peak memory: growth of the process since before the load, mapped weights included"
    predicted = runs[0]["predicted"]
    if predicted is None:
        return
    yield f"predicted with: {predicted['source']}; a token is decided by {predicted['decode_dominant_term']}"
    if not all(map(_has_same_threads, runs)):
        threads = predicted["profile_threads"]
        yield f"tokens/s are predicted for {threads} threads alone, with which the machine was profiled"


def _has_same_threads(run: dict[str, Any]) -> bool:
    """True if the rates were measured with this number of threads, or are limits of standards."""
    profiled = (run["predicted"] or {}).get("profile_threads")
    return profiled is None or profiled == run["threads"]


def _text(value: float | None, form: str, unit: str) -> str:
    return _NONE if value is None else f"{value:{form}}{unit}"


def _size(nbytes: int | None) -> str:
    return _NONE if nbytes is None else as_size(nbytes)
