"""Tests of the build of the C++ library.

It runs once for all callers, damaged files are never loaded, and a failure is harmless.
"""

import _ctypes
import logging
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from hfq.checkpoint.private_folder import user_cache
from hfq.errors import SetupError
from hfq.kernels.cpp import build as building
from hfq.kernels.cpp import library
from tests.support import programs

FAKE = """#!/bin/sh
if [ "$1" = --version ]; then echo fake 1; exit; fi
echo run >> "$FAKE_LOG"
sleep 0.3
while [ $# -gt 1 ]; do if [ "$1" = -o ]; then cp "$FAKE_LIBRARY" "$2"; fi; shift; done
"""
LIBRARY = Path(_ctypes.__file__).read_bytes()


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Sets a slow compiler that copies a library of Python; returns the number of its runs."""
    compiler, log = tmp_path / "fake++", tmp_path / "log"
    compiler.write_text(FAKE)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("FAKE_LIBRARY", _ctypes.__file__)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    building._temporary_folder.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda: log.read_text().count("run") if log.exists() else 0


def reason_missing() -> str:
    """Returns why the C++ library is unavailable in a process that has just requested it."""
    with library.use("cpp"):
        return library.reason_missing()


def test_a_second_call_compiles_nothing(runs):
    first = building.build()
    assert first.read_bytes() == LIBRARY
    assert building.build() == first
    assert runs() == 1


def test_processes_that_start_at_once_compile_once(runs):
    code = "from hfq.kernels.cpp.build import build; print(len(build().read_bytes()))"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == [str(len(LIBRARY))] * 3
    assert runs() == 1


def test_threads_that_start_at_once_compile_once(runs):
    threads = [threading.Thread(target=building.build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert runs() == 1


@pytest.mark.parametrize("damage", [b"", LIBRARY[:-1], LIBRARY + b"n", None])
def test_a_damaged_library_is_built_again(runs, damage):
    made = building.build()
    made.write_bytes(damage) if damage is not None else made.unlink()
    assert building.build().read_bytes() == LIBRARY
    assert runs() == 2


def test_another_compiler_another_library(runs, tmp_path, monkeypatch):
    first = building.build()
    other = tmp_path / "other++"
    other.write_text(FAKE.replace("fake 1", "fake 2"))
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    assert building.build() != first


def test_a_compiler_with_arguments_is_run_with_them(runs, monkeypatch):
    plain = building.build()
    monkeypatch.setenv("CXX", f"env FAKE_ARGUMENT='1 2' {os.environ['CXX']}")
    assert building.build() != plain
    assert runs() == 2


@pytest.mark.parametrize("wanted", ["no-such-compiler -O3", "'g++"])
def test_a_compiler_that_was_asked_for_and_is_not_there_is_named(runs, monkeypatch, wanted):
    monkeypatch.setenv("CXX", wanted)
    assert wanted in reason_missing()


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """Leaves only the compiler of the package ziglang; returns its program."""
    zig = tmp_path / "site" / "ziglang" / "zig"
    zig.parent.mkdir(parents=True)
    (zig.parent / "__init__.py").touch()
    zig.write_text("#!/bin/sh\n")
    zig.chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path / "site")
    return zig


def test_the_compiler_of_a_package_is_found_and_compiles_for_any_processor(packaged):
    assert building.find_compiler() == [str(packaged), "c++", "-mcpu=baseline"]


@pytest.mark.parametrize("wanted", ["", "my++ -O3"])
def test_the_compiler_of_a_package_comes_last(packaged, monkeypatch, wanted):
    name = wanted.split()[0] if wanted else "clang++"
    own = packaged.parents[2] / name
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("CXX", wanted)
    assert building.find_compiler() == [str(own), *wanted.split()[1:]]


def test_a_package_without_its_compiler_is_none(packaged):
    packaged.unlink()
    with pytest.raises(
        building.BuildError, match=r"install g\+\+ or clang\+\+, or pip install 'hfq\[compiler\]'"
    ):
        building.find_compiler()


def test_nothing_but_the_library_is_left_behind(runs):
    made = building.build()
    made.unlink()
    made.with_name(f"{made.stem}.abc.tmp").mkdir()  # left by a killed process
    assert building.build() == made
    assert {file.suffix for file in made.parent.iterdir()} == {".so", ".sha256", ".lock"}
    assert made.parent.stat().st_mode & 0o777 == 0o700


def test_a_compiler_that_fails_is_quoted(runs, tmp_path):
    (tmp_path / "fake++").write_text(
        '#!/bin/sh\n[ "$1" = --version ] || { echo "x.cpp:1: error: no" >&2; exit 1; }\n'
    )
    with pytest.raises(building.BuildError, match="error: no"):
        building.build()


@pytest.fixture
def temporary(runs, caplog):
    """Returns a function that checks that a build is in a temporary folder, and that a warning says why."""

    def check(reason):
        with caplog.at_level(logging.WARNING, logger="hfq"):
            made = building.build()
            assert building.build() == made
        assert made.parent.name.startswith("hfq-native-")
        assert caplog.text.count(reason) == runs() == 1

    return check


def test_a_cache_that_others_may_write_to_is_not_used(temporary):
    building.cache_folder().chmod(0o777)
    temporary("other users can write to")


def test_without_a_home_the_cache_is_temporary(temporary, monkeypatch):
    """As in a container without an entry in passwd."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: {}[number])
    temporary("hfq has no folder for its cache. (Set XDG_CACHE_HOME")
    with pytest.raises(SetupError, match="no folder for its cache"):
        user_cache()


