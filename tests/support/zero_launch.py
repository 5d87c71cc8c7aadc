"""Starts ranks through the real launchers, or as forks, for many cases per run; reads their results."""

import fcntl
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANKS = Path(__file__).parent / "ranks.py"
WORKER = ROOT / "tests" / "distributed" / "worker.py"
BIN = Path(sys.executable).parent


_kept: list[socket.socket] = []


def free_port() -> str:
    """Returns a port of this machine. Until this process ends, the system gives it to nobody who asks for any."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that sets it, too, may listen
    kept.bind(("127.0.0.1", 0))
    _kept.append(kept)
    return str(kept.getsockname()[1])


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "GLOO_SOCKET_IFNAME": "lo",
    }


@functools.cache
def forks() -> subprocess.Popen:
    """Returns the process that forks ranks, one for all runs of this process; it ends with this process."""
    return subprocess.Popen(
        [sys.executable, RANKS], env=environment(), cwd=ROOT, stdin=-1, stdout=-1, text=True
    )


def start(arguments: list[str], ranks: int, printed: Path, command: Sequence[str] = ()) -> str:
    """Runs a script on a number of CPU ranks, by a launcher or by forks; returns the output."""
    pytest.importorskip("deepspeed")
    if command:
        launcher = [*command, free_port(), *arguments]
        with printed.open("w") as out:
            codes = [
                subprocess.call(launcher, env=environment(), cwd=ROOT, stdout=out, stderr=out, timeout=600)
            ]
    else:
        script, *others = arguments
        print(json.dumps([ranks, free_port(), script, others, str(printed)]), file=forks().stdin, flush=True)
        codes = json.loads(forks().stdout.readline())
    text = printed.read_text(errors="replace")
    assert not any(codes), f"{codes}: {text[-6000:]}"
    return text


def launch(
    folder: Path, cases: list[dict], ranks: int, command: Sequence[str] = (), worker: Path = WORKER
) -> list[dict]:
    """Runs the cases on a number of CPU ranks; returns the results of each rank: {case: result}."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    start(
        [str(worker), "--cases", str(folder / "cases.json"), "--out", str(folder)],
        ranks,
        folder / "printed",
        command,
    )
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the same path for all processes of one test run."""
    root = factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[], list[dict]]) -> list[dict]:
    """Returns the result of `make`, computed by one test process for all of them."""
    root = shared_folder(factory)
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = root / f"{name}.json"
        if not file.exists():
            made = json.dumps(make())
            file.write_text(made)
        return json.loads(file.read_text())


def check_exact(found: dict, ranks: int, is_read: bool = True) -> None:
    """Checks every loaded case on every rank: equal outputs, and at most one rank's share of bytes."""
    assert "error" not in found, found["trace"]
    assert found["logits_equal"] == [True] * 3
    assert found["tokens_equal"]
    assert (
        found["resident"]
        == found["packed_shard"]
        == sum(-(-(nbytes // 2) // ranks) * 2 for nbytes in found["rows"])
    )
    assert found["packed_shard"] - found["packed_total"] / ranks < 2 * len(found["rows"])
    if is_read:
        assert (
            abs(found["packed_read"] - found["packed_total"] / ranks) <= 0.02 * found["packed_total"] / ranks
        )
