"""Part 5: pinning of host memory, and copies to the device during computation."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, NotAvailable, Record, select
from benchmarks.gpu.report import Values
from benchmarks.gpu.timing import device_seconds
from hfq.tables import Table

__all__ = ["measure", "tables", "values"]

PORTABLE, READ_ONLY = 1, 8
"""Flags of cudaHostRegister."""

MADV_HUGEPAGE, MADV_NOHUGEPAGE = 14, 15
WHOLE, DRY_WHOLE = 4 << 30, 8 << 20
PIECES = (64, 1)
"""Numbers of pieces of the whole: 64 MiB and 4 GiB of 4 GiB."""


def measure(bench: Bench) -> Iterator[Record]:
    """Yields registrations of each kind of memory, and copies with and without computation."""
    nbytes = DRY_WHOLE if bench.is_dry else WHOLE
    for name, pages in (("small pages", MADV_NOHUGEPAGE), ("huge pages", MADV_HUGEPAGE)):
        with _anonymous(nbytes, pages) as memory:
            for pieces in PIECES:
                yield from _try(bench, name, pieces, lambda m=memory, p=pieces: _register(bench, m, p))
            if name == "huge pages":
                yield from _try(
                    bench, f"{name}, during products", 1, lambda m=memory: _register_beside(bench, m)
                )
    for name, flags, is_shared in (
        ("shared file in memory", PORTABLE, True),
        ("private map of a file", PORTABLE, False),
        ("read-only map of a file", PORTABLE, None),
        ("read-only map of a file, read-only flag", PORTABLE | READ_ONLY, None),
    ):
        with _mapped(bench.scratch / "mapped", nbytes // 4, is_shared) as memory:
            yield from _try(bench, name, 1, lambda m=memory, f=flags: _register(bench, m, 1, f))
    try:
        yield {"kind": "copy", **_copies(bench, nbytes // 4)}
    except Exception as error:
        yield bench.outlived("copy", error)


def tables(records: list[Record]) -> list[Table]:
    """Returns the rates of registrations, and of copies alone and during products."""
    pinned = []
    for record in records:
        if record["kind"] == "register":
            label = (record["memory"], str(record["pieces"]))
            if "missing" in record:
                pinned.append((*label, f"not measured: {record['missing']}", "-", "-"))
                continue
            rate = f"{record['seconds'] / record['nbytes'] * 1e9:.3f} s/GB" if record["code"] == 0 else "-"
            beside = f"{record['slowdown']:.2f}" if "slowdown" in record else "-"
            pinned.append((*label, str(record["code"]), rate, beside))
    copied = []
    for record in select(records, "copy"):
        copied = [
            ("copy alone", f"{record['alone'] / 1e9:.2f} GB/s"),
            ("copy during products", f"{record['beside'] / 1e9:.2f} GB/s"),
            ("products during the copy, over their time alone", f"{record['slowdown']:.2f}"),
        ]
    header = ("memory", "pieces", "code", "time", "products during it, over their time alone")
    return [
        Table("Registration of host memory", "cudaHostRegister; code 0 is success.", header, pinned),
        Table("Copies from pinned memory", "", ("what", "measured"), copied),
    ]


def values(records: list[Record], ceilings: dict[str, float]) -> Values:
    """Returns nothing: no rate of the link has an acceptance number."""
    return {}


def _try(bench: Bench, memory: str, pieces: int, call: Callable[[], Record]) -> Iterator[Record]:
    labels = {"memory": memory, "pieces": pieces}
    try:
        yield {"kind": "register", **labels, **call()}
    except Exception as error:
        yield bench.outlived("register", error, **labels)


def _register(bench: Bench, memory: mmap.mmap, pieces: int, flags: int = PORTABLE) -> Record:
    """Registers memory in pieces, and unregisters it."""
    runtime, address, step = _runtime(bench.device), _address(memory), len(memory) // pieces
    torch.zeros(1, device=bench.device)  # makes the context
    started, held, code = time.perf_counter(), [], 0
    for start in range(address, address + len(memory), step):
        code = int(runtime.cudaHostRegister(start, step, flags))
        if code:
            break
        held.append(start)
    seconds = time.perf_counter() - started
    for start in held:
        runtime.cudaHostUnregister(start)
    _clear_error(runtime)
    return {"code": code, "seconds": seconds, "nbytes": len(memory)}


def _register_beside(bench: Bench, memory: mmap.mmap) -> Record:
    """Registers memory while products run, and compares their time with that alone."""
    products = _products(bench)
    alone = device_seconds(products, bench.device)
    stream = torch.accelerator.current_stream(bench.device)
    first, last = (torch.Event(bench.device, enable_timing=True) for _ in range(2))
    stream.record_event(first)
    products()
    stream.record_event(last)
    found = _register(bench, memory, 1)
    last.synchronize()
    return found | {"slowdown": first.elapsed_time(last) / 1e3 / alone}


def _copies(bench: Bench, nbytes: int) -> Record:
    device = bench.device
    host = torch.ones(nbytes, dtype=torch.uint8).pin_memory()
    memory, copies = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.Stream(device)
    products = _products(bench)
    alone = device_seconds(lambda: memory.copy_(host, non_blocking=True), device)
    computing = device_seconds(products, device)
    stamps = [torch.Event(device, enable_timing=True) for _ in range(4)]
    torch.accelerator.synchronize(device)
    main = torch.accelerator.current_stream(device)
    main.record_event(stamps[0])
    products()
    main.record_event(stamps[1])
    with copies:
        copies.record_event(stamps[2])
        memory.copy_(host, non_blocking=True)
        copies.record_event(stamps[3])
    torch.accelerator.synchronize(device)
    copied = stamps[2].elapsed_time(stamps[3]) / 1e3
    slowdown = stamps[0].elapsed_time(stamps[1]) / 1e3 / computing
    return {"alone": nbytes / alone, "beside": nbytes / copied, "slowdown": slowdown}


def _products(bench: Bench) -> Callable[[], Any]:
    """Returns a call that computes about as long as 1 GiB is copied."""
    size, times = (64, 2) if bench.is_dry else (8192, 12)
    matrix = torch.randn(size, size, device=bench.device).mul_(0.01).bfloat16()

    def products() -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    return products


def _runtime(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    if not hasattr(module, "cudart"):
        raise NotAvailable(f"torch cannot register host memory for {device.type}")
    return module.cudart()


def _clear_error(runtime: Any) -> None:
    clear = getattr(runtime, "cudaGetLastError", None)
    if clear is not None:
        clear()


@contextlib.contextmanager
def _anonymous(nbytes: int, advice: int) -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(advice)
        _touch(memory)
        yield memory


@contextlib.contextmanager
def _mapped(file: Path, nbytes: int, is_shared: bool | None) -> Iterator[mmap.mmap]:
    """Maps a new file: shared, private, or with None read-only."""
    flags = mmap.MAP_PRIVATE if is_shared is False else mmap.MAP_SHARED
    protection = mmap.PROT_READ if is_shared is None else mmap.PROT_READ | mmap.PROT_WRITE
    try:
        with file.open("w+b") as stream:
            stream.truncate(nbytes)
            with mmap.mmap(stream.fileno(), nbytes) as memory:
                _touch(memory)
            with mmap.mmap(stream.fileno(), nbytes, flags=flags, prot=protection) as memory:
                yield memory
    finally:
        file.unlink(missing_ok=True)


def _touch(memory: mmap.mmap) -> None:
    torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


def _address(memory: mmap.mmap) -> int:
    """Returns the address of a map, which may be read-only."""
    return np.frombuffer(memory, dtype=np.uint8).ctypes.data
