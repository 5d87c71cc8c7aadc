"""One copy for all processes of a node: filled once, private when written to, gone with its last user,
whoever is killed.
"""

import contextlib
import errno
import gc
import logging
import os
import signal
import threading

import pytest

from hfq import CheckpointError
from hfq.checkpoint.shared_memory import SharedMemory
from tests.support import programs
from tests.support.checkpoint_files import refused

NBYTES = 1 << 20


@contextlib.contextmanager
def process(folder, role, nbytes=NBYTES, key="key"):
    """A process that opens shared memory and says so; it says how much is its own when asked by a line."""
    with programs.start("open_shared_memory", folder, role, nbytes, key) as started:
        try:
            yield started
        finally:
            started.kill()


def fives(memory):
    memory[:] = b"\x05" * len(memory)


def never(memory):
    raise AssertionError("filled twice")


def files(folder):
    return sorted(path.name for path in folder.iterdir())


NAME = f"hfq-{os.getuid()}-key"


def test_the_second_user_gets_what_the_first_has_filled(tmp_path):
    first = SharedMemory.open("key", NBYTES, fives, tmp_path)
    second = SharedMemory.open("key", NBYTES, never, tmp_path)
    assert (first.was_filled, second.was_filled) == (True, False)
    assert first.memory[:] == second.memory[:] == b"\x05" * NBYTES
    assert files(tmp_path) == [NAME]
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def test_what_is_written_stays_private(tmp_path):
    first = SharedMemory.open("key", NBYTES, fives, tmp_path)
    second = SharedMemory.open("key", NBYTES, never, tmp_path)
    first.memory[0] = 9
    assert (first.memory[0], second.memory[0], (tmp_path / NAME).read_bytes()[0]) == (9, 5, 5)


def test_another_key_is_another_arena(tmp_path):
    first = SharedMemory.open("key", NBYTES, fives, tmp_path)
    other = SharedMemory.open("other", NBYTES, lambda memory: None, tmp_path)
    assert (first.memory[0], other.memory[0]) == (5, 0)
    assert len(files(tmp_path)) == 2


def test_the_last_one_out_removes_the_file_and_its_map_stays_valid(tmp_path):
    first, second = (SharedMemory.open("key", NBYTES, fives, tmp_path) for _ in range(2))
    first.close()
    first.close()
    assert files(tmp_path) == [NAME]
    second.close()
    assert files(tmp_path) == []
    assert first.memory[5] == second.memory[5] == 5


def test_it_is_left_when_its_memory_is_not_used_any_more(tmp_path):
    memory = memoryview(SharedMemory.open("key", NBYTES, fives, tmp_path).memory)
    gc.collect()
    assert (files(tmp_path), memory[3]) == ([NAME], 5)
    del memory
    gc.collect()
    assert files(tmp_path) == []


