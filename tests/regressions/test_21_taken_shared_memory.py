"""Tests that shared memory whose name another user has taken does not end a load."""

import os
import shutil

import pytest
import torch

from hfq.checkpoint import Checkpoint, Reader, shared_memory
from hfq.checkpoint.shared_memory import SharedMemory
from hfq.loading.read_weights import _identity
from tests.support.models import GPTQ, load

NBYTES = 4096


def fives(memory):
    memory[:] = b"\x05" * len(memory)


def names(key="key"):
    return [f"hfq-{os.getuid()}-{key}", *(f"hfq-{os.getuid()}-{key}-{number}" for number in range(1, 8))]


@pytest.mark.parametrize("obstacle", ["pipe", "link", "open to others"])
@pytest.mark.parametrize("suffix", ["", ".part"])
def test_processes_agree_on_the_next_name(tmp_path, obstacle, suffix):
    taken = tmp_path / (names()[0] + suffix)
    if obstacle == "pipe":
        os.mkfifo(taken, 0o600)
    elif obstacle == "link":
        taken.symlink_to("/etc/passwd")
    else:
        taken.touch(0o666)
        taken.chmod(0o666)
    first = SharedMemory.open("key", NBYTES, fives, tmp_path)
    second = SharedMemory.open("key", NBYTES, lambda memory: 1 / 0, tmp_path)
    assert (first.was_filled, second.was_filled, second.memory[0]) == (True, False, 5)
    assert (tmp_path / names()[1]).stat().st_size == NBYTES
    assert os.path.lexists(taken)


def test_without_a_free_name_each_process_has_its_own_copy(tmp_path):
    for name in names():
        (tmp_path / name).mkdir()
    assert SharedMemory.open("key", NBYTES, fives, tmp_path) is None


def test_a_load_goes_on_with_another_name(tmp_path, monkeypatch):
    """The name of each shared memory of the load is taken."""
    original = SharedMemory.open.__func__

    def taken(cls, key, nbytes, fill, **options):
        (tmp_path / names(key)[0]).mkdir()
        return original(cls, key, nbytes, fill, tmp_path, **options)

    monkeypatch.setattr(SharedMemory, "open", classmethod(taken))
    model = load(GPTQ, {"": "cpu"}, cpu_memory="shared")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, load(GPTQ, {"": "cpu"})(tokens).logits)
    assert any(path.is_file() for path in tmp_path.iterdir())


def test_a_file_that_is_changed_in_place_has_another_name_though_its_time_is_restored(tmp_path):
    path = shutil.copytree(GPTQ, tmp_path / "model") / "model.safetensors"

    class Plan:
        requests = {"buffer": []}

    class Buffer:
        name, nbytes = "buffer", 0

    def identity():
        reader = Reader(Checkpoint.open(path.parent))
        source = next(iter(Checkpoint.open(path.parent).tensors.values())).range
        request = type("Request", (), {"source": source, "targets": ()})
        Plan.requests["buffer"] = [request]
        return _identity(Plan, Buffer, reader)

    before, times = identity(), path.stat()
    assert identity() == before
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_mtime_ns == times.st_mtime_ns
    assert identity() != before


def test_names_are_few():
    assert len(names()) == shared_memory._MOST_NAMES
