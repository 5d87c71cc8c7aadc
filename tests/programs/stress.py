"""`make stress`: loads, kills and endures; writes the table of SECURITY.md.

Exit code 1: an outcome was wrong. Bounded to about ten minutes on two cores.
"""

import argparse
import gc
import hashlib
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

import hfq
from tests.support import tiny_models
from tests.support.models import load, logits

ROOT = Path(__file__).parents[2]
MARKED = re.compile(r"(<!-- table: stress, made by `make stress` -->\n).*?(<!-- end of table -->)", re.DOTALL)
SOURCE = tiny_models.DATA / "tiny-llama"
TOKENS = torch.arange(8)[None]
PLACEMENTS = {"memory": None, "disk": {"": "disk"}, "mixed": {"": "cpu", "model.layers": "disk"}}
GENERATED = 50
"""Tokens of one call of `generate`; its KV cache is gone before the next."""


class Row(NamedTuple):
    """A row of the table."""

    what: str
    count: str
    outcome: str
    is_right: bool


def fork(work: Callable[[], object]) -> int:
    """Runs work in a child, whose exit code is 1 after an exception; returns its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        os._exit(code)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def asked(work: Callable[[], object]) -> str:
    """Returns what work returns in a child, as text; empty after an exception."""
    answer, question = os.pipe()
    child = fork(lambda: os.write(question, str(work()).encode()))
    os.close(question)
    with open(answer, "rb") as stream:
        text = stream.read().decode()
    exit_code(child)
    return text


def kill_at_random(work: Callable[[], object], seconds: float, chance: random.Random) -> int:
    """Kills the work in a child at a random moment; returns its exit code, -9 if it was still running."""
    child = fork(work)
    time.sleep(chance.uniform(0, seconds))
    os.kill(child, signal.SIGKILL)
    return exit_code(child)


def content(folder: Path) -> str:
    """Returns a digest of all files of a folder."""
    files = sorted(folder.iterdir())
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()


def load_together(times: int) -> Row:
    """Loads one checkpoint in four processes at the same time, by each way of CPU memory."""
    expected = logits(load(), TOKENS)

    def load_often() -> None:
        for n in range(times):
            found = logits(load(cpu_memory=("auto", "shared", "private", "mmap")[n % 4]), TOKENS)
            if not torch.equal(found, expected):
                raise ValueError("The logits differ.")

    codes = [exit_code(child) for child in [fork(load_often) for _ in range(4)]]
    count = f"4 processes × {times} loads"
    return Row("Loads of one folder", count, f"{codes.count(0)} of 4 processes right", not any(codes))


def kill_saves(folder: Path, times: int, chance: random.Random) -> Row:
    """Kills `save_pretrained` over an older checkpoint of the same config."""
    target = folder / "saved"
    model = load()
    model.save_pretrained(folder / "old")
    old = tiny_models.digests(folder / "old")
    model.model.norm.weight.data.mul_(2)
    started = time.perf_counter()
    model.save_pretrained(folder / "new")
    seconds = time.perf_counter() - started
    new = tiny_models.digests(folder / "new")
    replace = os.replace

    def save() -> None:
        os.replace = lambda *names: (replace(*names), time.sleep(seconds / 2))  # so that kills fall between
        model.save_pretrained(target)

    killed = olds = news = 0
    while killed < times:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder / "old", target)
        was_running = kill_at_random(save, 6 * seconds, chance) != 0
        found = tiny_models.digests(target)
        load(target)
        killed += was_running
        olds, news = olds + (was_running and found == old), news + (was_running and found == new)
        if found not in (old, new):
            return Row("SIGKILL in `save_pretrained`", f"{killed} kills", "neither old nor new", False)
    outcome = f"old checkpoint complete {olds} times, new {news} times"
    return Row("SIGKILL in `save_pretrained`", f"{killed} kills", outcome, True)


def kill_quantizations(folder: Path, times: int, chance: random.Random) -> Row:
    """Kills `hfq.quantize` and resumes it, until it is complete, over and over."""
    ids = transformers.AutoTokenizer.from_pretrained(SOURCE)((SOURCE / "held_out.txt").read_text()[:6000])
    dataset = list(torch.tensor(ids["input_ids"])[: 12 * 64].view(12, 64))
    recipe, target = hfq.Recipe("gptq", bits=4, group_size=64), folder / "quantized"

    def quantize(output_dir: Path) -> None:
        hfq.quantize(
            SOURCE, recipe, output_dir, dataset=dataset, num_calibration_samples=12, max_seq_length=64
        )

    whole = folder / "whole" / target.name
    whole.parent.mkdir()
    started = time.perf_counter()
    exit_code(fork(lambda: quantize(whole)))
    seconds, expected = time.perf_counter() - started, content(whole)
    killed = resumed = wrong = 0
    while killed < times or not target.exists():
        if target.exists():
            shutil.rmtree(target)
        if killed < times:
            killed += kill_at_random(lambda: quantize(target), seconds, chance) != 0
        else:
            exit_code(fork(lambda: quantize(target)))
        if target.exists():
            resumed, wrong = resumed + 1, wrong + (content(target) != expected)
    outcome = f"{resumed - wrong} of {resumed} completed runs equal the uninterrupted one in every byte"
    return Row("SIGKILL in `hfq.quantize`, resumed", f"{killed} kills", outcome, not wrong)


def resources() -> tuple[int, int, int]:
    """Returns the number of descriptors, the number of threads, and the resident KiB of this process."""
    gc.collect()
    time.sleep(0.2)  # a joined thread leaves the system's count a moment later
    status = Path("/proc/self/status").read_text()
    threads, kib = (int(re.search(rf"^{name}:\s+(\d+)", status, re.M)[1]) for name in ("Threads", "VmRSS"))
    return len(os.listdir("/proc/self/fd")), threads, kib


def load_and_unload(name: str, times: int) -> Row:
    def cycle() -> None:
        logits(load(device_map=PLACEMENTS[name]), TOKENS)

    def measure() -> str:
        for _ in range(5):
            cycle()
        found = [*resources()]
        for half in (times // 2, times - times // 2):
            for _ in range(half):
                cycle()
            found += resources()
        return " ".join(map(str, found))

    fds, threads, rss, _, _, rss_half, fds_after, threads_after, rss_after = map(
        int, asked(measure).split() or [0] * 9
    )
    outcome = (
        f"descriptors {fds} → {fds_after}, threads {threads} → {threads_after}, "
        f"RSS {rss / 1024:.0f} → {rss_half / 1024:.0f} (half) → {rss_after / 1024:.0f} MiB"
    )
    is_right = 0 < fds_after <= fds and threads_after <= threads
    return Row(f"Load, forward, unload: {name}", f"{times} cycles", outcome, is_right)


def generate_from_disk(times: int) -> Row:
    def measure() -> str:
        model = load(device_map=PLACEMENTS["disk"])
        found = []
        for _ in range(max(2, times // GENERATED)):
            model.generate(
                TOKENS, max_new_tokens=GENERATED, min_new_tokens=GENERATED, do_sample=False, pad_token_id=0
            )
            found.append(resources()[2])
        return f"{found[len(found) // 4]} {found[-1]} {len(found) * GENERATED}"

    quarter, end, tokens = map(int, asked(measure).split() or [0] * 3)
    outcome = f"RSS {quarter / 1024:.0f} MiB after a quarter, {end / 1024:.0f} MiB at the end"
    return Row("Tokens from disk", f"{tokens:,} tokens", outcome, 0 < end < 1.05 * quarter)


def facts(seconds: float, seed: int) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return (
        f"Commit {commit or 'unknown'}, hfq {hfq.__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}, {platform.system()} with "
        f"{os.cpu_count()} CPUs,\n{time.strftime('%Y-%m-%d')}, {seconds:.0f} s, seed {seed}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--divide", type=int, default=1, help="divisor of all counts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    parser.add_argument("--page", type=Path, help="page whose table is written")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    chance, divide, started = random.Random(arguments.seed), arguments.divide, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hfq-stress-") as name:
        folder = Path(name)
        measurements = [
            lambda: load_together(max(1, 20 // divide)),
            lambda: kill_saves(folder, max(1, 50 // divide), chance),
            lambda: kill_quantizations(folder, max(1, 50 // divide), chance),
            *(lambda name=name: load_and_unload(name, max(1, 200 // divide)) for name in PLACEMENTS),
            lambda: generate_from_disk(2000 // divide),
        ]
        rows = []
        for measure in measurements:
            rows.append(measure())
            print(*rows[-1][:3], "" if rows[-1].is_right else "WRONG", sep=" | ", flush=True)
    if arguments.page is not None:
        table = "".join(f"| {row.what} | {row.count} | {row.outcome} |\n" for row in rows)
        text = f"\n| Measured | Count | Outcome |\n|---|---|---|\n{table}\n"
        text += facts(time.perf_counter() - started, arguments.seed) + "\n\n"
        page = arguments.page.read_text(encoding="utf-8")
        arguments.page.write_text(
            MARKED.sub(lambda found: f"{found[1]}{text}{found[2]}", page), encoding="utf-8"
        )
    sys.exit(not all(row.is_right for row in rows))


if __name__ == "__main__":
    main()