def test_without_a_place_for_the_cache_it_is_temporary(temporary, tmp_path):
    (tmp_path / "cache").write_text("in the way")
    temporary("Not a directory")


def test_without_a_compiler_torch_multiplies_and_it_is_said_once(monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="hfq"), library.use("cpp"):
        assert library.library() is library.library() is None
        assert "no C++ compiler" in library.reason_missing()
    assert caplog.text.count("hfq multiplies in plain torch") == 1


def test_what_is_no_library_is_not_loaded(runs):
    assert "cannot be loaded" in reason_missing()


def test_switched_off_nothing_is_built_or_said(runs, monkeypatch, caplog):
    monkeypatch.setenv(library.SWITCH, "1")
    with library.use("auto"):
        library.start()
        assert library.library() is None
        assert library.reason_missing() == "HFQ_DISABLE_CPP=1"
    assert runs() == 0
    assert not caplog.text


def test_a_model_waits_for_the_build_that_was_begun(runs):
    with library.use("cpp"):
        library.start()
        library.start()
        assert "cannot be loaded" in library.reason_missing()
    assert runs() == 1


def test_the_child_of_a_fork_holds_no_lock_of_a_parent_that_was_killed(tmp_path, monkeypatch):
    parent = programs.start("lock_and_fork", tmp_path / "lock")
    child = int(parent.stdout.readline())
    parent.wait(30)
    monkeypatch.setattr(building, "SECONDS", 5)
    try:
        with building._locked(tmp_path / "lock"):
            os.kill(child, 0)  # raises if the child has ended
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdin.close(), parent.stdout.close()


def test_a_lock_is_given_back_though_a_child_of_a_fork_has_it_open(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "SECONDS", 5)
    monkeypatch.setattr(building, "_open_locks", set())
    with building._locked(tmp_path / "lock"):
        building._open_locks.clear()  # as if the fork came before the file was noted
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(1)
    try:
        with building._locked(tmp_path / "lock"):
            os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_child_of_a_fork_settles_for_itself(runs):
    with library.use("cpp"):
        library.start()
        child = os.fork()
        if child == 0:
            os._exit(0 if library.reason_missing() else 1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(subprocess, "_fork_exec"), reason="Python starts processes in another way")
def test_a_fork_while_the_compiler_is_started_keeps_none_of_its_pipes_open(runs, monkeypatch):
    started, fork_exec = threading.Event(), subprocess._fork_exec

    def slow(*arguments):
        if "-o" in map(os.fsdecode, arguments[0]):
            started.set()
            time.sleep(0.3)
        return fork_exec(*arguments)

    monkeypatch.setattr(subprocess, "_fork_exec", slow)
    thread = threading.Thread(target=building.build)
    thread.start()
    started.wait(30)
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(1)
    thread.join(20)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not thread.is_alive()
    assert runs() == 1


def test_the_compiled_part_runs_in_the_child_of_a_fork(native):
    import torch

    from hfq.kernels.cpp import kernel
    from tests.support.kernel_layers import CASES

    weight_format, tensors = CASES["w4 g32"].make()
    activations, before = torch.ones(32, 352), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = kernel.linear(activations, tensors, weight_format)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(kernel.linear(activations, tensors, weight_format), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(before)
