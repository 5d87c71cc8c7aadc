"""Part 7: a model of 8 billion weights wholly on the device, against bfloat16."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from benchmarks.gpu.bench import Bench, Record, find_missing, missing, select
from benchmarks.gpu.decoding import Decoding, free, load, peak_over_plan, prefill_seconds, replay_seconds
from benchmarks.gpu.models import make_model, make_plain_model, shape_of
from benchmarks.gpu.report import Values
from hfq.machine_profile.machine_limits import drop_cache
from hfq.tables import Table

__all__ = ["measure", "tables", "values"]

PLAIN = "bf16"
NAMES = (PLAIN, "8b-gptq4", "8b-fp8", "8b-nf4", "8b-awq")
BATCHES = (1, 8, 32)
PROMPT, DRY_PROMPT = 2048, 16
TOKENS, FEW = 8, 2


def measure(bench: Bench) -> Iterator[Record]:
    """Yields loads, peaks, and the seconds of prefills and tokens of each model."""
    for name in NAMES:
        with free(bench.device):
            try:
                yield from _measure_model(bench, name)
            except Exception as error:
                yield bench.outlived("load", error, model=name, state="warm")
    with free(bench.device):
        try:
            yield _load_cold(bench, "8b-gptq4")
        except Exception as error:
            yield bench.outlived("load", error, model="8b-gptq4", state="cold")


def tables(records: list[Record]) -> list[Table]:
    """Returns loads, and speed with its ratio to bfloat16."""
    loads = []
    for record in records:
        if record["kind"] == "load" and "missing" in record:
            loads.append((record["model"], record["state"], f"not measured: {record['missing']}", "-"))
        elif record["kind"] == "load":
            rate = record["nbytes"] / record["seconds"] / 1e9
            loads.append((record["model"], record["state"], f"{record['seconds']:.2f} s", f"{rate:.2f} GB/s"))
    steps = list(dict.fromkeys((r["step"], r["batch"], r["how"]) for r in records if r["kind"] == "step"))
    rows = []
    for step, batch, how in steps:
        labels = {"step": step, "batch": batch, "how": how}
        rows.append((f"{step}, M = {batch}, {how}", *(_step_cell(records, name, labels) for name in NAMES)))
    return [
        Table(
            "Loads to the device",
            "Warm: from memory. Cold: from the disk.",
            ("model", "", "time", "rate"),
            loads,
        ),
        Table("Speed", "Tokens per second, and times those of bf16.", ("step", *NAMES), rows),
    ]


def values(records: list[Record], ceilings: dict[str, float]) -> Values:
    """Returns the slowest warm load and the largest peak."""
    found: dict[str, float | str] = {}
    loads, pinned = list(select(records, "load", state="warm")), ceilings.get("pinned to device")
    if loads:
        slowest = min(record["nbytes"] / record["seconds"] for record in loads)
        found["warm"] = slowest / pinned if pinned else "part 1 did not measure the pinned rate"
    if peaks := list(select(records, "peak")):
        found["resident_peak"] = max(record["peak"] / record["planned"] for record in peaks)
    return found


def _step_cell(records: list[Record], name: str, labels: dict[str, object]) -> str:
    own, plain = (next(select(records, "step", model=model, **labels), None) for model in (name, PLAIN))
    if own is None:
        return f"not measured: {find_missing(records, 'step', model=name, **labels) or 'the part ended before it'}"
    ratio = "" if plain is None else f" ({plain['seconds'] / own['seconds']:.2f}x)"
    return f"{own['tokens'] / own['seconds']:.1f}{ratio}"


def _measure_model(bench: Bench, name: str) -> Iterator[Record]:
    device = bench.device
    if name == PLAIN:
        model = make_plain_model(shape_of("dense", bench.is_dry), device)
    else:
        path = make_model(bench, name)
        nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        model, seconds = load(path, {"": str(device)})
        yield {"kind": "load", "model": name, "state": "warm", "seconds": seconds, "nbytes": nbytes}
        yield {"kind": "peak", "model": name, **peak_over_plan(Decoding(model, device))}
    prompt = DRY_PROMPT if bench.is_dry else PROMPT
    seconds = prefill_seconds(model, device, prompt)
    labels = {"kind": "step", "model": name}
    yield {**labels, "step": "prefill", "batch": prompt, "how": "eager", "seconds": seconds, "tokens": prompt}
    for batch in BATCHES[:2] if bench.is_dry else BATCHES:
        step = {**labels, "step": "decode", "batch": batch, "tokens": batch}
        seconds = Decoding(model, device, batch).seconds(FEW if bench.is_dry else TOKENS)
        yield {**step, "how": "eager", "seconds": seconds}
        try:
            yield {**step, "how": "graph", "seconds": replay_seconds(model, device, batch)}
        except Exception as error:
            del step["kind"]
            yield bench.outlived("step", error, how="graph", **step)


def _load_cold(bench: Bench, name: str) -> Record:
    """Loads from the disk, with none of the file in the page cache."""
    target = bench.disk / name
    if not target.exists():
        if bench.seconds_left < 15 and not bench.is_dry:
            return missing("load", "no time was left to copy the model to the disk", model=name, state="cold")
        shutil.copytree(make_model(bench, name), target)
    files = list(target.glob("*.safetensors"))
    drop_cache(files)
    _, seconds = load(target, {"": str(bench.device)})
    nbytes = sum(file.stat().st_size for file in files)
    return {"kind": "load", "model": name, "state": "cold", "seconds": seconds, "nbytes": nbytes}
