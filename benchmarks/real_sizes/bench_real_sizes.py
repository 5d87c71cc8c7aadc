"""`python -m benchmarks real_sizes`: whole models of published sizes, against llama.cpp on the same machine.

Random models of real shapes are made here, and deleted afterwards. Each measurement has its own process, in a
memory cgroup that counts the page cache.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Type

from benchmarks.checkpoints import checkpoint_files
from benchmarks.memory_limits import warm_cache
from benchmarks.real_sizes.memory_group import memory_group
from benchmarks.real_sizes.random_gguf import write_gguf
from benchmarks.real_sizes.random_safetensors import write_safetensors
from benchmarks.real_sizes.shapes import SHAPES, Shape, set_routing
from benchmarks.records import Record, median, rotated, select
from hfq.errors import HfqError, SetupError
from hfq.machine_profile.machine_facts import machine_facts
from hfq.machine_profile.machine_limits import drop_cache
from hfq.machine_profile.worker_process import Worker
from hfq.plots.charts import Chart
from hfq.tables import Report, Table, Target

__all__ = ["CASES", "Case", "bench_real_sizes"]

_WORKER = "benchmarks.real_sizes.worker"
_TYPES = {"": Type.Q4_K, "output": Type.Q6_K}
_GGUF, _GPTQ = "gguf", "gptq4"
_PROMPTS = (128, 512)
_TOKENS, _TOKENS_FROM_DISK = 16, 12
_READ_AHEAD, _SECTOR = 128, 4096


@dataclass(frozen=True)
class Contender:
    """One way to run a model.

    Attributes:
        name: Name in tables.
        runtime: A name of `RUNTIMES`.
        format: `gguf`, or a layout of `benchmarks.checkpoints`.
        has_short_read_ahead: True to read the file through a loop device with a read-ahead of 128 KiB.
    """

    name: str
    runtime: str
    format: str
    has_short_read_ahead: bool = False


_LLAMA = Contender("llama.cpp, mapped", "llama.cpp", _GGUF)
_LLAMA_128 = Contender("llama.cpp, read-ahead 128 KiB", "llama.cpp", _GGUF, has_short_read_ahead=True)
_HFQ = (Contender("hfq, GPTQ", "hfq", _GPTQ), Contender("hfq, the same GGUF", "hfq", _GGUF))


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: Name of the row.
        shape: A name of `SHAPES`.
        device_map: Device map of hfq.
        limit: Memory limit in bytes; None for none.
        is_skewed: True if experts' frequencies follow Zipf's law.
        least: Required ratio of the decoding speed to llama.cpp's.
    """

    name: str
    shape: str
    device_map: Any
    limit: float | None = None
    is_skewed: bool = False
    least: float = 1.0

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """Ways to run it; the last one is the bar.

        With a memory limit, a long read-ahead of the disk would make llama.cpp read most experts many times.
        """
        return (*_HFQ, _LLAMA if self.limit is None else _LLAMA_128)


_LAYERS_ON_DISK = {"": "cpu", "model.layers": "disk"}
CASES = (
    Case("Qwen3-30B-A3B, resident", "qwen3-30b-a3b", {"": "cpu"}, least=0.9),
    Case("Qwen3-30B-A3B in 8 GB", "qwen3-30b-a3b", "auto", 8e9, least=1.3),
    Case("Qwen3-30B-A3B in 4 GB", "qwen3-30b-a3b", "auto", 4e9, least=1.3),
    Case("Qwen3-30B-A3B in 8 GB, skewed", "qwen3-30b-a3b", "auto", 8e9, True, least=1.3),
    Case("Qwen3-30B-A3B in 4 GB, skewed", "qwen3-30b-a3b", "auto", 4e9, True, least=1.3),
    Case("Llama-3-8B, resident", "llama-3-8b", {"": "cpu"}),
    Case("Llama-3-8B on disk, 4 GB", "llama-3-8b", _LAYERS_ON_DISK, 4e9, least=2.0),
    Case("Llama-2-13B on disk, 4 GB", "llama-2-13b", _LAYERS_ON_DISK, 4e9, least=2.0),
)
"""The rows of the table."""


PUBLISHED = (
    (
        "colibri",
        "GLM-5.2, 744B, int4",
        "25 GB of RAM, disk of 1 GB/s",
        "0.05 to 0.1",
        "github.com/JustVugg/colibri",
    ),
    (
        "colibri",
        "GLM-5.2, 744B, int4",
        "121 GB of RAM, NVMe of PCIe 5",
        "1.23",
        "github.com/JustVugg/colibri",
    ),
    ("colibri", "DeepSeek-V4-Flash", "Ryzen 5950X, CPU alone", "1.24", "colibri issue 1119"),
    ("ds4", "DeepSeek-V4-Flash", "M4 Max, 36 GB", "4.29 to 4.62", "github.com/antirez/ds4, issue 840"),
    ("FreeToken 0.2", "Qwen3.6-35B-A3B, NVFP4", "RTX 2050, 4 GB", "21", "FlashML-org/FreeToken, issue 239"),
    (
        "KTransformers",
        "DeepSeek-V3, 671B, Q4_K_M",
        "14 GB of VRAM, 382 GB of RAM",
        "8.7 to 13.7",
        "kvcache-ai/ktransformers",
    ),
)
"""What other projects publish: (project, model, hardware, decoded tokens per second, source)."""


