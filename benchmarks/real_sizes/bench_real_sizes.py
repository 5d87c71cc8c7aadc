"""`python -m benchmarks real_sizes`: whole models of published sizes, against llama.cpp on the same machine.

Random models of real shapes are made here, and deleted afterwards. Each measurement has its own process, in a
memory cgroup that counts the page cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Type

from benchmarks.checkpoints import checkpoint_files
from benchmarks.memory_limits import warm_cache
from benchmarks.real_sizes.cases import BF16, GGUF, Case, Contender, find_rows
from benchmarks.real_sizes.memory_group import memory_group
from benchmarks.real_sizes.random_gguf import write_gguf
from benchmarks.real_sizes.random_safetensors import write_safetensors
from benchmarks.real_sizes.rates import direct_rate, measure_rates
from benchmarks.real_sizes.real_sizes_report import real_sizes_report
from benchmarks.real_sizes.shapes import SHAPES, Shape, set_routing
from benchmarks.records import Record, rotated
from hfq.errors import HfqError, SetupError
from hfq.machine_profile.machine_facts import machine_facts
from hfq.machine_profile.machine_limits import drop_cache
from hfq.machine_profile.worker_process import Worker
from hfq.placement.estimate.profile import PUBLISHED, Profile
from hfq.tables import Report

__all__ = ["bench_real_sizes"]

_WORKER = "benchmarks.real_sizes.worker"
_TYPES = {"": Type.Q4_K, "output": Type.Q6_K}
_PROMPTS = (128, 512)
_TOKENS, _TOKENS_FROM_DISK, _MOST_SECONDS = 16, 12, 60
_RECORDED = 128
"""Tokens whose routing predicts the hits of the expert cache, where routing is skewed."""
_READ_AHEAD, _SECTOR = 128, 4096
_SHARE_OF_DISK = 0.9
"""Largest share of the free disk that an unquantized model takes."""


def bench_real_sizes(
    folder: Path,
    shapes: Sequence[str] | None,
    rows: Sequence[str] | None,
    threads: int,
    rounds: int,
    quick: bool,
    keep: bool,
    say: Callable[[str], None],
) -> Report:
    """Runs the benchmark.

    Args:
        folder: Folder for the models. They are deleted afterwards.
        shapes: Names of `SHAPES`. None means all that have a case.
        rows: Parts of the names of rows, see `find_rows`. None means all.
        threads: Number of threads.
        rounds: Number of interleaved rounds.
        quick: True for two layers and no memory limits: a check, not a measurement.
        keep: True to keep the models, and to use those of an earlier run.
        say: Function that receives progress lines.

    Raises:
        SetupError: A name is unknown, or the disk has too little free space.
    """
    for name in shapes or ():
        if name not in SHAPES:
            raise SetupError(
                f"--shape {name!r} is not a shape.",
                expected=", ".join(SHAPES),
                found=name,
                fix="Pass one of these names.",
            )
    chosen = find_rows(shapes, rows)
    if importlib.util.find_spec("llama_cpp") is None:
        say("llama.cpp is left out: `pip install llama-cpp-python==0.3.36` builds it")
        chosen = {case: [e for e in found if e.runtime != "llama.cpp"] for case, found in chosen.items()}
    records: list[Record] = []
    for name in dict.fromkeys(case.shape for case in chosen):
        shape = SHAPES[name].shortened() if quick else SHAPES[name]
        own = {case: contenders for case, contenders in chosen.items() if case.shape == name}
        formats = {each.format for contenders in own.values() for each in contenders}
        with _models(folder / "real_sizes", name, shape, formats, keep, say) as models:
            profile = PUBLISHED
            if any(each.runtime == "hfq" for contenders in own.values() for each in contenders):
                say(f"{name}: measuring the machine")
                quantized = [path for kind, path in models.items() if kind != BF16]
                profile = measure_rates(folder, quantized, threads, quick)
            measuring = _Measuring(models, shape, profile, threads, quick, say)
            records += [
                record
                for case, contenders in own.items()
                for number in range(rounds)
                for record in measuring.round(case, contenders, number)
            ]
    return real_sizes_report(_facts(folder, threads, rounds), records)


@contextlib.contextmanager
def _models(
    folder: Path, name: str, shape: Shape, formats: Iterable[str], keep: bool, say: Callable[[str], None]
) -> Iterator[dict[str, Path]]:
    """Makes the checkpoints of a shape, and deletes them afterwards."""
    kinds = sorted(formats, key=lambda kind: (kind == BF16, kind))  # the unquantized one takes what is left
    models = {kind: folder / f"{name}-{kind}" for kind in kinds}
    try:
        for kind, path in models.items():
            if keep and path.exists():
                continue
            say(f"{name}: making {kind}")
            shutil.rmtree(path, ignore_errors=True)
            _make(path, shape, kind)
        yield models
    finally:
        for path in models.values():
            if not keep:
                shutil.rmtree(path, ignore_errors=True)


def _make(path: Path, shape: Shape, kind: str) -> None:
    """Writes a model. An unquantized one has fewer layers if the disk is too small."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as unfinished:
        made = Path(unfinished, path.name)
        if kind == GGUF:
            write_gguf(made, shape, _TYPES)
        elif kind == BF16:
            write_safetensors(made, shape.within(_SHARE_OF_DISK * shutil.disk_usage(path.parent).free), kind)
        else:
            write_safetensors(made, shape, kind)
        made.rename(path)


