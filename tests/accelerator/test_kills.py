"""Tests that a process that is killed beside an accelerator leaves nothing behind the next load."""

import functools
import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch

from hfq.checkpoint.shared_memory import SharedMemory
from tests.support import programs
from tests.support.models import GPTQ, load, logits

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs shared memory"),
]
TOKENS = torch.arange(8)[None]
MAPS = {
    "the same layers": {"": "sim:0", "model.layers.1": "cpu", "model.layers.2": "cpu"},
    "other layers": {"": "sim:0", "model.layers.0": "cpu"},
}
LEFT = {
    "while it is filled": [".part"],
    "after it is filled": [""],
    "while it is pinned": [""],
    "in a forward pass": [""],
}
"""The suffix of the file that a process leaves, by the moment at which it is killed."""


@pytest.fixture(scope="module")
def shared():
    """A folder of the node's shared memory, which other processes do not use."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return Path(shutil.copytree(GPTQ, tmp_path_factory.mktemp("killed") / "model"))


@pytest.fixture(scope="module")
def killed(path, shared):
    """killed(moment) → exit code of a process that is killed at that moment."""
    with programs.start("kill_beside_accelerator", path, shared, OMP_NUM_THREADS="1") as program:

        def run(moment: str) -> int:
            print(moment, file=program.stdin, flush=True)
            return int(program.stdout.readline())

        yield run
        program.communicate(timeout=60)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Returns bytes and time of modification of every file."""
    return {each.name: (each.read_bytes(), each.stat().st_mtime_ns) for each in folder.iterdir()}


@pytest.mark.parametrize("placement", MAPS)
@pytest.mark.parametrize("moment", LEFT)
def test_the_load_after_a_kill_is_right_and_leaves_nothing(
    sim, monkeypatch, path, shared, killed, placement, moment
):
    before = contents(path)
    assert killed(moment) == -signal.SIGKILL
    assert [each.suffix for each in shared.iterdir()] == LEFT[moment]
    monkeypatch.setattr(SharedMemory, "open", functools.partial(SharedMemory.open, folder=shared))
    model = load(path, MAPS[placement], cpu_memory="shared")
    assert len(list(shared.iterdir())) == 1
    found = logits(model, TOKENS.to("sim:0"))
    assert torch.equal(found, logits(load(path, {"": "sim:0"}), TOKENS.to("sim:0")))
    del model
    gc.collect()
    assert list(shared.iterdir()) == []
    assert contents(path) == before
