"""Part 6: a model of 8 billion weights whose layers lie in cpu memory or on disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Record, find_missing, missing, select
from benchmarks.gpu.decoding import Decoding, busy_shares, count_waits, free, load, peak_over_plan
from benchmarks.gpu.models import make_model, make_plain_model, shape_of
from benchmarks.gpu.report import Values
from hfq.loading.loaded_model import loader_of
from hfq.machine_profile.machine_limits import drop_cache
from hfq.machine_profile.worker_process import Worker
from hfq.tables import Table

__all__ = ["maps", "measure", "tables", "values"]

TOKENS, FEW = 8, 3
RUNS = (
    ("8b-fp8", "all in cpu"),
    ("8b-gptq4", "all in cpu"),
    ("accelerate", "all in cpu"),
    ("8b-fp8", "two processes"),
    ("8b-gptq4", "spread half in cpu"),
    ("8b-gptq4", "last half in cpu"),
    ("8b-fp8", "spread half in cpu"),
    ("8b-fp8", "last half in cpu"),
    ("8b-gptq4", "on disk"),
)
TO_END = 5.0
"""Seconds that must be left for another run."""


def maps(layers: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Returns the device map of each placement."""
    names = [f"model.layers.{index}" for index in range(layers)]
    found = {
        "all in cpu": dict.fromkeys(names, "cpu"),
        "spread half in cpu": dict.fromkeys(names[1::2], "cpu"),
        "last half in cpu": dict.fromkeys(names[layers // 2 :], "cpu"),
        "on disk": dict.fromkeys(names, "disk"),
    }
    return {name: {"": str(device), **placed} for name, placed in found.items()}


def measure(bench: Bench) -> Iterator[Record]:
    """Yields one record for each model and placement."""
    placements = maps(shape_of("dense", bench.is_dry).layers, bench.device)
    for name, placement in RUNS:
        if bench.seconds_left < TO_END:
            yield missing("run", "no time was left", model=name, placement=placement)
            continue
        with free(bench.device):
            try:
                if name == "accelerate":
                    found = _accelerate(bench)
                elif placement == "two processes":
                    found = _two_processes(bench, make_model(bench, name), placements["all in cpu"])
                else:
                    path = make_model(bench, name)
                    path = _on_disk(bench, path) if placement == "on disk" else path
                    found = _decode(bench, path, placements[placement])
                yield {"kind": "run", "model": name, "placement": placement} | found
            except Exception as error:
                yield bench.outlived("run", error, model=name, placement=placement)


def tables(records: list[Record]) -> list[Table]:
    """Returns speed, busy shares, waits, and memory of each run."""
    rows, shared = [], []
    for record in records:
        label = (record["model"], record["placement"])
        if "missing" in record:
            rows.append((*label, f"not measured: {record['missing']}", *["-"] * 7))
        elif "pss" in record:
            text = ", ".join(f"{each / 1e9:.2f} GB" for each in record["pss"])
            shared.append((*label, text, f"{sum(record['pss']) / record['nbytes']:.3f}"))
        else:
            rows.append((*label, *_cells(record)))
    header = (
        "model",
        "layers",
        "tokens/s",
        "load",
        "copied",
        "copies busy",
        "compute busy",
        "waits in 3 tokens",
        "stalled",
    )
    note = "One sequence, token by token. Copied: bytes of offloaded layers over the time of a token."
    return [
        Table("Offload", note, (*header, "peak / plan"), rows),
        Table(
            "Two processes",
            "Growth of the proportional set sizes of two processes that hold the same layers in cpu.",
            ("model", "layers", "each", "sum / checkpoint"),
            shared,
        ),
    ]


def values(records: list[Record], ceilings: dict[str, float]) -> Values:
    """Returns the worst of the runs with all layers in cpu, and the ratio to accelerate."""
    found: dict[str, float | str] = {}
    runs = [r for r in select(records, "run", placement="all in cpu") if r["model"] != "accelerate"]
    every = [r for r in select(records, "run") if "waits" in r]
    pinned = ceilings.get("pinned to device")
    if runs:
        rates = [r["pass_nbytes"] / r["seconds"] for r in runs]
        found["rate"] = min(rates) / pinned if pinned else "part 1 did not measure the pinned rate"
        found["busy"] = min(r["busy"]["copy"] for r in runs)
    if every:
        found["waits"] = max(r["waits"] for r in every)
        found["offload_peak"] = max(r["peak"] / r["planned"] for r in every)
    ours = next(select(records, "run", model="8b-fp8", placement="all in cpu"), None)
    theirs = next(select(records, "run", model="accelerate"), None)
    if ours and theirs:
        found["accelerate"] = theirs["seconds"] / ours["seconds"]
    elif reason := find_missing(records, "run", model="accelerate"):
        found["accelerate"] = reason
    return found


def _cells(record: Record) -> tuple[str, ...]:
    if "busy" not in record:
        return (f"{1 / record['seconds']:.2f}", *["-"] * 7)
    return (
        f"{1 / record['seconds']:.2f}",
        f"{record['load_seconds']:.2f} s",
        f"{record['pass_nbytes'] / record['seconds'] / 1e9:.2f} GB/s",
        f"{record['busy']['copy']:.3f}",
        f"{record['busy']['compute']:.3f}",
        f"{record['waits']}" + (f" ({record['where']})" if record["where"] else ""),
        f"{record['stall_seconds']:.3f} s",
        f"{record['peak'] / record['planned']:.3f}",
    )


def _decode(bench: Bench, path: Path, placement: dict[str, Any]) -> Record:
    model, load_seconds = load(path, placement)
    decoding, offloader = Decoding(model, bench.device), loader_of(model).offloader
    stalled = offloader.stall_seconds
    seconds = decoding.seconds(FEW if bench.is_dry else TOKENS)
    found = {
        "seconds": seconds,
        "load_seconds": load_seconds,
        "pass_nbytes": offloader.pass_nbytes,
        "stall_seconds": offloader.stall_seconds - stalled,
        **peak_over_plan(decoding),
        "busy": busy_shares(decoding),
    }
    waits, where = count_waits(decoding)
    return found | {"waits": waits, "where": where}


def _accelerate(bench: Bench) -> Record:
    """Decodes bfloat16 with accelerate's offload to cpu."""
    from accelerate import cpu_offload

    model = make_plain_model(shape_of("dense", bench.is_dry), torch.device("cpu"))
    model = cpu_offload(model, execution_device=bench.device)
    return {"seconds": Decoding(model, bench.device).seconds(FEW)}


def _on_disk(bench: Bench, path: Path) -> Path:
    """Returns a copy of a checkpoint on the disk, none of which is in the page cache."""
    target = bench.disk / path.name
    if not target.exists():
        shutil.copytree(path, target)
    drop_cache(target.glob("*.safetensors"))
    return target


def _two_processes(bench: Bench, path: Path, placement: dict[str, Any]) -> Record:
    nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    module, options = "benchmarks.gpu.offload_worker", {"bench": bench.to_json()}
    with Worker(module, **options) as first, Worker(module, **options) as second:
        workers = (first, second)
        before = [worker.ask("start") for worker in workers]
        for worker in workers:
            answer = worker.ask("load", path=str(path), placement=placement)
            if "error" in answer:
                return missing("run", answer["error"])
        after = [worker.ask("measure") for worker in workers]
    grown = [late["pss"] - early["pss"] for early, late in zip(before, after, strict=True)]
    return {"pss": grown, "nbytes": nbytes}