def test_a_child_of_a_fork_leaves_nothing_in_its_parents_place(tmp_path):
    arena = SharedMemory.open("key", NBYTES, fives, tmp_path)
    child = os.fork()
    if not child:
        try:
            arena.close()
            os._exit(0 if files(tmp_path) == [NAME] and arena.memory[0] == 5 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert files(tmp_path) == [NAME]


def test_a_process_that_ends_removes_the_file(tmp_path):
    with process(tmp_path, "user") as user:
        assert user.stdout.readline() == "ready True\n"
        assert files(tmp_path) == [NAME]
        user.communicate("", timeout=30)
        assert user.returncode == 0
    assert files(tmp_path) == []


def test_a_killed_filler_leaves_what_the_next_one_replaces(tmp_path):
    with process(tmp_path, "filler") as filler:
        assert filler.stdout.readline() == "ready\n"
        assert files(tmp_path) == [f"{NAME}.part"]
        filler.kill()
        filler.wait()
    assert files(tmp_path) == [f"{NAME}.part"]
    arena = SharedMemory.open("key", NBYTES, fives, tmp_path)
    assert (arena.was_filled, arena.memory[:]) == (True, b"\x05" * NBYTES)
    assert files(tmp_path) == [NAME]


def test_who_waits_for_a_filler_that_is_killed_fills_himself(tmp_path):
    found = []
    with process(tmp_path, "filler") as filler:
        assert filler.stdout.readline() == "ready\n"
        waiter = threading.Thread(
            target=lambda: found.append(SharedMemory.open("key", NBYTES, fives, tmp_path))
        )
        waiter.start()
        waiter.join(0.05)
        assert waiter.is_alive()
        filler.kill()
        waiter.join(30)
    assert found[0].was_filled
    assert files(tmp_path) == [NAME]


def test_who_waits_for_a_filler_gets_what_it_filled(tmp_path):
    filling, go, found = threading.Event(), threading.Event(), {}

    def slow(memory):
        filling.set()
        go.wait(30)
        fives(memory)

    def open_as(name, fill):
        found[name] = SharedMemory.open("key", NBYTES, fill, tmp_path)

    threads = [threading.Thread(target=open_as, args=("filler", slow))]
    threads[0].start()
    filling.wait(30)
    threads += [threading.Thread(target=open_as, args=(index, never)) for index in range(3)]
    for thread in threads[1:]:
        thread.start()
    threads[1].join(0.05)
    assert threads[1].is_alive()
    go.set()
    for thread in threads:
        thread.join(30)
    assert {name: arena.was_filled for name, arena in found.items()} == {
        "filler": True,
        0: False,
        1: False,
        2: False,
    }


def test_a_killed_user_leaves_what_the_next_one_uses_and_another_removes(tmp_path):
    with process(tmp_path, "user") as user:
        assert user.stdout.readline() == "ready True\n"
        user.send_signal(signal.SIGKILL)
        user.wait()
    assert files(tmp_path) == [NAME]
    again = SharedMemory.open("key", NBYTES, never, tmp_path)
    assert (again.was_filled, again.memory[:]) == (False, b"\x05" * NBYTES)
    again.close()
    assert files(tmp_path) == []


def test_files_without_a_user_are_removed_and_no_others(tmp_path):
    used = SharedMemory.open("used", NBYTES, fives, tmp_path)
    for name in (
        f"hfq-{os.getuid()}-old",
        f"hfq-{os.getuid()}-old.part",
        f"hfq-{os.getuid() + 1}-other",
        "hfq-notes",
    ):
        os.close(os.open(tmp_path / name, os.O_CREAT | os.O_RDWR, 0o600))
    arena = SharedMemory.open("key", NBYTES, fives, tmp_path)
    assert files(tmp_path) == sorted(
        [NAME, f"hfq-{os.getuid()}-used", f"hfq-{os.getuid() + 1}-other", "hfq-notes"]
    )
    assert (used.memory[0], arena.memory[0]) == (5, 5)


def test_a_fill_that_fails_leaves_nothing_and_the_next_one_fills(tmp_path):
    kept = []

    def fail(memory):
        kept.append(memory)  # as a traceback does
        raise CheckpointError("The disk is on fire.", fix="wait")

    with refused("on fire"):
        SharedMemory.open("key", NBYTES, fail, tmp_path)
    assert files(tmp_path) == []
    assert SharedMemory.open("key", NBYTES, fives, tmp_path).was_filled


@pytest.fixture
def warnings(caplog):
    logging.getLogger("hfq").propagate, before = True, logging.getLogger("hfq").propagate
    yield caplog
    logging.getLogger("hfq").propagate = before


def test_without_room_there_is_a_warning_and_no_arena(tmp_path, monkeypatch, warnings):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert SharedMemory.open("key", NBYTES, never, tmp_path) is None
    assert files(tmp_path) == []
    assert f"{NBYTES} bytes needed" in warnings.text
    assert "No space left on device" in warnings.text


def test_without_shared_memory_there_is_a_warning_and_no_arena(tmp_path, warnings):
    assert SharedMemory.open("key", NBYTES, never, tmp_path / "none") is None
    assert "no shared memory" in warnings.text


@pytest.mark.parametrize("name", [NAME, f"{NAME}.part"])
@pytest.mark.parametrize("obstacle", ["open to others", "a link", "a folder", "another user's"])
def test_a_name_that_is_not_ours_alone_is_not_used(tmp_path, warnings, name, obstacle):
    path = tmp_path / name
    if obstacle == "a link":
        (tmp_path / "target").write_bytes(b"\x05" * NBYTES)
        path.symlink_to("target")
    elif obstacle == "a folder":
        path.mkdir()
    else:
        path.write_bytes(b"\x05" * NBYTES)
        path.chmod(0o644 if obstacle == "open to others" else 0o600)
    if obstacle == "another user's":
        if os.getuid():
            pytest.skip("needs root")
        os.chown(path, 1, 1)
    first = SharedMemory.open("key", NBYTES, fives, tmp_path)
    second = SharedMemory.open("key", NBYTES, never, tmp_path)
    assert first.memory[0] == second.memory[0] == 5
    assert f"cannot use the name {tmp_path / NAME}" in warnings.text
    assert path.is_symlink() or path.exists()
    assert (tmp_path / f"{NAME}-1").stat().st_mode & 0o777 == 0o600


def test_a_file_of_another_size_is_not_used(tmp_path, warnings):
    arena = SharedMemory.open("key", NBYTES, fives, tmp_path)
    other = SharedMemory.open("key", NBYTES + 1, fives, tmp_path)
    assert f"{NBYTES} bytes instead of {NBYTES + 1}" in warnings.text
    assert (arena.memory[0], len(other.memory)) == (5, NBYTES + 1)


def test_two_processes_hold_one_copy():
    """The proportional sizes of two users add up to one arena, in the node's own shared memory."""
    folder, nbytes = "/dev/shm", 24 << 20
    if not os.path.isdir(folder) or os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < 2 * nbytes:
        pytest.skip("no shared memory")
    key = f"test-{os.getpid()}"
    with process(folder, "user", nbytes, key) as first, process(folder, "user", nbytes, key) as second:
        assert sorted([first.stdout.readline(), second.stdout.readline()]) == [
            "ready False\n",
            "ready True\n",
        ]
        sizes = []
        for user in (first, second):
            user.stdin.write("\n")
            user.stdin.flush()
            sizes.append(int(user.stdout.readline()))
        for user in (first, second):
            user.communicate("", timeout=30)
    assert 0.95 * nbytes < sum(sizes) < 1.05 * nbytes
    assert min(sizes) > 0.4 * nbytes
    assert not os.path.exists(f"{folder}/hfq-{os.getuid()}-{key}")