def bench_real_sizes(
    folder: Path,
    shapes: Sequence[str] | None,
    threads: int,
    rounds: int,
    quick: bool,
    say: Callable[[str], None],
) -> Report:
    """Runs the benchmark.

    Args:
        folder: Folder for the models. They are deleted afterwards.
        shapes: Names of `SHAPES`. None means all that have a case.
        threads: Number of threads.
        rounds: Number of interleaved rounds.
        quick: True for two layers and no memory limits: a check, not a measurement.
        say: Function that receives progress lines.

    Raises:
        SetupError: A name is unknown, or the disk has too little free space.
    """
    cases = [case for case in CASES if shapes is None or case.shape in shapes]
    for name in shapes or ():
        if name not in SHAPES:
            raise SetupError(
                f"--shape {name!r} is not a shape.",
                expected=", ".join(SHAPES),
                found=name,
                fix="Pass one of these names.",
            )
    if importlib.util.find_spec("llama_cpp") is None:
        say("llama.cpp is left out: `pip install llama-cpp-python==0.3.36` builds it")
    records: list[Record] = []
    for name in dict.fromkeys(case.shape for case in cases):
        shape = SHAPES[name].shortened() if quick else SHAPES[name]
        with _models(folder / "real_sizes", name, shape, say) as models:
            for case in (case for case in cases if case.shape == name):
                for path in models.values():
                    set_routing(path, shape, case.is_skewed)
                for number in range(rounds):
                    records += _round(case, models, threads, number, quick, say)
    return Report(
        "Whole models of real sizes",
        _facts(folder, threads, rounds),
        [_table(cases, records), _published()],
        [_target(case, records) for case in cases],
        records,
        _chart(cases, records),
    )


@contextlib.contextmanager
def _models(folder: Path, name: str, shape: Shape, say: Callable[[str], None]) -> Iterator[dict[str, Path]]:
    """Makes the checkpoints of a shape, and deletes them afterwards."""
    models = {kind: folder / f"{name}-{kind}" for kind in (_GGUF, _GPTQ)}
    try:
        for kind, path in models.items():
            say(f"{name}: making {kind}")
            shutil.rmtree(path, ignore_errors=True)
            if kind == _GGUF:
                write_gguf(path, shape, _TYPES)
            else:
                write_safetensors(path, shape, kind)
        yield models
    finally:
        for path in models.values():
            shutil.rmtree(path, ignore_errors=True)


def _round(
    case: Case, models: dict[str, Path], threads: int, number: int, quick: bool, say: Callable[[str], None]
) -> list[Record]:
    """Measures every contender of a case once."""
    contenders = {contender.name: contender for contender in case.contenders}
    if importlib.util.find_spec("llama_cpp") is None:
        contenders = {name: each for name, each in contenders.items() if each.runtime == "hfq"}
    records = []
    for name in rotated(list(contenders), number):
        say(f"{case.name}, round {number + 1}: {name}")
        started = {"case": case.name, "contender": name, "round": number}
        try:
            found = _measure(case, contenders[name], models, threads, quick)
        except (HfqError, OSError, subprocess.CalledProcessError) as error:
            say(f"failed: {error}")
            found = {"error": str(error)}
        say(", ".join(f"{key} {value:.3g}" for key, value in found.items() if isinstance(value, float)))
        records.append(started | found)
    return records


def _measure(case: Case, contender: Contender, models: dict[str, Path], threads: int, quick: bool) -> Record:
    path = models[contender.format]
    files = checkpoint_files(path)
    for kind, other in models.items():
        if kind != contender.format:
            drop_cache(checkpoint_files(other))
    limit = None if quick or case.limit is None else int(case.limit)
    (warm_cache if limit is None else drop_cache)(files)
    with contextlib.ExitStack() as stack:
        file = path if contender.runtime == "hfq" else path / "model.gguf"
        if contender.has_short_read_ahead:
            file = stack.enter_context(_loop_device(file))
        group = stack.enter_context(memory_group(limit))
        worker = stack.enter_context(
            Worker(
                _WORKER,
                runtime=contender.runtime,
                path=str(file),
                threads=threads,
                group=group,
                device_map=case.device_map,
            )
        )
        load = _ask(worker, "load")
        found = {"load_seconds": load["seconds"], "anonymous": float(load["anonymous"])}
        for tokens in (8, *_PROMPTS) if limit is None else _PROMPTS[-1:]:
            found[f"prefill_{tokens}"] = tokens / _ask(worker, "prefill", tokens=tokens)["seconds"]
        decoded = _ask(worker, "decode", tokens=_TOKENS if limit is None else _TOKENS_FROM_DISK)
        return found | {f"decode_{key}": value for key, value in decoded.items()}


