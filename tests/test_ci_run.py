"""The steps of `.ci/run` that run behind others: their failures, and how they end."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEPS = """
good() { echo good; }
bad() { echo bad; false; echo unreached; }
slow() { (sleep 60; true); echo unreached; }
"""


@pytest.fixture
def started(tmp_path):
    """started(steps) → a process of `.ci/run` with these steps in place of its own."""
    script = tmp_path / ".ci" / "run"
    script.parent.mkdir()
    (tmp_path / "build").mkdir()
    helpers, own, _ = (ROOT / ".ci" / "run").read_text(encoding="utf-8").partition("\nenvironments() {")
    assert own

    def started(steps):
        script.write_text(helpers + STEPS + steps, encoding="utf-8")
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(["bash", script], **streams, start_new_session=True)

    return started


@pytest.mark.parametrize(
    ("steps", "status", "said"),
    [
        ("behind good; await good; echo on", 0, "good\non\n"),
        ("behind bad; echo on; await bad; echo unreached", 1, "on\nbad\n"),
        (
            "behind bad; while kill -0 ${processes[bad]}; do sleep 0.01; done 2> /dev/null; exit 3",
            3,
            "bad\n== bad, behind it, ended with status 1\n",
        ),
        ("behind slow; false", 1, "== slow, behind it, ended with status 143\n"),
    ],
)
def test_what_runs_behind_a_step_is_printed_and_its_failure_is_one(started, steps, status, said):
    with started(steps) as process:
        assert (process.communicate(timeout=50)[0], process.returncode) == (said, status)


# tail prints and stays one process: a shell between its echo and an exec would lose the signal
@pytest.mark.parametrize("step", ["echo begun > first; tail -f first", "echo begun; await slow"])
def test_an_interruption_ends_what_runs_behind_a_step(started, step):
    with started(f"behind slow; {step}; echo unreached") as process:
        assert process.stdout.readline() == "begun\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does; what runs behind has another group
        said, _ = process.communicate(timeout=50)  # up to the end of all that could still print
    assert (said, process.returncode) == ("== slow, behind it, ended with status 143\n", -signal.SIGINT)