@dataclasses.dataclass(frozen=True)
class _Measuring:
    """Measures the contenders of one shape.

    Attributes:
        models: {format: checkpoint}.
        shape: Their shape.
        profile: Rates of the machine, with which speed is predicted.
        threads: Number of threads.
        quick: True for no memory limits.
        say: Function that receives progress lines.
    """

    models: dict[str, Path]
    shape: Shape
    profile: Profile
    threads: int
    quick: bool
    say: Callable[[str], None]

    def round(self, case: Case, contenders: Sequence[Contender], number: int) -> Iterator[Record]:
        """Measures every contender of a case once."""
        for kind, path in self.models.items():
            if kind != BF16:
                set_routing(path, self.shape, case.is_skewed)
        by_name = {contender.name: contender for contender in contenders}
        for name in rotated(list(by_name), number):
            self.say(f"{case.name}, round {number + 1}: {name}")
            started = {"case": case.name, "contender": name, "round": number}
            try:
                found = self._measure(case, by_name[name])
            except (HfqError, OSError, subprocess.CalledProcessError) as error:
                self.say(f"failed: {error}")
                found = {"error": str(error)}
            self.say(
                ", ".join(f"{key} {value:.3g}" for key, value in found.items() if isinstance(value, float))
            )
            yield started | found

    def _measure(self, case: Case, contender: Contender) -> Record:
        path = self.models[contender.format]
        files, found, profile = checkpoint_files(path), self._about(contender), self.profile
        for other in self.models.values():
            drop_cache(checkpoint_files(other))
        limit = None if self.quick or case.limit is None else int(case.limit)
        if limit is None:
            warm_cache(files)
        elif contender.runtime == "hfq" and (rate := direct_rate(files)) is not None:
            found["raw_rate"], profile = rate, dataclasses.replace(profile, disk=rate)
        with contextlib.ExitStack() as stack:
            file = path / "model.gguf" if contender.runtime == "llama.cpp" else path
            if contender.has_short_read_ahead:
                file = stack.enter_context(_loop_device(file))
            options = {"runtime": contender.runtime, "path": str(file), "threads": self.threads}
            options |= {"options": dict(contender.options), "attention": contender.attention}
            group = stack.enter_context(memory_group(limit))
            worker = stack.enter_context(Worker(_WORKER, **options, group=group, device_map=case.device_map))
            load = _ask(worker, "load")
            found |= {"load_seconds": load["seconds"], "anonymous": float(load["anonymous"])}
            if contender.runtime == "hfq":
                found["predicted_seconds"] = _ask(worker, "predict", profile=profile.to_json())["seconds"]
            for tokens in (8, *_PROMPTS) if limit is None else _PROMPTS[-1:]:
                found[f"prefill_{tokens}"] = tokens / _ask(worker, "prefill", tokens=tokens)["seconds"]
            if contender.runtime == "hfq" and case.is_skewed:
                recorded = _ask(worker, "predict", profile=profile.to_json(), recorded=_RECORDED)
                found["predicted_recorded_seconds"] = recorded["seconds"]
            tokens = _TOKENS if limit is None else _TOKENS_FROM_DISK
            decoded = _ask(worker, "decode", tokens=tokens, most_seconds=_MOST_SECONDS)
            return found | {f"decode_{key}": value for key, value in decoded.items()}

    def _about(self, contender: Contender) -> Record:
        """Returns what a table tells about the model of a contender, if it has fewer layers."""
        if contender.format != BF16:
            return {}
        config = json.loads((self.models[BF16] / "config.json").read_text(encoding="utf-8"))
        layers, whole = config["num_hidden_layers"], self.shape.layers
        return {} if layers == whole else {"about": f"{layers} of {whole} layers"}


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


def _facts(folder: Path, threads: int, rounds: int) -> dict[str, str]:
    return machine_facts(folder) | {
        "models": "random weights of real shapes, with fewer layers where a row says so; GPTQ of 4 bits with "
        "groups of 128 and 16-bit embeddings and heads; GGUF of Q4_K with a head of Q6_K and embeddings of Q8_0",
        "threads": str(threads),
        "rounds": f"{rounds}, interleaved, a fresh process each; medians",
        "memory limits": "memory cgroups that count the page cache; files evicted before the load",
        "tokens": f"random; prompts in an empty context, decoding behind 9 tokens, for at most {_MOST_SECONDS} s "
        "after the third token",
        "accelerate": "plain transformers with its disk offload, which takes unquantized weights on a CPU; GPTQ "
        "needs gptqmodel there, and GGUF is dequantized while it is loaded",
    }