def _ask(worker: Worker, question: str, **arguments: Any) -> dict:
    answer = worker.ask(question, **arguments)
    if "error" in answer:
        raise OSError(answer["error"])
    return answer


@contextlib.contextmanager
def _loop_device(file: Path) -> Iterator[Path]:
    """Makes a loop device over a file, with a read-ahead of 128 KiB. Only root can.

    Such a device has whole sectors, so the file is longer meanwhile.
    """
    nbytes = file.stat().st_size
    os.truncate(file, -(-nbytes // _SECTOR) * _SECTOR)
    made = ""
    try:
        made = subprocess.run(
            ["losetup", "--direct-io=on", "--read-only", "--find", "--show", str(file)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        subprocess.run(["blockdev", "--setra", str(2 * _READ_AHEAD), made], check=True, capture_output=True)
        yield Path(made)
    finally:
        if made:
            subprocess.run(["losetup", "--detach", made], check=False, capture_output=True)
        os.truncate(file, nbytes)


def _of(records: list[Record], case: Case, contender: str, value: Callable[[Record], float]) -> float | None:
    return median(records, value, case=case.name, contender=contender)


def _speed(record: Record) -> float:
    return 1 / record["decode_seconds"]


def _facts(folder: Path, threads: int, rounds: int) -> dict[str, str]:
    return machine_facts(folder) | {
        "models": "random weights of real shapes; GPTQ of 4 bits with groups of 128 and 16-bit embeddings and "
        "heads; GGUF of Q4_K with a head of Q6_K and embeddings of Q8_0",
        "threads": str(threads),
        "rounds": f"{rounds}, interleaved, a fresh process each; medians",
        "memory limits": "memory cgroups that count the page cache; files evicted before the load",
        "tokens": "random; prompts in an empty context, decoding behind 9 tokens",
    }


def _table(cases: Sequence[Case], records: list[Record]) -> Table:
    rows = []
    for case in cases:
        for contender in case.contenders:
            if not select(records, case=case.name, contender=contender.name):
                continue
            rows.append([case.name, contender.name, *_cells(case, contender.name, records)])
    return Table(
        "Speed",
        "Own memory is anonymous memory after the load. Disk is what the process read from devices per decoded "
        "token. Hits are routed experts that the cache had, or that a guess had begun to read. The last column is the ratio of the decoding speeds.",
        (
            "model",
            "contender",
            "load",
            "own memory",
            "prefill 128",
            "prefill 512",
            "decode",
            "CPU time per token",
            "disk per token",
            "hits",
            "of llama.cpp",
        ),
        rows,
    )


def _published() -> Table:
    return Table(
        "What others publish",
        "Decoded tokens per second on their own machines, as their projects state them. Nothing of this was "
        "measured here.",
        ("project", "model", "hardware", "tokens/s", "source"),
        PUBLISHED,
    )


def _cells(case: Case, contender: str, records: list[Record]) -> list[str]:
    def cell(text: str, value: Callable[[Record], float]) -> str:
        found = _of(records, case, contender, value)
        return "-" if found is None else text.format(found)

    ratio = _ratio(case, contender, records)
    return [
        cell("{:.1f} s", lambda record: record["load_seconds"]),
        cell("{:.2f} GB", lambda record: record["anonymous"] / 1e9),
        cell("{:.1f}/s", lambda record: record["prefill_128"]),
        cell("{:.1f}/s", lambda record: record["prefill_512"]),
        cell("{:.2f}/s", _speed),
        cell("{:.2f} s", lambda record: record["decode_cpu_seconds"]),
        cell("{:.3f} GB", lambda record: record["decode_device_read"] / 1e9),
        cell("{:.0%}", lambda record: record["decode_hit_rate"]),
        "-" if ratio is None else f"{ratio:.2f}",
    ]


def _ratio(case: Case, contender: str, records: list[Record]) -> float | None:
    """Returns a contender's decoding speed, divided by llama.cpp's."""
    bar, found = (_of(records, case, name, _speed) for name in (case.contenders[-1].name, contender))
    return None if bar is None or found is None else found / bar


def _target(case: Case, records: list[Record]) -> Target:
    ratios = [_ratio(case, contender.name, records) for contender in _HFQ]
    best = max((ratio for ratio in ratios if ratio is not None), default=None)
    return Target(f"{case.name}: decoding against llama.cpp", best, case.least, at_least=True)


def _chart(cases: Sequence[Case], records: list[Record]) -> Chart:
    names = list(dict.fromkeys(each.name for case in cases for each in case.contenders))
    values = {name: [_of(records, case, name, _speed) for case in cases] for name in names}
    return Chart("Decoded tokens per second (higher is better)", [case.name for case in cases], values)
