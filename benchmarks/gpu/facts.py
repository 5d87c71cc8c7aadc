"""Part 1: the machine, and the rates that later parts divide by."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.gpu.bench import CEILINGS, Bench, NotAvailable, Record, find_missing, select
from benchmarks.gpu.report import Values
from benchmarks.gpu.timing import best_rate, device_seconds
from hfq.machine_profile.machine_facts import machine_facts
from hfq.machine_profile.machine_limits import drop_cache, read_files
from hfq.tables import Table

__all__ = ["measure", "tables", "values"]

NAMES = {
    "copy": "copy within the device, read and written",
    "bf16": "bfloat16 product",
    "pinned to device": "copy from pinned memory",
    "pageable to device": "copy from pageable memory",
    "device to pinned": "copy to pinned memory",
    "device to pageable": "copy to pageable memory",
    "disk": "read of a file past the page cache",
    "host": "read of host memory",
}


def measure(bench: Bench) -> Iterator[Record]:
    """Yields facts, then rates in bytes or operations per second."""
    device, unit = bench.device, 1 << 20 if bench.is_dry else 1 << 28
    for name, fact in {**machine_facts(bench.disk), **_device_facts(device)}.items():
        yield {"kind": "fact", "name": name, "fact": fact}
    yield _rate(bench, "copy", lambda: _copy_rate(device, 4 * unit))
    yield _rate(bench, "bf16", lambda: _product_rate(device, 256 if bench.is_dry else 8192))
    yield from _link_rates(bench, 4 * unit)
    yield _rate(bench, "host", lambda: _host_rate(8 * unit))
    yield _rate(bench, "disk", lambda: _disk_rate(bench.disk / "read", 2 * unit))


def tables(records: list[Record]) -> list[Table]:
    """Returns the facts and the rates."""
    facts = [(record["name"], record["fact"]) for record in select(records, "fact")]
    rates = [(text, _rate_text(records, name)) for name, text in NAMES.items()]
    return [
        Table("Machine", "", ("", ""), facts),
        Table("Ceilings", "The best of three measurements each.", ("what", "rate"), rates),
    ]


def values(records: list[Record], ceilings: dict[str, float]) -> Values:
    """Returns nothing: no rate of the machine has an acceptance number."""
    return {}


def _rate(bench: Bench, name: str, measure_rate: Callable[[], float]) -> Record:
    try:
        return {"kind": CEILINGS, "name": name, "value": measure_rate()}
    except Exception as error:
        return bench.outlived(CEILINGS, error, name=name)


def _rate_text(records: list[Record], name: str) -> str:
    found = next(select(records, CEILINGS, name=name), None)
    if found is None:
        return f"not measured: {find_missing(records, CEILINGS, name=name) or 'the part ended before it'}"
    return f"{found['value'] / 1e12:.1f} TFLOP/s" if name == "bf16" else f"{found['value'] / 1e9:.2f} GB/s"


def _device_facts(device: torch.device) -> dict[str, str]:
    properties = torch.get_device_module(device).get_device_properties(device)
    named = {
        "capability": (getattr(properties, "major", None), getattr(properties, "minor", None)),
        "multiprocessors": getattr(properties, "multi_processor_count", None),
        "L2": getattr(properties, "L2_cache_size", None),
        "shared memory of a block": getattr(properties, "shared_memory_per_block_optin", None),
    }
    more = ", ".join(f"{name} {value}" for name, value in named.items() if value not in (None, (None, None)))
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "none")
    return {
        "device": f"{properties.name}, {properties.total_memory / 1e9:.1f} GB"
        + (f", {more}" if more else ""),
        "torch": f"CUDA {torch.version.cuda}, HIP {torch.version.hip}, Triton {_triton()}",
        "for Triton's launchers": f"compiler {compiler}, Python.h {'present' if header.exists() else 'missing'}",
        "Python": sys.version.split()[0],
    }


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "missing"
    return triton.__version__


def _copy_rate(device: torch.device, nbytes: int) -> float:
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / device_seconds(lambda: target.copy_(source), device)


def _product_rate(device: torch.device, size: int) -> float:
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2 * size**3 / device_seconds(lambda: left @ right, device)


def _link_rates(bench: Bench, nbytes: int) -> Iterator[Record]:
    device = bench.device
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    for kind in ("pinned", "pageable"):
        host = torch.ones(nbytes, dtype=torch.uint8)
        host = host.pin_memory() if kind == "pinned" else host

        def to_device(host: torch.Tensor = host) -> None:
            memory.copy_(host, non_blocking=True)

        def to_host(host: torch.Tensor = host) -> None:
            host.copy_(memory, non_blocking=True)

        yield _rate(bench, f"{kind} to device", lambda: best_rate(nbytes, to_device, device))
        yield _rate(bench, f"device to {kind}", lambda: best_rate(nbytes, to_host, device))


def _host_rate(nbytes: int) -> float:
    memory = torch.ones(nbytes // 4)
    return best_rate(memory.nbytes, memory.sum, torch.device("cpu"))


def _disk_rate(file: Path, nbytes: int) -> float:
    memory = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8).numpy().tobytes()
    try:
        with file.open("wb") as stream:
            for _ in range(nbytes >> 20):
                stream.write(memory)
        drop_cache([file])
        seconds = read_files([file], direct=True)
    finally:
        file.unlink(missing_ok=True)
    if seconds is None:
        raise NotAvailable("the file system has no direct reads")
    return nbytes / seconds
