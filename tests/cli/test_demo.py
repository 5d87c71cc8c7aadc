"""`hfq demo`: its runs and table, what it refuses, and what an interruption leaves."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from hfq.checkpoint import memory_limit
from hfq.cli.demo import command
from hfq.cli.demo.limited_process import run_limited
from hfq.cli.main import app
from hfq.errors import SetupError

HFQ = [sys.executable, "-m", "hfq", "demo", "--size", "150MB", "--folder"]
MODULE = "tests.support.allocating"


@pytest.fixture
def printed(monkeypatch, tmp_path):
    """printed(rows) → what the command prints of these measurements, and its exit status."""

    def printed(rows):
        monkeypatch.setattr(command, "run_all", lambda *_: rows)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setenv("HFQ_ENABLE", "0")
        return CliRunner().invoke(app, ["demo", "--size", "100MB"], env={"COLUMNS": "150"})

    return printed


@pytest.mark.slow
def test_hfq_answers_exactly_where_plain_transformers_is_killed(tmp_path):
    done = subprocess.run([*HFQ, tmp_path, "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    limited, small, plain, reference = json.loads(done.stdout)["measurements"]
    assert limited["is_killed"]
    assert not any(row["is_killed"] for row in (small, plain, reference))
    assert (
        small["limit_nbytes"] == limited["limit_nbytes"] < min(limited["peak_nbytes"], plain["peak_nbytes"])
    )
    assert small["peak_nbytes"] <= small["limit_nbytes"]
    assert small["disk_nbytes"] > reference["disk_nbytes"] == plain["disk_nbytes"] == 0
    assert small["bit_identical"]
    assert small["answer_sha256"] == reference["answer_sha256"]
    assert len(set(small["new_tokens"])) > 1  # logits that are not finite would choose one token
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGINT, 130, "Interrupted. Run the same command again.\n"),
        (signal.SIGTERM, 143, ""),
        (signal.SIGHUP, 129, ""),
    ],
)
def test_an_interruption_prints_one_line_and_leaves_no_process_and_no_file(tmp_path, number, status, said):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*HFQ, tmp_path], **streams, start_new_session=True) as process:
        assert process.stdout.readline()  # the model is being made
        time.sleep(1)
        os.kill(process.pid, number) if number == signal.SIGTERM else os.killpg(process.pid, number)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (status, said)
    until = time.monotonic() + 60
    while _lives(process.pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _lives(process.pid)
    assert list(tmp_path.iterdir()) == []


def _lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_is_killed_at_its_limit_alone():
    free, small, large, late = (
        run_limited(MODULE, arguments, limit, "a run")
        for arguments, limit in (
            ((50_000_000, 0.02), None),
            ((1_000_000, 0.02), 30_000_000),
            ((50_000_000, 60), 30_000_000),
            ((50_000_000, 0), 30_000_000),
        )
    )
    assert (free.found, small.found) == ({"taken": 50_000_000}, {"taken": 1_000_000})
    assert large.found is late.found is None
    assert small.peak_nbytes < 30_000_000 < min(free.peak_nbytes, large.peak_nbytes, late.peak_nbytes)
    assert free.peak_nbytes < 80_000_000


@pytest.mark.parametrize("length", [75, 76, 200])
def test_a_temporary_folder_may_have_a_longer_path_than_a_socket(tmp_path, length):
    folder = str(tmp_path) + "/"
    folder += "t" * (length - len(folder)) or "t"
    os.mkdir(folder)
    code = f"from {run_limited.__module__} import run_limited; print(run_limited({MODULE!r}, (1000, 0), None, '').found)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TMPDIR": folder}, capture_output=True, text=True
    )
    assert done.stdout == "{'taken': 1000}\n", done.stderr
    assert os.listdir(folder) == []


def test_the_error_of_a_run_is_an_error_of_the_demo():
    with pytest.raises(SetupError, match="ValueError: nothing to take"):
        run_limited(MODULE, (0, 0), None, "a run")


@pytest.mark.parametrize(("identical", "status"), [(True, 0), (False, 1)])
def test_the_table_says_who_was_killed_and_who_is_exact(printed, identical, status):
    row = {"tool": "hfq", "limit_nbytes": 7e8, "is_killed": False, "imports_nbytes": 35e7, "peak_nbytes": 5e8}
    answered = row | {"disk_nbytes": 4e8, "tokens_per_second": 1.25, "bit_identical": identical}
    killed = row | {"tool": "plain transformers", "is_killed": True, "bit_identical": None}
    done = printed([killed, answered])
    assert done.exit_code == status
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines()]
    assert ["plain transformers", "700 MB", "killed at 500 MB", "-", "-", "-"] in lines
    assert ["hfq", "700 MB", "500 MB", "400 MB", "1.25", "yes" if identical else "no"] in lines


def test_a_killed_hfq_is_a_failure(printed):
    row = {"tool": "hfq", "limit_nbytes": 7e8, "is_killed": True, "imports_nbytes": 35e7, "peak_nbytes": 8e8}
    assert printed([row | {"bit_identical": None}]).exit_code == 1


def test_a_disk_that_is_too_full_gets_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HFQ_ENABLE", "0")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    done = CliRunner().invoke(app, ["demo", "--folder", str(tmp_path)])
    assert isinstance(done.exception, SetupError)
    assert "--folder" in done.exception.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("free", "fix"),
    [(2_000_000_000, "Pass --size 490MB, or free memory."), (800_000_000, "Free memory.")],
)
def test_a_machine_with_too_little_memory_is_told_what_fits(tmp_path, monkeypatch, free, fix):
    monkeypatch.setattr(memory_limit, "available_memory", lambda: free)
    with pytest.raises(SetupError) as caught:
        command.demo(folder=tmp_path)
    assert caught.value.fix == fix
    assert list(tmp_path.iterdir()) == []


def test_a_system_without_measurements_of_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "peak_memory", lambda pid: 0)
    with pytest.raises(SetupError, match="cannot measure memory"):
        command.demo(folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_command_left_in_the_cache_is_deleted_by_the_next_alone(tmp_path):
    def names():
        return {path.name for path in tmp_path.iterdir()}

    (tmp_path / "hfq-demo-left" / "model").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    with (
        command._new_folder(tmp_path, is_cache=False),  # a folder of the user: nothing is deleted
        command._new_folder(tmp_path, is_cache=True),  # another command runs
    ):
        assert len(names()) == 4
    assert names() == {"hfq-demo-left", "other"}
    with command._new_folder(tmp_path, is_cache=True) as own:
        assert names() == {own.name, "other"}
        with command._new_folder(tmp_path, is_cache=True) as second:
            assert names() == {own.name, second.name, "other"}
    assert names() == {"other"}
